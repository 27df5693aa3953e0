"""Emulated kernels against the real ones: the ExecuTorch runtime's XNNPACK and torch's oneDNN, on this machine."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import BasicBlock, InvertedResidual, MobileNet, Recurrent, ResNet18, Transformer, reference, settled
from qdq_graphs import Net, Weight, fake, graph_of
from torch import Tensor, nn
from typer.testing import CliRunner

import quantplug
from quantplug.cli import app
from quantplug.core.errors import ConfigError, ModelError
from quantplug.core.specs.levels import Level
from quantplug.lowering import xnnpack
from quantplug.lowering.emulation import FixedPoint, KernelSet, Numerics, Row, emulate, kernel_set, rows
from quantplug.lowering.emulation.mismatch import mismatches

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "numerics.md"
# Powers of two with odd zero points: many results lie exactly between two integers.
A, B, C = (2.0**-5, -3), (2.0**-4, 5), (2.0**-3, 7)
IMAGE = (2, 8, 9, 7)


def differing(found, expected) -> int:
    """Returns how many elements of two lists of tensors differ."""
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
    return sum(int((one != other).sum()) for one, other in pairs)


def chain(s: Any, x: Tensor) -> Tensor:
    """Three convolutions with clamps, depthwise in the middle."""
    y = fake(F.relu(F.conv2d(fake(x, A), s.u(), s.b, padding=1)), B)
    y = fake(F.hardtanh(F.conv2d(y, s.v(), s.b, padding=1, groups=8), -0.6, 1.7), A)
    return fake(F.conv2d(y, s.w(), None, 2), C)


def three_convolutions() -> Net:
    return Net(chain, u=Weight(8, 8, 3, 3), v=Weight(8, 1, 3, 3), w=Weight(8, 8, 3, 3), b=torch.randn(8))


def mixture(s: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    """Every kind of arithmetic once."""
    a, b = fake(x, A), fake(y, B)
    linear = fake(F.linear(fake(a.flatten(1), A), s.w(), s.b), C)
    total = fake(F.relu(a + b), B)
    gate = fake(torch.sigmoid(a), (2.0**-8, -128))
    scaled = fake(fake(a * gate, A).mean((2, 3), keepdim=True), (2.0**-6, 5))
    pooled = fake(F.max_pool2d(total, 3, 2, 1), B)
    lines = [fake(F.leaky_relu(b, 0.1), A), fake(F.hardswish(a), B), fake(torch.maximum(a, b), C), fake(a - b, C)]
    return [linear, scaled, fake(torch.cat([total, b], 1), B), pooled, *lines]


@pytest.mark.slow
def test_r23_three_convolutions_have_no_mismatching_element_where_the_graph_has_some():
    torch.manual_seed(0)
    x = torch.randn(8, 8, 32, 32) * 1.5
    graph = graph_of(three_convolutions(), x)
    program, emulated = xnnpack.lower(graph, (x,)), emulate(graph, (x,))
    fresh = torch.randn(8, 8, 32, 32) * 1.5
    real = program(fresh)
    assert differing(emulated(fresh), real) == 0
    assert differing(graph(fresh), real) > 0
    assert {op.placement for op in emulated.ops} == {"int8"}
    assert set(emulated.levels) == {op.node for op in emulated.ops}


@pytest.mark.slow
def test_r05_r23_kinds_of_arithmetic_have_no_mismatching_element():
    torch.manual_seed(0)
    inputs = (torch.randn(IMAGE) * 2, torch.randn(IMAGE) * 2)
    graph = graph_of(Net(mixture, w=Weight(6, 8 * 9 * 7), b=torch.randn(6)), *inputs)
    program, emulated = xnnpack.lower(graph, inputs), emulate(graph, inputs)
    assert [op for op in program.ops if op.placement != "int8"] == []
    fresh = (torch.randn(IMAGE) * 2, torch.randn(IMAGE) * 2)
    assert differing(emulated(*fresh), program(*fresh)) == 0
    assert differing(graph(*fresh), program(*fresh)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("block", [BasicBlock(8, 8, 1), InvertedResidual(8, 8, 1)], ids=["resnet", "mobilenet"])
def test_r23_residual_blocks_have_no_mismatching_element(block):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16)
    graph = reference(settled(block, x), quantplug.get_quantizer("xnnpack"), x)
    emulated = emulate(graph, (x,))
    fresh = torch.randn(2, 8, 16, 16)
    assert differing(emulated(fresh), xnnpack.lower(graph, (x,))(fresh)) == 0
    assert {op.placement for op in emulated.ops} == {"int8"}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (ResNet18(8, 10), (2, 3, 64, 64)),
        (MobileNet(), (2, 3, 32, 32)),
        (Transformer(), (2, 6, 16)),
        (Recurrent(), (2, 4, 8)),
    ],
    ids=["resnet18", "mobilenet", "transformer", "lstm"],
)
@pytest.mark.parametrize("backend", ["x86", pytest.param("xnnpack", marks=pytest.mark.slow)])
def test_r23_whole_models_have_no_mismatching_element(backend, model, shape):
    torch.manual_seed(0)
    x, fresh = torch.randn(shape), torch.randn(shape)
    quantizer = quantplug.get_quantizer(backend)
    graph = reference(settled(copy.deepcopy(model), x), quantizer, x)
    program, emulated = quantizer.backend.lower(graph, (x,)), emulate(graph, (x,), backend)
    # The head writes floats, on some processors another last bit; a step of any integer would be far more.
    torch.testing.assert_close(emulated(fresh), program(fresh), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(emulated.ops, program.ops, strict=False):
        assert (ours.node, ours.placement) == (theirs.node, theirs.placement) or backend == "xnnpack"


@pytest.mark.slow
def test_r08_quantization_of_floats_rounds_as_the_runtime_does():
    """Numbers next to the middle between two steps show the last bit of the reciprocal."""
    torch.manual_seed(0)
    parameters = [(float(torch.rand(()).double() + 1e-3), int(torch.randint(-128, 128, ()))) for _ in range(12)]
    steps = torch.randint(-128, 128, (512,)) + 0.5
    inputs = tuple(
        torch.cat([middle, middle * (1 + 2**-23), middle * (1 - 2**-23), torch.tensor([1e30, -1e30])])
        for middle in (steps * scale for scale, _ in parameters)
    )
    net = Net(lambda s, *xs: [fake(x, found) for x, found in zip(xs, parameters, strict=True)])
    graph = graph_of(net, *inputs)
    real = xnnpack.lower(graph, inputs)(*inputs)
    assert differing(emulate(graph, inputs)(*inputs), real) == 0
    assert differing(graph(*inputs), real) > 0


@pytest.mark.slow
def test_r08_means_whose_results_lie_between_two_integers():
    """Half a step for every second sum, up to the last bit of ratio / count."""
    torch.manual_seed(0)
    sizes = [(3, 5), (7, 7), (6, 7), (11, 13)]
    inputs = tuple(torch.randn(16, 32, *size) * 0.8 for size in sizes)
    scales = [0.0317 * 2 / (high * wide) for high, wide in sizes]

    def function(s: Net, *xs: Tensor) -> list[Tensor]:
        means = [fake(x, (0.0317, -3)).mean((2, 3), keepdim=True) for x in xs]
        return [fake(mean, (scale, 9)) for mean, scale in zip(means, scales, strict=True)]

    graph = graph_of(Net(function), *inputs)
    real = xnnpack.lower(graph, inputs)(*inputs)
    assert differing(emulate(graph, inputs)(*inputs), real) == 0
    assert differing(graph(*inputs), real) > 100


PARAMETERS = st.tuples(st.sampled_from([2.0**-5, 2.0**-4, 0.03, 0.0471, 0.11]), st.integers(-60, 60))


def random_net(seed: int, kernel: int, groups: int, found) -> Net:
    a, b, c, d = found
    torch.manual_seed(seed)

    def function(s: Any, x: Tensor, y: Tensor) -> Tensor:
        u, v = fake(x, a), fake(y, b)
        w = fake(F.conv2d(u, s.w(), s.b, 1, kernel // 2, groups=groups), c)
        return fake(F.relu(fake(w + v, d) * u), c)

    return Net(function, w=Weight(8, 8 // groups, kernel, kernel), b=torch.randn(8))


def check_random(seed, kernel, groups, size, found) -> None:
    graph_inputs = tuple(
        torch.randn(1, 8, size, size, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 1)
    )
    graph = graph_of(random_net(seed, kernel, groups, found), *graph_inputs)
    program = xnnpack.lower(graph, graph_inputs, minimum_sqnr=-100.0)
    assert {op.placement for op in program.ops} == {"int8"}
    assert differing(emulate(graph, graph_inputs)(*graph_inputs), program(*graph_inputs)) == 0


RANDOM = {
    "seed": st.integers(0, 1000),
    "kernel": st.sampled_from([1, 3, 5]),
    "groups": st.sampled_from([1, 2, 8]),
    "size": st.integers(5, 12),
    "found": st.tuples(PARAMETERS, PARAMETERS, PARAMETERS, PARAMETERS),
}


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(**RANDOM)
def test_r23_any_shape_scale_and_zero_point(seed, kernel, groups, size, found):
    check_random(seed, kernel, groups, size, found)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(**RANDOM)
def test_r23_many_shapes_scales_and_zero_points(seed, kernel, groups, size, found):
    check_random(seed, kernel, groups, size, found)


@pytest.fixture(scope="module")
def x86_mismatches():
    return mismatches("x86")


def check_levels(kernels: str, found) -> None:
    assert {row.row for row in found} == set(kernel_set(kernels).levels)
    assert [f"{row.row}: {row.emulated}" for row in found if not row.holds] == []
    assert sum(row.reference.differing for row in found) > 0


@pytest.mark.slow
def test_r08_every_onednn_kernel_is_at_its_declared_level(x86_mismatches):
    check_levels("x86", x86_mismatches)


@pytest.mark.slow
def test_r08_every_xnnpack_kernel_is_at_its_declared_level():
    check_levels("xnnpack", mismatches("xnnpack"))


@pytest.mark.slow
def test_r08_a_kernel_that_claims_too_much_is_found():
    """The same kernels with ties rounded up: exact is claimed, one step is the truth."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 24, 24)
    weight = Weight(8, 8, 3, 3)
    weight.scales.fill_(2.0**-9)
    graph = graph_of(Net(lambda s, x: fake(F.conv2d(fake(x, A), s.w()), C), w=weight), x)
    claimed = KernelSet("liar", (Row("convolution", rows.products(Numerics(requantize=FixedPoint(31)), "conv2d")),))
    emulated, real = emulate(graph, (x,), claimed), xnnpack.lower(graph, (x,))(x)
    (level,) = emulated.levels.values()
    assert "by 1 steps at most" in level.objection(emulated(x), real, step=C[0])
    assert Level.ONE_STEP.objection(emulated(x), real, step=C[0]) is None
    assert level.objection(emulate(graph, (x,))(x), real, step=C[0]) is None


def test_r08_what_the_target_keeps_float_is_float_and_says_why():
    x = torch.randn(IMAGE)
    apart = graph_of(Net(lambda s, x: fake(fake(x, (1e-6, 0)) + fake(x, A), A)), x)
    (operator,) = emulate(apart, (x,)).ops
    assert operator.placement == "float"
    assert "ratio" in operator.reason
    softmax = graph_of(Net(lambda s, x: fake(fake(x).softmax(-1), (1 / 256, -128))), x)
    (operator,) = emulate(softmax, (x,)).ops
    assert operator.placement == "float"
    assert operator.reason
    assert not emulate(softmax, (x,)).levels


def test_r23_the_emulated_graph_is_integers_only_and_survives_saving(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16)
    graph = graph_of(three_convolutions(), x)
    before = str(graph.graph)
    emulated = emulate(graph, (x,))
    assert str(graph.graph) == before
    between = [n for n in emulated.module.graph.nodes if n.op == "call_module"]
    assert [type(emulated.module.get_submodule(n.target)).__name__ for n in between] == ["Quantize", *["Product"] * 3]
    loaded = torch.export.load(emulated.save(tmp_path / "emulated.pt2")).module()
    assert torch.equal(loaded(x), emulated(x))
    assert emulated.nbytes < 1.25 * (8 * 8 * 9 + 8 * 9 + 8 * 8 * 9)  # integer weights, and no copy beside them


def test_r08_products_with_parameters_of_run_time_agree_on_x86():
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 16)).eval()
    x = torch.randn(2, 8, 6, 6)
    quantizer = quantplug.get_quantizer("x86").set_global("int8_dynamic")
    reference = quantplug.convert_pt2e(quantplug.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer))
    program = quantizer.backend.lower(reference, (x,))
    emulated: Any = quantizer.backend.emulate(reference, (x,))
    assert emulated.levels == dict.fromkeys(("conv2d", "relu", "linear"), Level.APPROXIMATE)
    for scale in (1, 3):
        torch.testing.assert_close(program(scale * x), emulated(scale * x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_emulation_keeps_dynamic_sizes(tmp_path):
    x = torch.randn(4, 8, 6, 6)
    shapes = ({0: torch.export.Dim("n", max=64)},)
    graph = torch.export.export(three_convolutions().eval(), (x,), dynamic_shapes=(shapes,)).module()
    emulated = emulate(graph, (x,), dynamic_shapes=shapes)
    loaded = torch.export.load(emulated.save(tmp_path / "emulated.pt2")).module()
    fresh = torch.randn(7, 8, 6, 6)
    assert torch.equal(loaded(fresh), emulated(fresh))


def test_errors_of_emulate():
    x = torch.randn(IMAGE)
    with pytest.raises(ConfigError, match="no kernels 'npu' to emulate; choose one of"):
        emulate(graph_of(three_convolutions(), x), (x,), "npu")
    with pytest.raises(ModelError, match="emulate takes an exported graph module"):
        emulate(nn.Linear(2, 2), (x,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no kernels 'npu' to compare with"):
        mismatches("npu")


def test_r08_the_document_has_every_kernel_with_its_level():
    lines = DOCUMENT.read_text().splitlines()
    for kernels in ("xnnpack", "x86"):
        for name, level in kernel_set(kernels).levels.items():
            assert any(line.startswith(f"| {name} | {level.value} |") for line in lines), name


@pytest.mark.slow
def test_r08_the_command_prints_the_table_and_fails_where_a_level_does_not_hold(x86_mismatches, monkeypatch):
    name = "quantplug.lowering.emulation.mismatch.mismatches"
    monkeypatch.setattr(name, lambda kernels: x86_mismatches)
    result = CliRunner().invoke(app, ["numerics", "--backend", "x86"], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert all(row.row in result.output for row in x86_mismatches)
    wrong = [replace(row, level=Level.EXACT) for row in x86_mismatches]
    monkeypatch.setattr(name, lambda kernels: wrong)
    result = CliRunner().invoke(app, ["numerics", "--backend", "x86"])
    assert result.exit_code == 1
    assert "float output' is not exact" in result.output.replace("\n", " ")
