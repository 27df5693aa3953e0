"""What models remember from call to call, in every artefact: against the q/dq graph and the float model."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stateful_models import MODELS, build, calls
from torch import nn
from torch.utils import _pytree as pytree

import quantplug
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.cortex_m import lower
from quantplug.lowering.xnnpack.runtime import Method

# Arm refuses models with a state: ExecuTorch's passes lose the order of outputs there.
STATEFUL = ("xnnpack", "x86", "openvino", "cortex_m", "native")
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


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "strict"), [*((name, False) for name in STATEFUL), ("x86", True)])
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_a_state_goes_on_from_call_to_call_in_the_program_alone(kind, backend, strict, tmp_path):
    model, artefact = quantized(kind, backend, strict)
    reference = copy.deepcopy(artefact.reference)
    before = {name: buffer.clone() for name, buffer in artefact.reference.named_buffers()}
    first = []
    for x in calls(5):
        found, expected = artefact(x), reference(x)
        agree(found, expected, 35)
        agree(found, model(x), 18)
        first.append(found)
    assert artefact.nbytes > 0
    artefact.save(tmp_path / "model.pt2")
    assert all(torch.equal(buffer, before[name]) for name, buffer in artefact.reference.named_buffers())
    artefact.program.restart()
    for one, x in zip(first, calls(5), strict=True):
        agree(one, artefact(x), 200)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "openvino"])
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_a_saved_program_begins_with_the_models_state(kind, backend, tmp_path):
    _, artefact = quantized(kind, backend)
    first = [artefact(x) for x in calls(3)]
    loaded = type(artefact.program).load(artefact.save(tmp_path / "model.pt2"))
    for one, other in zip(first, [loaded(x) for x in calls(3)], strict=True):
        agree(one, other, 90)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernels", ["xnnpack", "x86"])
@pytest.mark.parametrize("kind", MODELS, ids=IDS)
def test_emulation_keeps_the_state(kind, kernels):
    artefact = quantized(kind, kernels)[1]
    emulated = quantplug.get_quantizer(kernels).backend.emulate(artefact.reference, (calls(1)[0],))
    reference = copy.deepcopy(artefact.reference)
    for x in calls(4):
        agree(emulated(x), reference(x), 35)


@pytest.mark.slow
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
        self.count: torch.Tensor
        self.register_buffer("count", torch.full((1,), 3.0))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_a_cortex_m_file_begins_with_the_models_state(tmp_path):
    x = torch.zeros(2)
    program = lower(torch.export.export(FromThree(), (x,)).module(), (x,))
    method = Method(program.save(tmp_path / "model.pte").read_bytes())
    assert [method([x])[0].tolist() for _ in range(2)] == [[4, 4], [5, 5]]


class FastWeights(nn.Module):
    """A matrix that grows by outer products, from next to nothing, so that early calls are a few coarse steps."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.register_buffer("fast", torch.zeros(12, 12))

    def forward(self, x):
        y = self.read(x)
        self.fast.addmm_(y.t(), y)
        return self.out(y @ self.fast)


class DecayingLayer(nn.Module):
    """State that is the weight of one layer and the bias of another."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.weight: torch.Tensor
        self.bias: torch.Tensor
        self.register_buffer("weight", torch.randn(12, 12) * 0.4)
        self.register_buffer("bias", torch.randn(4))

    def forward(self, x):
        y = F.linear(self.read(x), self.weight)
        self.weight.mul_(0.5)
        self.bias.add_(1)
        return F.linear(y, self.out.weight, self.bias)


class DecayingParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x):
        y = self.read(x) * self.gain
        with torch.no_grad():
            self.gain.mul_(0.5)
        return self.out(y)


class OneMemory(nn.Module):
    """A buffer and a view of all of it."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.register_buffer("written", torch.zeros(2, 12))
        self.register_buffer("seen", self.written.view(2, 12))

    def forward(self, x):
        before = self.out(self.seen)
        self.written.copy_(self.read(x))
        return before + self.out(self.seen)


class Returned(nn.Module):
    """Returns a buffer, what was written into it, and another one that takes what it was."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(12, 12)
        self.now: torch.Tensor
        self.register_buffer("now", torch.zeros(2, 12))
        self.register_buffer("before", torch.zeros(2, 12))

    def forward(self, x):
        y = self.read(x)
        self.before.copy_(self.now)
        self.now.copy_(y)
        return {"y": y, "now": self.now, "before": self.before, "sum": self.now.sum(1)}


class Normalized(nn.Module):
    """Statistics of its own, by which a batch norm divides."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        y = self.read(x)
        self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return self.out(F.relu(F.batch_norm(y, self.mean, torch.ones(12))))


class Unread(nn.Module):
    """Buffers that scopes of their own write, whose results nobody reads there."""

    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(12, 12), nn.Linear(12, 4)
        self.register_buffer("gain", torch.ones(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = self.read(x) * self.gain
        with torch.no_grad():
            self.gain.mul_(0.5)
        with torch.autocast("cpu", enabled=False):
            self.calls.add_(1)
        return self.out(y), self.calls.clone()


WRITTEN = (Unread, FastWeights, DecayingLayer, DecayingParameter, OneMemory, Returned, Normalized)


def growing(count=4):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 12, generator=generator) * (1 + 0.3 * i) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
@pytest.mark.parametrize("kind", WRITTEN, ids=lambda kind: kind.__name__)
def test_state_in_unusual_places(kind, backend, tmp_path):
    model = build(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.set_grad_enabled(kind is not Normalized):  # torch's batch norm takes no statistics with gradients
        exported = torch.export.export(copy.deepcopy(model), (growing()[0],))
    artefact = quantplug.quantize(exported, (growing()[0],), backend, growing(), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        reference = copy.deepcopy(artefact.reference)
        first = []
        for x in growing():
            found, expected = artefact(x), reference(x)
            agree(found, expected, 35)
            agree(found, model(x), 15)
            first.append(copy.deepcopy(found))
    if backend != "xnnpack":
        program: Any = type(artefact.program)
        loaded = program.load(artefact.save(tmp_path / "model.pt2"))
        for x, found in zip(growing(), first, strict=True):
            agree(loaded(x), found, 90)


class Narrow(nn.Module):
    """Keeps a state of another dtype than what is written into it."""

    def __init__(self, dtype, write):
        super().__init__()
        self.linear, self.write = nn.Linear(12, 12), write
        self.register_buffer("seen", torch.zeros(2, 12, dtype=dtype))

    def forward(self, x):
        y = self.linear(x)
        self.write(self.seen, y)
        return y + self.seen.to(y.dtype)


WRITES = {"added": lambda seen, y: seen.add_(y.to(seen.dtype)), "copied": lambda seen, y: seen.copy_(3 * y)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xnnpack", "x86", "openvino"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8])
def test_a_state_of_another_dtype_than_what_is_written(dtype, write, backend):
    torch.manual_seed(0)
    model, inputs = Narrow(dtype, WRITES[write]).eval(), growing()
    artefact = quantplug.quantize(model, (inputs[0],), backend, inputs, progress=False)
    reference = copy.deepcopy(artefact.reference)
    with torch.no_grad():
        for x in inputs:
            agree(artefact(x), reference(x), 35)


class Parts(nn.Module):
    """The first rows of a buffer as a buffer of their own."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(12, 4)
        self.register_buffer("rows", torch.zeros(4, 12))
        self.register_buffer("head", self.rows[:2])

    def forward(self, x):
        self.rows.add_(1)
        self.head.add_(x)
        return self.out(self.rows)


def test_buffers_that_overlap_are_refused_where_they_are_written():
    with pytest.raises(quantplug.QuantplugError, match="'rows' and 'head' of the model are parts of one memory"):
        quantplug.quantize(build(Parts), (growing()[0],), "x86", growing(), progress=False)
