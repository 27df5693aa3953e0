"""Models of the XNNPACK comparison by name, with random weights: recurrent layers, encoders, vision networks.

`make("swin_t", size=96, seed=0)` gives the model in evaluation and a function from a seed to its inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vision import torchvision_models

Inputs = tuple[Tensor, ...]
Sample = Callable[[int], Inputs]
TOKENS, VOCABULARY = 64, 1000

# The table of the documentation; every other name is looked up among torchvision's models.
TABLE = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "densenet121",
    "convnext_tiny", "swin_t", "vit", "deeplabv3_mobilenet_v3_large", "LSTM", "GRU", "bert", "bert_dynamic",
)  # fmt: skip


class Recurrent(nn.Module):
    """A recurrent layer and a classifier on its last step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(32, 64, batch_first=True)
        self.classify = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        """Returns the logits of a (batch, time, features) sequence."""
        return self.classify(self.layer(x)[0][:, -1])


def images(size: int) -> Sample:
    """Returns seeded images."""
    return lambda seed: (torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed)),)


def sequences(*shape: int) -> Sample:
    """Returns seeded sequences of features."""
    return lambda seed: (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),)


def tokens(length: int = TOKENS) -> Sample:
    """Returns seeded sequences of tokens."""
    return lambda seed: (torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed)),)


def language(kind: str, **sizes: int) -> nn.Module:
    """Returns a language model of the transformers library whose first result is its answer."""
    torchvision_models()  # transformers imports torchvision where it is installed
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, use_cache=False, return_dict=False, **sizes)
    return FirstResult(getattr(transformers, f"{kind}Model")(config))


class FirstResult(nn.Module):
    """A model that returns the first of its results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        """Returns the first result of the model."""
        return self.model(x)[0]


def vision(name: str, size: int) -> nn.Module:
    """Returns a model of torchvision by name; "vit" is vit_b_16 with 4 layers."""
    models = torchvision_models()
    if name == "vit":
        transformer = models.VisionTransformer(size, 16, 4, 12, 768, 3072)
        nn.init.trunc_normal_(transformer.heads.head.weight, std=0.02)  # torchvision's is zero before training
        return transformer
    loose = {"weights_backbone": None} if name.startswith(("deeplab", "lraspp", "fcn")) else {}
    model: nn.Module = models.get_model(name, weights=None, **loose)
    return FirstOutput(model) if loose else model


class FirstOutput(nn.Module):
    """A segmentation network without the dictionary around its result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        """Returns the scores of each pixel."""
        return self.model(x)["out"]


def make(name: str, size: int, seed: int) -> tuple[nn.Module, Sample]:
    """Returns a model with random weights and running statistics, and the maker of its inputs.

    Args:
        name: one of `TABLE` or a model of torchvision.
        size: height and width of images.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    bert = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    if name in ("LSTM", "GRU", "RNN"):
        return Recurrent(name).eval(), sequences(1, 8, 32)
    if name.startswith("bert"):
        return language("Bert", **bert).eval(), tokens()
    return with_statistics(vision(name, size), images(size)), images(size)


def with_statistics(model: nn.Module, sample: Sample) -> nn.Module:
    """Gives batch norms the statistics of a few batches, as training would, so that activations keep their size.

    Their outputs are 1 +- 1/2: with 0 +- 1, deep networks of random weights are chaotic, and one step of one integer
    in the first layer leaves 17 dB at the end of any program, so that a comparison of programs says nothing.
    """
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))]
    for norm in norms:
        norm.momentum = None  # plain averages
        nn.init.constant_(norm.weight, 0.5)
        nn.init.constant_(norm.bias, 1.0)
    model.train()
    with torch.no_grad():
        for batch in range(3 if norms else 0):
            model(torch.cat([sample(100 + 4 * batch + i)[0] for i in range(4)]))
    return model.eval()
