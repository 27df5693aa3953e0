"""Models of two and three parts, and quantizers to put together, that tests of compositions share."""

import torch
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch
from models import exported
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e as torchao
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as torchao_x86

import quantplug
from quantplug import ComposableQuantizer, Region, explain, get_quantizer

CORES = {"ours": quantplug, "torchao": torchao}
KEY = "quantization_annotation"


class Tagger(nn.Module):
    """An embedding, an encoder, and a head over the mean of its results, for [N, T] indices."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, indices):
        return self.head(self.encoder(self.table(indices)).mean(1))


class Images(nn.Module):
    """A backbone of convolutions and a head of linear layers, for [N, 3, 10, 10]."""

    def __init__(self, norm: bool = False):
        super().__init__()
        middle = [nn.BatchNorm2d(8)] if norm else []
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.head(self.backbone(x))


WORDS = torch.arange(20).reshape(2, 10) % 50
X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(1))
BACKBONE, HEAD, ENCODER = Region(module="backbone"), Region(module="head"), Region(module="encoder")


# of 8 bits on any processor, as XNNPACK's
X86_CONFIG = quantplug.get_x86_quantization_config(weight_bits=8)


def mixed(**options):
    """XNNPACK in the backbone, x86 in the head."""
    return (
        ComposableQuantizer(**options)
        .add(get_quantizer("xnnpack"), BACKBONE, precedence=0)
        .add(get_quantizer("x86").set_global(X86_CONFIG), HEAD, precedence=0)
    )


def executorchs():
    return executorch.XNNPACKQuantizer().set_global(executorch.get_symmetric_quantization_config(True))


def torchaos_x86():
    return torchao_x86.X86InductorQuantizer().set_global(torchao_x86.get_default_x86_inductor_quantization_config())


def converted(model, quantizer, *inputs, core=quantplug):
    prepared = core.prepare_pt2e(exported(model, *inputs), quantizer)
    prepared(*inputs)
    return core.convert_pt2e(prepared)


def owners(model):
    return {row.node: row.owner for row in explain(model).rows if row.quantized}


class Toy(Quantizer):
    """A quantizer of somebody's, made of functions of the graph."""

    def __init__(self, annotate=lambda model: None, validate=lambda model: None, callback=lambda *arguments: None):
        super().__init__()
        self.functions = annotate, validate
        self.prepare_obs_or_fq_callback = callback

    def annotate(self, model):
        self.functions[0](model)
        return model

    def validate(self, model):
        self.functions[1](model)


def overwrite(*targets):
    """Annotates every call of some operators, whoever annotated it before, with int8 at input and output."""

    def annotate(model):
        spec = quantplug.get_symmetric_quantization_config().input_activation
        for node in model.graph.nodes:
            if node.target in targets:
                node.meta[KEY] = QuantizationAnnotation({node.args[0]: spec}, spec, _annotated=True)

    return annotate
