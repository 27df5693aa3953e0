"""Models that write their inputs in place: the outputs stay, the inputs too, in the graph and on the kernels."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e as torchao_convert
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e as torchao_prepare

import quantplug


class Whole(nn.Module):
    """An activation that writes what the model is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        F.hardswish(x, inplace=True)
        return self.layer(x)


class View(Whole):
    """The same through a view."""

    def forward(self, x):
        activated = F.hardswish(x[:, 1:], inplace=True)
        return self.layer(activated), activated * 2


class Scope(Whole):
    """The same in a submodel of the graph."""

    def forward(self, x):
        with torch.no_grad():
            x.add_(1)
        return self.layer(x)


class Twice(Whole):
    """Read under its own name after a write through another, which non-strict export calls `alias`."""

    def forward(self, x):
        whole = x[:, 0::1]
        halved = whole.mul_(0.5)
        return self.layer(torch.cat([x, halved], 1)), torch.cat([x, halved], 1)


MODELS = (Whole, View, Scope, Twice)


def batches():
    torch.manual_seed(0)
    return [torch.randn(4, 5, 8) for _ in range(3)]


def outputs(found):
    return found if isinstance(found, tuple) else (found,)


def close(found, expected):
    for one, other in zip(outputs(found), outputs(expected), strict=True):
        assert (other - one).norm() < 0.05 * other.norm()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("backend", "config"),
    [("xnnpack", "int8"), ("xnnpack", "int8_dynamic"), ("x86", "int8"), ("x86", "int8_dynamic"), ("openvino", "int8")],
)
def test_outputs_are_the_models_and_inputs_stay(model, backend, config, tmp_path):
    module, data = model().eval(), batches()
    given = copy.deepcopy(data)
    with pytest.warns(UserWarning, match="writes input 'x' in place"):
        program = quantplug.quantize(module, (data[0],), backend, data, config, progress=False)
    runs = [program, program.reference]
    if hasattr(type(program.program), "load"):
        suffix = {"x86": "pt2", "openvino": "xml"}[backend]
        kind: Any = type(program.program)
        runs.append(kind.load(program.save(tmp_path / f"model.{suffix}")))
    for x in data + data[:1]:
        for run in runs:
            close(run(x), module(x.clone()))
    assert all(map(torch.equal, data, given))


@pytest.mark.parametrize("model", MODELS)
def test_calibration_and_training_leave_the_users_data_as_it_is(model):
    data = batches()
    given = copy.deepcopy(data)
    exported = torch.export.export(model().eval(), (data[0].clone(),)).module()
    with pytest.warns(UserWarning, match="return the new value if the caller needs it"):
        prepared = quantplug.prepare_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    quantplug.calibrate(prepared, data, progress=False)
    with pytest.warns(UserWarning, match="return the new value if the caller needs it"):
        trained = quantplug.prepare_qat_pt2e(exported, quantplug.get_quantizer("xnnpack"))
    for x in data:
        trained(x)
    assert all(map(torch.equal, data, given))


def test_graphs_of_others_are_lowered_so_too():
    """Dynamic configs leave the activation in float, and with it the write into the input."""
    module, data = Whole().eval(), batches()
    exported = torch.export.export(module, (data[0].clone(),)).module()
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_dynamic=True))
    prepared = torchao_prepare(exported, quantizer)
    prepared(data[0].clone())
    graph = torchao_convert(prepared)
    given = copy.deepcopy(data)
    with pytest.warns(UserWarning, match="'hardswish_' .* writes input 'x' in place"):
        program = quantplug.get_quantizer("xnnpack").backend.lower(graph, (data[0],))
    for x in data:
        close(program(x), module(x.clone()))
    assert all(map(torch.equal, data, given))
