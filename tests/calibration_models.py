"""Small prepared models for the calibration tests, in torchao's own prepare with a quantizer of two rules."""

import torch
from torch import nn
from torchao.quantization.pt2e import HistogramObserver as TorchaoHistogram
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from quantplug.core.observers import observer


class ConvLinearQuantizer(Quantizer):
    """Annotates input, weight and output of every convolution and linear, and relu's output."""

    def __init__(self, activation, weight):
        super().__init__()
        self.activation = QuantizationSpec(torch.int8, activation, -128, 127, torch.per_tensor_affine)
        self.weight = QuantizationSpec(torch.int8, weight, -127, 127, torch.per_channel_symmetric, ch_axis=0)

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target in (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default):
                edges = {node.args[0]: self.activation, node.args[1]: self.weight}
                annotation = QuantizationAnnotation(edges, self.activation, _annotated=True)
                node.meta["quantization_annotation"] = annotation
            elif node.target is torch.ops.aten.relu.default:
                edges = {node.args[0]: self.activation}
                annotation = QuantizationAnnotation(edges, self.activation, _annotated=True)
                node.meta["quantization_annotation"] = annotation
        return model

    def validate(self, model):
        pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.head(torch.relu(self.second(y)).mean((2, 3)))


def exported(model=None, shape=(4, 3, 12, 12), seed=0):
    torch.manual_seed(seed)
    model = (model or Net()).eval()
    return torch.export.export(model, (torch.randn(*shape),)).module()


def prepared(name="mse", weight="minmax", seed=0, **options):
    activation = TorchaoHistogram if name == "torchao" else observer(name, **options)
    return prepare_pt2e(exported(seed=seed), ConvLinearQuantizer(activation, observer(weight, per_channel=True)))


def batches(count=6, shape=(4, 3, 12, 12), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) * (1 + i % 3) for i in range(count)]


def qparams(model):
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "calculate_qparams"):
            scale, zero = module.calculate_qparams()
            found[name] = (scale.tolist(), zero.tolist())
    return found
