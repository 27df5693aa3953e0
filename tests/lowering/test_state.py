"""What models remember from call to call, in every artefact: against the q/dq graph and the float model."""

import copy

import pytest
import torch
from stateful_models import MODELS, build, calls
from torch import nn
from torch.utils import _pytree as pytree

import quantplug
from quantplug.core.compare import sqnr
from quantplug.lowering.cortex_m import lower
from quantplug.lowering.xnnpack.runtime import Method

STATEFUL = ("xnnpack", "x86", "openvino", "cortex_m", "tensorrt")
IDS = [kind.__name__ for kind in MODELS]


def quantized(kind, backend, strict=False):
    model, inputs = build(kind), calls(5)
    program = torch.export.export(copy.deepcopy(model), (inputs[0],), strict=strict)
    return model, quantplug.quantize(program, (inputs[0],), backend, [(x,) for x in inputs], progress=False)


def agree(found, expected, decibels):
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if other.is_floating_point():
            assert sqnr(one, other) > decibels
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("strict", [False, True], ids=["default", "strict"])
@pytest.mark.parametrize("backend", STATEFUL)
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_a_state_goes_on_from_call_to_call(kind, backend, strict):
    model, artefact = quantized(kind, backend, strict)
    reference = copy.deepcopy(artefact.reference)
    for x in calls(5):
        found, expected = artefact(x), reference(x)
        agree(found, expected, 35)
        agree(found, model(x), 18)


@pytest.mark.parametrize("backend", STATEFUL)
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_calling_the_program_advances_nothing_else(kind, backend, tmp_path):
    _, artefact = quantized(kind, backend)
    before = {name: buffer.clone() for name, buffer in artefact.reference.named_buffers()}
    first = [artefact(x) for x in calls(3)]
    assert artefact.nbytes > 0
    artefact.save(tmp_path / "model.pt2")
    assert all(torch.equal(buffer, before[name]) for name, buffer in artefact.reference.named_buffers())
    artefact.program.restart()
    for one, other in zip(first, [artefact(x) for x in calls(3)], strict=True):
        agree(one, other, 200)


@pytest.mark.parametrize("backend", ["x86", "openvino"])
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_a_saved_program_begins_with_the_models_state(kind, backend, tmp_path):
    _, artefact = quantized(kind, backend)
    first = [artefact(x) for x in calls(3)]
    loaded = type(artefact.program).load(artefact.save(tmp_path / "model.pt2"))
    for one, other in zip(first, [loaded(x) for x in calls(3)], strict=True):
        agree(one, other, 90)


@pytest.mark.parametrize("kernels", ["xnnpack", "x86"])
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_emulation_keeps_the_state(kind, kernels):
    artefact = quantized(kind, kernels)[1]
    emulated = quantplug.get_quantizer(kernels).backend.emulate(artefact.reference, (calls(1)[0],))
    reference = copy.deepcopy(artefact.reference)
    for x in calls(4):
        agree(emulated(x), reference(x), 35)


@pytest.mark.parametrize("kind", [MODELS[0], MODELS[1], MODELS[3]], ids=lambda kind: kind.__name__)
def test_a_compiled_program_keeps_the_state(kind, tmp_path):
    _, artefact = quantized(kind, "x86")
    with pytest.raises(quantplug.QuantplugError, match="A package keeps no state, and the model writes buffer"):
        artefact.program.package(tmp_path / "package.pt2")
    reference, run = copy.deepcopy(artefact.reference), artefact.program.compile()
    for x in calls(3):
        agree(run(x), reference(x), 35)
    artefact.program.restart()
    agree(artefact(calls(1)[0]), copy.deepcopy(artefact.reference)(calls(1)[0]), 35)


class FromThree(nn.Module):
    """Adds how often it was called, counted from three; no kernel of CMSIS-NN, so that it runs here."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.full((1,), 3.0))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_a_cortex_m_file_begins_with_the_models_state(tmp_path):
    x = torch.zeros(2)
    program = lower(torch.export.export(FromThree(), (x,)).module(), (x,))
    method = Method(program.save(tmp_path / "model.pte").read_bytes())
    assert [method([x])[0].tolist() for _ in range(2)] == [[4, 4], [5, 5]]
