"""Models of the field through the whole x86 flow: every one lowers, runs, and computes what its q/dq graph computes.

Small versions with random weights. In a deep one a single integer that falls to the other side of a tie reaches
every later layer, so that beside the agreement with the q/dq graph it counts as much that the program is as close
to the float model as the q/dq graph is.
"""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from extras import torchvision_models, transformers_module
from torch import nn
from x86_programs import alone

import quantplug
from quantplug.core.specs.levels import sqnr

from models import MobileNet, Recurrent, ResNet18, Signal, Transformer, settled  # isort: skip

IMAGES = (2, 3, 64, 64)


class Output(nn.Module):
    """A model of which one output counts."""

    def __init__(self, model, pick):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, x):
        return self.pick(self.model(x))


def seen(name, size=64, stages=None, **options):
    """A vision model, or its first stages, with statistics of its inputs, as after training."""
    found = torchvision_models()
    build = getattr(found, name, None) or getattr(found.segmentation, name, None) or getattr(found.video, name)
    model = build(weights=None, **options)
    model = model if stages is None else model.features[:stages]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = None
        if hasattr(module, "p"):
            module.p = 0.0
    shape = (4, 3, 4, 32, 32) if name == "r3d_18" else (4, 3, size, size)
    with torch.no_grad():
        model.train()(torch.randn(shape))
    model = Output(model, lambda found: found["out"]) if "weights_backbone" in options else model
    return model.eval(), (torch.randn(2, *shape[1:]),)


def vision_transformer():
    model = torchvision_models().VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # zero as it is made
    return model.eval(), (torch.randn(2, 3, 32, 32),)


SEGMENTING = {"weights_backbone": None}
GOOGLE = {"aux_logits": False, "init_weights": False}
VISION = {
    **{
        name: partial(seen, name)
        for name in (
            *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "densenet121"),
            *("convnext_tiny", "swin_t", "swin_v2_t", "regnet_y_400mf", "squeezenet1_1", "resnext50_32x4d"),
            *("mnasnet0_5", "r3d_18"),
        )
    },
    "vit": vision_transformer,
    # All stages with random weights make 27 dB of inputs with noise at 80 dB: in float, so that they test no kernel.
    "efficientnet_v2_s": lambda: seen("efficientnet_v2_s", stages=5),
    "alexnet": lambda: seen("alexnet", 80),
    "vgg11_bn": lambda: seen("vgg11_bn", 32),
    "googlenet": lambda: seen("googlenet", **GOOGLE),
    "inception_v3": lambda: seen("inception_v3", 96, **GOOGLE),
    "deeplabv3": lambda: seen("deeplabv3_mobilenet_v3_large", **SEGMENTING),
    "lraspp": lambda: seen("lraspp_mobilenet_v3_large", **SEGMENTING),
    "fcn": lambda: seen("fcn_resnet50", **SEGMENTING),
}


class Recurrence(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(16, 32, 2, batch_first=True, **options)
        self.head = nn.Linear(64 if options else 32, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


SEQUENCES = {
    "LSTM": lambda: (Recurrence(nn.LSTM).eval(), (torch.randn(2, 6, 16),)),
    "LSTM, both ways": lambda: (Recurrence(nn.LSTM, bidirectional=True).eval(), (torch.randn(2, 6, 16),)),
    "GRU": lambda: (Recurrence(nn.GRU).eval(), (torch.randn(2, 6, 16),)),
    "RNN": lambda: (Recurrence(nn.RNN).eval(), (torch.randn(2, 6, 16),)),
}

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# class, config class, options, input, index of the output; of Hugging Face's transformers
LANGUAGE: dict[str, Any] = {
    "bert": ("BertModel", "BertConfig", {**SMALL, "vocab_size": 100}),
    "bert, attention written out": (
        "BertModel",
        "BertConfig",
        {**SMALL, "vocab_size": 100, "attn_implementation": "eager"},
    ),
    "distilbert": ("DistilBertModel", "DistilBertConfig", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "albert": ("AlbertModel", "AlbertConfig", {**SMALL, "vocab_size": 100, "embedding_size": 32}),
    "roberta": ("RobertaModel", "RobertaConfig", {**SMALL, "vocab_size": 100}),
    "gpt2": ("GPT2Model", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False}),
    "opt": ("OPTModel", "OPTConfig", {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64, "use_cache": False}),
    "llama": ("LlamaModel", "LlamaConfig", {**SMALL, "num_key_value_heads": 2, "vocab_size": 100, "use_cache": False}),
    "t5": ("T5EncoderModel", "T5Config", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", {**SMALL, "image_size": 32, "patch_size": 8}),
    "wav2vec2": (
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **SMALL,
            "conv_dim": (32, 32),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "decoder_hidden_size": 32},
    ),
}
INPUTS = {"clip": (2, 3, 32, 32), "wav2vec2": (1, 800), "segformer": (1, 3, 64, 64)}


def language(name):
    transformers = transformers_module()
    model, config, options = LANGUAGE[name]
    built = getattr(transformers, model)(getattr(transformers, config)(**options)).eval()
    inputs = torch.randn(INPUTS[name]) if name in INPUTS else torch.randint(0, 100, (2, 16))
    return Output(built, lambda found: found[0]), (inputs,)


def whisper():
    modeling = transformers_module("transformers.models.whisper.modeling_whisper")
    options = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
    config = modeling.WhisperConfig(d_model=64, num_mel_bins=20, max_source_positions=16, **options)
    return Output(modeling.WhisperEncoder(config).eval(), lambda found: found[0]), (torch.randn(1, 20, 32),)


MODELS = {
    **VISION,
    **SEQUENCES,
    **{name: partial(language, name) for name in LANGUAGE},
    "whisper": whisper,
}
OWN = {
    "resnet": lambda: (settled(ResNet18(16, 10), torch.randn(4, 3, 32, 32)), (torch.randn(2, 3, 32, 32),)),
    "mobilenet": lambda: (settled(MobileNet(), torch.randn(4, 3, 32, 32)), (torch.randn(2, 3, 32, 32),)),
    "lstm": lambda: (Recurrent().eval(), (torch.randn(2, 5, 8),)),
    "transformer": lambda: (Transformer().eval(), (torch.randn(2, 5, 16),)),
    "signal": lambda: (Signal().eval(), (torch.randn(2, 4, 24),)),
}


def lowered(build, mode, *, strict=False, dynamic_shapes=None):
    """Returns the float model, the inputs, the q/dq graph and the program."""
    torch.manual_seed(0)
    model, inputs = build()
    exported = torch.export.export(model, inputs, strict=strict, dynamic_shapes=dynamic_shapes).module()
    quantizer = quantplug.get_quantizer("x86")
    config = quantizer.backend.config("int8" if mode == "qat" else mode, **({"is_qat": True} if mode == "qat" else {}))
    prepare = quantplug.prepare_qat_pt2e if mode == "qat" else quantplug.prepare_pt2e
    prepared = prepare(exported, quantizer.set_global(config))
    with torch.no_grad():
        prepared(*inputs)
        prepared(*inputs)
    reference = quantplug.convert_pt2e(prepared)
    return model, inputs, reference, quantizer.backend.lower(reference, inputs, dynamic_shapes=dynamic_shapes)


def require_agreement(model, inputs, reference, program):
    """The program is close to its q/dq graph, and where a deep model spreads single steps, as close to float."""
    with torch.no_grad():
        expected, found, true = reference(*inputs), program(*inputs), model(*inputs)
    kernels, theirs, ours = sqnr(found, expected), sqnr(expected, true), sqnr(found, true)
    print(f"{kernels:.1f} dB to the q/dq graph, which is {theirs:.1f} dB from float; the program {ours:.1f} dB")
    assert kernels > 30 or (kernels > theirs + 3 and ours > theirs - 1)


MODES = ("int8", "int8_dynamic", "int8_weight_only")


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", [*MODES, "qat"])
@pytest.mark.parametrize("name", OWN)
def test_small_models_agree_with_their_reference_in_every_mode(name, mode):
    require_agreement(*lowered(OWN[name], mode))


# Weights alone, and ranges of run time: what convolutions do with them, a few nets have as all have.
CASES = [
    (name, mode)
    for name in MODELS
    for mode in (MODES if name not in VISION or name in ("mobilenet_v3_small", "vit", "r3d_18") else MODES[:1])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_model_lowers_and_agrees_with_its_reference(name, mode):
    require_agreement(*lowered(MODELS[name], mode))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin_t", "LSTM", "bert"])
@pytest.mark.parametrize("mode", ["int8", "qat"])
def test_models_of_strict_export_and_of_training_agree_too(name, mode):
    require_agreement(*lowered(MODELS[name], mode, strict=mode == "int8"))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrence_of_any_batch_size_lowers(kind):
    batch = ({0: torch.export.Dim("batch", min=1, max=16)},)
    build = lambda: (Recurrence(kind).eval(), (torch.randn(2, 6, 16),))  # noqa: E731
    model, _, reference, program = lowered(build, "int8", dynamic_shapes=batch)
    require_agreement(model, (torch.randn(5, 6, 16),), reference, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "int8") for name in ("resnet18", "bert", "LSTM")), *zip(OWN, itertools.cycle(("int8_dynamic", "int8")))],
)
def test_eager_compiled_and_packaged_agree_for_any_batch(name, mode, tmp_path):
    batch = ({0: torch.export.Dim("batch", min=1, max=16)},)
    _, (x,), _, program = lowered({**OWN, **MODELS}[name], mode, dynamic_shapes=batch)
    assert sqnr(program.compile()(x), program(x)) > 30
    path = program.package(tmp_path / "model.pt2")
    inputs = [(torch.cat([x, x])[:size],) for size in (2, 3)]
    for given, found in zip(inputs, alone(path, *inputs), strict=True):
        assert sqnr(found, program(*given)) > 30
