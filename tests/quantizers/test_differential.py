"""Q02: our XNNPACKQuantizer against ExecuTorch's, on the same graphs through the same core."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as executorch
from models import Function, MyModel, Recurrent, ResNet18, SampleModel, Transformer, reference, settled
from torch import nn

from quantplug import BackendQuantizer, derive, get_symmetric_quantization_config
from quantplug.core.graph.facts import compute_nodes
from quantplug.quantizers.xnnpack import XNNPACK

QDQ = "quantized_decomposed."


def mlp(m, x):
    return m.two(F.relu(m.one(x)))


def residual(m, x):
    y = F.relu(m.conv(x))
    return F.relu(m.conv2(y) + y) * torch.cat([m.conv(x), y], 0).mean((2, 3), keepdim=True)


CASES = {
    "resnet18": lambda: (settled(ResNet18(8, 10), torch.randn(4, 3, 64, 64)), torch.randn(2, 3, 64, 64)),
    "sample": lambda: (SampleModel(), torch.randn(2, 3, 32, 32)),
    "tutorial": lambda: (MyModel(use_bn=True).eval(), torch.randn(1, 3, 10, 10)),
    "recurrent": lambda: (Recurrent(), torch.randn(2, 3, 8)),
    "transformer": lambda: (Transformer(), torch.randn(1, 5, 16)),
    "mlp": lambda: (Function(mlp, one=nn.Linear(8, 16), two=nn.Linear(16, 4, bias=False)), torch.randn(5, 8)),
    "residual": lambda: (
        Function(residual, conv=nn.Conv2d(3, 3, 1), conv2=nn.Conv2d(3, 3, 3, padding=1)),
        torch.randn(1, 3, 8, 8),
    ),
}
# Deliberate: the mean kernel rescales, so its output keeps its own, tighter range, and passes it on.
OWN_SCALE = {"resnet18": {"adaptive_avg_pool2d", "flatten", "linear"}, "residual": {"mean", "mul"}}
# Operators that both annotate, at the least.
COMPARED = {"resnet18": 49, "sample": 4, "tutorial": 4, "recurrent": 1, "transformer": 10, "mlp": 3, "residual": 7}


class OnTheSameGraph(BackendQuantizer):
    """Our rows without our rewrites: graphs that differ could not be compared."""

    backend = derive(XNNPACK, "xnnpack", transforms=())


def around(model):
    """For each compute node the q/dq arguments at its inputs and at its output."""
    found = {}
    for node in compute_nodes(model.graph):
        if str(node.target).startswith(QDQ):
            continue
        inputs = [described(model, n) for n in node.all_input_nodes if str(n.target).startswith(QDQ + "deq")]
        outputs = [described(model, n) for n in node.users if str(n.target).startswith(QDQ + "quantize")]
        found[node.name] = (inputs, outputs[:1])
    return found


def described(model, node):
    kind = str(node.target).removeprefix(QDQ).removeprefix("de").partition(".")[0]
    return (kind, *(plain(model, argument) for argument in node.args[1:]))


def plain(model, argument):
    if isinstance(argument, torch.fx.Node):
        return tuple(getattr(model, str(argument.target)).flatten().tolist()) if argument.op == "get_attr" else "node"
    return argument


def with_observers_of(theirs, ours):
    """Our config with their observers: other observers find other ranges."""
    ports = ("input_activation", "output_activation", "weight")
    taken = {port: getattr(theirs, port).observer_or_fake_quant_ctr for port in ports}
    return replace(ours, **{p: replace(getattr(ours, p), observer_or_fake_quant_ctr=taken[p]) for p in ports})


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [True, False], ids=["per_channel", "per_tensor"])
@pytest.mark.parametrize("case", CASES)
def test_q02_same_structure_dtypes_and_scales_where_both_annotate(case, per_channel):
    model, x = CASES[case]()
    config = executorch.get_symmetric_quantization_config(is_per_channel=per_channel)
    theirs = executorch.XNNPACKQuantizer().set_global(config)
    same_observers = with_observers_of(config, get_symmetric_quantization_config(per_channel))
    ours = OnTheSameGraph().set_global(same_observers)
    expected, found = (around(reference(model, quantizer, x)) for quantizer in (theirs, ours))
    assert found.keys() == expected.keys()
    both = [(name, e, o) for name, by in expected.items() for e, o in zip(by, found[name], strict=True) if e and o]
    assert {name for name, e, o in both if e != o} == OWN_SCALE.get(case, set())
    assert len({name for name, _, _ in both}) >= COMPARED[case]
