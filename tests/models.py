"""Small models that several tests share: architectures of the field, with few channels so that tests stay quick."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantplug
from quantplug.lowering.processor import kernels_saturate

# Where 8 bits come from elsewhere (another quantizer, a graph written down): what takes their place without VNNI is
# tested on every processor, in test_x86_compiled.py.
needs_vnni = pytest.mark.skipif(kernels_saturate(), reason="without VNNI, products of 8-bit activations stay float")


class BasicBlock(nn.Module):
    """ResNet's block: one ReLU module, used twice, the second time after an in-place add."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """He et al. 2016, 18 layers, as torchvision builds it; `width` is 64 there."""

    def __init__(self, width: int = 64, classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(width, width, 1)
        self.layer2 = self._stage(width, 2 * width, 2)
        self.layer3 = self._stage(2 * width, 4 * width, 2)
        self.layer4 = self._stage(4 * width, 8 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    @staticmethod
    def _stage(inside: int, outside: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inside, outside, stride), BasicBlock(outside, outside, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project, and add where the shapes allow."""

    def __init__(self, inside: int, outside: int, stride: int, expand: int = 2):
        super().__init__()
        hidden = inside * expand
        self.residual = stride == 1 and inside == outside
        self.conv = nn.Sequential(
            nn.Conv2d(inside, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    """A stem, four inverted residual blocks, and a classifier with dropout."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True)
        )
        self.blocks = nn.Sequential(
            InvertedResidual(width, width, 1),
            InvertedResidual(width, 2 * width, 2),
            InvertedResidual(2 * width, 2 * width, 1),
            InvertedResidual(2 * width, 3 * width, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(3 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class SampleModel(nn.Module):
    """The sample of the model-preparation notes: conv 1x1, relu, flatten, linear, for [N, 3, 32, 32]."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.relu(self.conv(x)), 1))


class MyModel(nn.Module):
    """The model of the BackendConfig tutorial, for [1, 3, 10, 10]."""

    def __init__(self, use_bn: bool = False):
        super().__init__()
        self.linear = nn.Linear(10, 3)
        self.conv = nn.Conv2d(3, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU()
        self.sigmoid = nn.Sigmoid()
        self.use_bn = use_bn

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.linear(x))
        if self.use_bn:
            x = self.bn(x)
        return self.sigmoid(self.relu(x))


class Recurrent(nn.Module):
    """An LSTM over [N, T, 8] with a linear layer on its last step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """One pre-norm layer with two heads over [N, T, 16], attention written out."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, steps, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = torch.softmax(q @ k.transpose(-1, -2) / (width // 2) ** 0.5, -1)
        x = x + self.project((attention @ v).transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Signal(nn.Module):
    """A residual block of convolutions over one dimension, for [N, 4, T]; its head reads all of T = 24 steps."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 16, 5, padding=2)
        self.one, self.two = nn.Conv1d(16, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=4)
        self.head = nn.Linear(16 * 12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        x = F.relu(self.two(F.relu(self.one(x))) + x)
        return self.head(F.max_pool1d(x, 2).flatten(1))


def settled(model: nn.Module, *inputs: Tensor, steps: int = 3) -> nn.Module:
    """Returns the model in eval mode, its batch norms filled with statistics of the given inputs."""
    model.train()
    with torch.no_grad():
        for _ in range(steps):
            model(*inputs)
    return model.eval()


def exported(model: nn.Module, *inputs: Tensor, strict: bool = False) -> torch.fx.GraphModule:
    """Returns the exported graph module of a model in eval mode."""
    return torch.export.export(model.eval(), inputs, strict=strict).module()


def observed(model: nn.Module, quantizer, *inputs: Tensor, strict: bool = False) -> torch.fx.GraphModule:
    """Returns the prepared graph of a model, calibrated with the inputs."""
    prepared = quantplug.prepare_pt2e(exported(model, *inputs, strict=strict), quantizer)
    with torch.no_grad():
        prepared(*inputs)
    return prepared


def reference(model: nn.Module, quantizer, *inputs: Tensor, strict: bool = False) -> torch.fx.GraphModule:
    """Returns the q/dq graph of a model, calibrated with the inputs."""
    return quantplug.convert_pt2e(observed(model, quantizer, *inputs, strict=strict))


def operators(model: torch.fx.GraphModule) -> list[str]:
    """Returns the operator names of a graph in order, without library and overload."""
    return [str(n.target).split(".")[1] for n in model.graph.nodes if n.op == "call_function" and "." in str(n.target)]


def node(model: torch.fx.GraphModule, name: str) -> torch.fx.Node:
    """Returns the node of a graph by its name."""
    return next(n for n in model.graph.nodes if n.name == name)


class Function(nn.Module):
    """A function of tensors as a module, with parts that it may use."""

    def __init__(self, function, **parts: nn.Module | nn.Parameter):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor):
        return self.function(self, *inputs)
