"""The models of the x86 benchmark, with random weights and activations that keep their size."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from vision import torchvision_models

CALIBRATION_BATCHES, CALIBRATION_SIZE = 4, 4


@dataclass
class Case:
    """A float model in eval mode, what it is measured on, and what quantizers see of the data.

    Attributes:
        name: the model's name.
        model: the float model.
        inputs: one batch.
        calibration: further batches.
        is_transformer: what NNCF and ONNX Runtime want to know, they quantize these in ways of their own.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    calibration: list[tuple[Tensor, ...]] = field(default_factory=list)
    is_transformer: bool = False

    def macs(self) -> int:
        """Returns how many multiply-accumulates one call takes."""
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            self.model(*self.inputs)
        return counter.get_total_flops() // 2


class Bert(nn.Module):
    """BERT base without its tuple of outputs: token numbers to hidden states."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        torchvision_models()  # transformers imports torchvision where it is installed
        import transformers

        self.encoder = transformers.BertModel(transformers.BertConfig(attn_implementation=attention))
        self.encoder.pooler = None  # nobody reads its result, and on a linear without reader torchao's quantizer fails

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns hidden states (batch, length, 768)."""
        hidden: Tensor = self.encoder(tokens).last_hidden_state
        return hidden


def mlp() -> nn.Module:
    """Two layers of 4,096: bound by memory bandwidth at batch 1."""
    return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))


class ResidualMLP(nn.Module):
    """Four blocks of 768 channels whose sums no norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last sum, of the input's shape (batch, rows, 768)."""
        for block in self.blocks:
            x = x + block(x)
        return x


def encoder() -> nn.Module:
    """Four layers of the size of bert-base, without embeddings."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def tokens(batch: int) -> tuple[Tensor, ...]:
    """A batch of 128 token numbers of BERT's vocabulary."""
    return (torch.randint(0, 30522, (batch, 128)),)


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "mlp": (mlp, lambda batch: (torch.randn(batch, 4096),)),
    "residual_mlp": (ResidualMLP, lambda batch: (torch.randn(batch, 128, 768),)),
    "encoder": (encoder, lambda batch: (torch.randn(batch, 128, 768),)),
    "bert": (Bert, tokens),
}
TRANSFORMERS = ("bert", "encoder", "vit")


def images(batch: int) -> tuple[Tensor, ...]:
    """A batch of random images."""
    return (torch.randn(batch, 3, 224, 224),)


def _with_statistics(model: nn.Module) -> nn.Module:
    """Gives batch norms the statistics of their inputs, as after training."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    if norms:
        with torch.no_grad():
            model.train()(*images(4))
    return model


def case(name: str, batch: int) -> Case:
    """Returns a model by name: one of `OWN`, or a classifier of torchvision.

    A new linear's bias and a vision transformer's head are not zero, so that outputs differ between inputs.
    """
    torch.manual_seed(0)
    if name in OWN:
        make, inputs = OWN[name]
        model = make()
    else:
        model, inputs = _with_statistics(torchvision_models().get_model(name)), images
        for head in (module for module in model.modules() if isinstance(module, nn.Linear)):
            if not bool(head.weight.any()):
                nn.init.normal_(head.weight, std=0.02)
    calibration = [inputs(CALIBRATION_SIZE) for _ in range(CALIBRATION_BATCHES)]
    is_transformer = name.startswith(TRANSFORMERS)
    return Case(name, model.eval().requires_grad_(False), inputs(batch), calibration, is_transformer)
