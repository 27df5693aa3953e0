"""What broke ExecuTorch's own XNNPACK flow is lowered, loaded, run and compared, or refused in words."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qdq_graphs import FULL, A, B, Net, Q, TensorWeight, Weight, decibels, dynamic, fake, graph_of
from torch import Tensor, nn

import quantplug
from quantplug.core.errors import ArtefactError, ConfigError, LoweringError, ModelError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.placement import NOTHING
from quantplug.lowering.xnnpack import XNNPACKProgram, lower

# Enough elements that one result on the middle between two integers stays above 40 dB.
IMAGE, ROWS = (1, 8, 6, 6), (24, 16)


def bias(channels: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, channels)


def placements(program: XNNPACKProgram) -> list[str]:
    """Where operators run, but for those on constants, of which nothing is left."""
    return [op.placement for op in program.ops if op.reason != NOTHING]


def lowered(net: Net, *shapes: tuple[int, ...], minimum: float = 40.0) -> XNNPACKProgram:
    """Lowers a net and compares the program with the q/dq graph on inputs that lowering has not seen."""
    torch.manual_seed(1)
    examples = tuple(torch.randn(*shape) for shape in shapes)
    graph = graph_of(net, *examples)
    before = str(graph.graph)
    program = lower(graph, examples)
    assert str(graph.graph) == before
    for _ in range(2):
        fresh = tuple(torch.randn(*shape) for shape in shapes)
        found, expected = program(*fresh), graph(*fresh)
        assert found.shape == expected.shape
        assert decibels(found, expected) >= minimum
    return program


def conv(s: Any, x: Tensor, **options: Any) -> Tensor:
    return F.conv2d(x, s.w(), s.b, **options)


torch.manual_seed(0)  # the weights of the nets below
# name -> (net, input shapes, placements)
INTEGER: dict[str, Any] = {
    "slices added": (Net(lambda s, x: slices_added(fake(torch.relu(fake(x))))), [IMAGE], 4),
    "shared linear": (Net(lambda s, x: twice(s, x, F.linear), w=Weight(16, 16), b=bias(16)), [ROWS], 2),
    "shared convolution": (
        Net(lambda s, x: twice(s, x, lambda x, w, b: F.conv2d(x, w, b, padding=1)), w=Weight(8, 8, 3, 3), b=bias(8)),
        [IMAGE],
        2,
    ),
    "max_pool2d without stride": (Net(lambda s, x: fake(F.max_pool2d(fake(x), 2))), [IMAGE], 1),
    "cat of different qparams": (
        Net(lambda s, x, y: fake(torch.cat([fake(x), fake(y, B)], 1), (0.04, 0))),
        [IMAGE, IMAGE],
        1,
    ),
    "cat of seven": (Net(lambda s, x, y: fake(torch.cat([fake(x), fake(y, B)] * 3 + [fake(x)], 1))), [IMAGE] * 2, 1),
    "pool with other output qparams": (Net(lambda s, x: fake(F.max_pool2d(fake(x), 2, 2), B)), [IMAGE], 1),
    "permute with other output qparams": (Net(lambda s, x: fake(fake(x).permute(0, 2, 3, 1), B)), [IMAGE], 1),
    "slice with other output qparams": (Net(lambda s, x: fake(fake(x)[:, 2:5], B)), [IMAGE], 1),
    "zero pad with other output qparams": (Net(lambda s, x: fake(F.pad(fake(x), (1, 1)), B)), [IMAGE], 1),
    "derived per-tensor bias": (
        Net(
            lambda s, x: fake(
                F.conv2d(fake(x), s.w(), Q.dequantize_per_tensor(s.b, 3e-4, 0, -(2**31), 2**31 - 1, torch.int32)), B
            ),
            w=TensorWeight(8, 8, 3, 3),
            b=torch.arange(8, dtype=torch.int32) * 1000,
        ),
        [IMAGE],
        1,
    ),
    "derived per-channel bias": (
        Net(
            lambda s, x: fake(
                F.conv2d(
                    fake(x),
                    s.w(),
                    Q.dequantize_per_channel(s.b, s.w.scales * 0.03, s.w.zeros, 0, -(2**31), 2**31 - 1, torch.int32),
                ),
                B,
            ),
            w=Weight(8, 8, 3, 3),
            b=torch.arange(8, dtype=torch.int32) * 1000,
        ),
        [IMAGE],
        1,
    ),
    "transposed convolution": (
        Net(
            lambda s, x: fake(F.conv_transpose2d(fake(x), s.w(), s.b, stride=2), B),
            w=Weight(8, 6, 3, 3, axis=1),
            b=bias(6),
        ),
        [IMAGE],
        1,
    ),
    "convolution and clamp": (
        Net(lambda s, x: fake(conv(s, fake(x)).clamp(-1, 1), B), w=Weight(8, 8, 3, 3), b=bias(8)),
        [IMAGE],
        2,
    ),
    "convolution and lower clamp": (
        Net(lambda s, x: fake(conv(s, fake(x)).clamp(min=-0.5), B), w=Weight(8, 8, 3, 3), b=bias(8)),
        [IMAGE],
        2,
    ),
    "multiplication and relu": (Net(lambda s, x, y: fake(F.relu(fake(x) * fake(y)), B)), [IMAGE, IMAGE], 2),
    "range 0..127": (
        Net(
            lambda s, x: fake(conv(s, fake(x, (0.03, 60), 0, 127)), (0.04, 64), 0, 127),
            w=Weight(8, 8, 3, 3),
            b=bias(8),
        ),
        [IMAGE],
        1,
    ),
    "unsigned integers": (
        Net(lambda s, x: fake(torch.relu(fake(x, (0.03, 128), 0, 255, torch.uint8)), (0.03, 128), 0, 255, torch.uint8)),
        [IMAGE],
        1,
    ),
    "numbers beside tensors": (
        Net(lambda s, x: fake(fake(fake(fake(x) * 2.5, (0.08, -3)) + 1.5, (0.08, -3)) / -3.0, B)),
        [IMAGE],
        3,
    ),
    "4-bit weights, static": (
        Net(lambda s, x: fake(F.linear(fake(x), s.w(), s.b), B), w=Weight(8, 16, bits=4), b=bias(8)),
        [ROWS],
        1,
    ),
    "4-bit weights, dynamic": (
        Net(lambda s, x: F.linear(dynamic(x), s.w(), s.b), w=Weight(8, 16, bits=4), b=bias(8)),
        [ROWS],
        1,
    ),
    "dynamic linear, one scale": (
        Net(lambda s, x: F.linear(dynamic(x), s.w(), s.b), w=TensorWeight(8, 16), b=bias(8)),
        [ROWS],
        1,
    ),
    "products by constant matrices": (
        Net(
            lambda s, x: fake(torch.mm(fake(torch.addmm(s.b, fake(x), s.w().t()), B), s.v().t()), (0.1, 0)),
            w=Weight(8, 16),
            v=Weight(8, 8),
            b=bias(8),
        ),
        [ROWS],
        2,
    ),
    "dynamic convolution": (Net(lambda s, x: conv(s, dynamic(x)), w=Weight(8, 8, 3, 3), b=bias(8)), [IMAGE], 1),
}


def slices_added(y: Tensor) -> Tensor:
    return fake(fake(y[:, :4]) + fake(y[:, 4:]), B)


def twice(s: Net, x: Tensor, layer) -> Tensor:
    weight = s.w()
    return fake(layer(fake(layer(fake(x), weight, s.b), B), weight, s.b), (0.09, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGER)
def test_defects_of_the_stock_flow_run_on_integer_kernels(name):
    net, shapes, operators = INTEGER[name]
    # A dynamic kernel chooses a scale for each row where the graph chooses one for all: it is more exact.
    program = lowered(net, *shapes, minimum=30.0 if "dynamic" in name else 40.0)
    assert placements(program) == ["int8"] * operators
    assert program.delegates == 1
    assert program.counts.f32 == 0
    assert program.counts.portable == 0


# name -> (net, input shapes, a word of the reason)
FLOAT: dict[str, Any] = {
    "zero points in weights": (
        Net(lambda s, x: fake(conv(s, fake(x)), B), w=Weight(8, 8, 3, 3, zero_points=True), b=bias(8)),
        [IMAGE],
        "zero points",
    ),
    "zero point in one scale": (
        Net(lambda s, x: fake(conv(s, fake(x)), B), w=TensorWeight(8, 8, 3, 3, zero_point=5), b=bias(8)),
        [IMAGE],
        "zero points",
    ),
    "zero point in one scale, beside floats": (
        Net(lambda s, x: F.linear(x, s.w(), s.b), w=TensorWeight(8, 16, zero_point=5), b=bias(8)),
        [ROWS],
        "zero points",
    ),
    "no output qparams": (
        Net(lambda s, x: conv(s, fake(x)), w=Weight(8, 8, 3, 3), b=bias(8)),
        [IMAGE],
        "output is not quantized",
    ),
    "transposed convolution, axis 0": (
        Net(lambda s, x: fake(F.conv_transpose2d(fake(x), s.w(), s.b), B), w=Weight(8, 6, 3, 3), b=bias(6)),
        [IMAGE],
        "axis 0",
    ),
    "transposed convolution with groups": (
        Net(
            lambda s, x: fake(F.conv_transpose2d(fake(x), s.w(), s.b, groups=2), B),
            w=Weight(8, 6, 3, 3, axis=1),
            b=bias(12),
        ),
        [IMAGE],
        "groups",
    ),
    "dynamic depthwise": (
        Net(lambda s, x: conv(s, dynamic(x), groups=8), w=Weight(8, 1, 3, 3), b=bias(8)),
        [IMAGE],
        "single input channels",
    ),
    "dynamic 1-D": (
        Net(lambda s, x: F.conv1d(dynamic(x), s.w(), s.b), w=Weight(8, 8, 3), b=bias(8)),
        [(1, 8, 10)],
        "2-D",
    ),
    "scales too far apart": (
        Net(lambda s, x: fake(conv(s, fake(x, (900.0, 0))), (1e-4, 0)), w=Weight(8, 8, 3, 3), b=bias(8)),
        [IMAGE],
        "ratio",
    ),
    "addition of scales too far apart": (
        Net(lambda s, x, y: fake(fake(x, (1e-6, 0)) + fake(y), B)),
        [IMAGE, IMAGE],
        "ratio",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FLOAT)
def test_what_no_integer_kernel_computes_stays_float_and_says_why(name):
    net, shapes, word = FLOAT[name]
    program = lowered(net, *shapes, minimum=30.0)
    assert placements(program) == ["float"]
    assert word in program.ops[0].reason
    assert program.delegates == 1


@pytest.mark.slow
def test_zero_pad_between_an_integer_and_a_float_operator():
    program = lowered(Net(lambda s, x: F.pad(fake(torch.relu(fake(x))), (1, 1, 1, 1)).softmax(-1)), IMAGE)
    assert [op.placement for op in program.ops if "reshape" not in op.target] == ["int8", "int8", "float"]


@pytest.mark.slow
def test_softmax_behind_a_pooling_runs_over_the_last_dimension():
    lowered(Net(lambda s, x: fake(F.max_pool2d(fake(x), 3, 1, 1)).softmax(-1)), (1, 4, 6, 6))


@pytest.mark.slow
def test_a_dequantize_shared_by_an_integer_and_a_float_operator():
    def both(s, x):
        y = fake(torch.relu(fake(x)))
        return fake(F.relu(y)) + y.softmax(-1)

    program = lowered(Net(both), IMAGE)
    assert [op.placement for op in program.ops if "reshape" not in op.target] == ["int8", "int8", "float", "float"]


@pytest.mark.slow
def test_weight_only_linear_keeps_integer_weights_in_the_file():
    torch.manual_seed(0)
    program = lowered(Net(lambda s, x: F.linear(x, s.w(), s.b), w=Weight(256, 256), b=bias(256)), (4, 256))
    assert program.nbytes < 256 * 256 * 1.2
    four = lowered(Net(lambda s, x: F.linear(x, s.w(), s.b), w=Weight(256, 256, bits=4), b=bias(256)), (4, 256))
    assert four.nbytes < 256 * 256 * 0.7
    assert [(op.target, op.placement) for op in program.ops] == [("aten.linear.default", "int8")]


@pytest.mark.slow
def test_conv3d_runs_in_float_and_one_with_groups_is_refused_in_one_sentence():
    x = torch.randn(1, 4, 5, 6, 6)
    parts = {"w": Weight(4, 4, 3, 3, 3), "b": bias(4)}
    program = lowered(Net(lambda s, x: fake(F.conv3d(fake(x), s.w(), s.b), B), **parts), (1, 4, 5, 6, 6))
    assert [op.placement for op in program.ops if "conv3d" in op.target] == ["float"]
    grouped = Net(lambda s, x: fake(F.conv3d(fake(x), s.w(), s.b, groups=2), B), w=Weight(4, 2, 3, 3, 3), b=bias(4))
    with pytest.raises(LoweringError, match=r"'conv3d' \(aten.conv3d.default\) has no kernel"):
        lower(graph_of(grouped, x), (x,))


@pytest.mark.slow
def test_integer_inputs_and_outputs():
    def integers(s, x):
        return Q.quantize_per_tensor(F.relu(conv(s, Q.dequantize_per_tensor(x, *A, *FULL))), *B, *FULL)

    x = torch.randint(-100, 100, IMAGE, dtype=torch.int8)
    graph = graph_of(Net(integers, w=Weight(8, 8, 3, 3), b=bias(8)), x)
    program = lower(graph, (x,))
    assert program.counts.converts == 0
    assert torch.equal(program(x), graph(x))


@pytest.mark.slow
def test_an_fp16_model_gives_finite_numbers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).half()
    x = torch.randn(1, 3, 8, 8).half()
    graph = graph_of(model, x)
    program = lower(graph, (x,))
    assert program(x).dtype == torch.float16
    assert decibels(program(x), graph(x)) > 40


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_quantized_half_precision_graph_keeps_its_dtypes(dtype):
    def half(x, qparams=A):
        quantized = Q.quantize_per_tensor(x, *qparams, *FULL)
        return Q.dequantize_per_tensor(quantized, *qparams, *FULL, out_dtype=dtype)

    def function(s, x):
        weight = Q.dequantize_per_channel(s.w.integers, s.w.scales, s.w.zeros, 0, *FULL, out_dtype=dtype)
        return half(F.relu(F.conv2d(half(x), weight, s.b)), B)

    x = torch.randn(*IMAGE).to(dtype)
    graph = graph_of(Net(function, w=Weight(8, 8, 3, 3), b=bias(8).to(dtype)), x)
    program = lower(graph, (x,))
    found, expected = program(x), graph(x)
    assert found.dtype == expected.dtype == dtype
    assert decibels(found, expected) > 30
    assert [op.placement for op in program.ops if "conv" in op.target] == ["int8"]


class Batched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return fake(F.relu(F.linear(fake(x), self.weight())), B)


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False])
def test_dynamic_batch(given):
    x = torch.randn(4, 16)
    shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
    graph = torch.export.export(Batched().eval(), (x,), dynamic_shapes=shapes).module()
    program = lower(graph, (x,), dynamic_shapes=shapes if given else None)
    for batch in (1, 7, 16):
        x = torch.randn(batch, 16)
        assert torch.equal(program(x), graph(x))


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    net = Net(lambda s, x: {"y": fake(F.relu(F.linear(fake(x), s.w(), s.b)), B)}, w=Weight(8, 16), b=bias(8))
    x = torch.randn(*ROWS)
    graph = graph_of(net, x)
    return graph, x, lower(graph, (x,))


@pytest.mark.slow
def test_the_structure_of_outputs_is_kept_and_r20_one_delegate_call(small):
    graph, x, program = small
    assert torch.equal(program(x)["y"], graph(x)["y"])
    assert program.delegates == 1
    assert program.sqnr == float("inf")


def test_a_saved_program_runs_in_a_bare_runtime(small, tmp_path):
    graph, x, program = small
    path = program.save(tmp_path / "small.pte")
    assert path.stat().st_size == program.nbytes
    from executorch.runtime import Runtime

    outputs = Runtime.get().load_program(path).load_method("forward").execute([x])
    assert torch.equal(outputs[0], graph(x)["y"])
    with pytest.raises(ArtefactError, match="create it first"):
        program.save(tmp_path / "absent" / "small.pte")


@pytest.mark.slow
def test_programs_with_different_numbers_of_threads_take_turns(small):
    graph, x, first = small
    one, two = lower(graph, (x,), threads=1), lower(graph, (x,), threads=2)
    for program in (one, two, first, one, first, two):
        assert torch.equal(program(x)["y"], graph(x)["y"])


def test_bad_arguments_are_refused_in_one_sentence(small):
    graph, x, program = small
    with pytest.raises(LoweringError, match="Input 0 of the program is"):
        program(x.double())
    with pytest.raises(LoweringError, match=r"found torch.float32 \(2, 16\)"):
        program(x[:2])
    with pytest.raises(LoweringError, match="structure"):
        program(x, x)
    with pytest.raises(LoweringError, match="does not run on the example inputs"):
        lower(graph, (torch.randn(7),))
    with pytest.raises(ConfigError, match="threads is 0"):
        lower(graph, (x,), threads=0)
    with pytest.raises(ModelError, match="takes an exported graph module"):
        lower(torch.nn.Linear(2, 2), (x,))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_program_that_loses_the_reference_is_not_returned(small):
    _, x, _ = small
    net = Net(lambda s, x: F.linear(dynamic(x), s.w(), s.b), w=Weight(8, 16), b=bias(8))
    with pytest.raises(LoweringError, match="less than 200"):
        lower(graph_of(net, x), (x,), minimum_sqnr=200.0)


@pytest.mark.slow
def test_a_kernel_that_the_runtime_refuses_is_left_float(monkeypatch):
    from quantplug.lowering.xnnpack import partition

    # The installed runtime has no int8 softmax: a declaration that claims one must not break the artefact.
    monkeypatch.setattr(partition, "_INTEGER_TOO", (*partition._INTEGER_TOO, "SoftmaxConfig"))
    unit = (1 / 256, -128)
    program = lowered(Net(lambda s, x: fake(torch.relu(fake(fake(x).softmax(-1), unit)), unit)), ROWS)
    placed = {op.target: op for op in program.ops}
    assert placed["aten.relu.default"].placement == "int8"
    assert placed["aten.softmax.int"].placement == "float"
    assert "refused" in placed["aten.softmax.int"].reason


@pytest.mark.slow
def test_lowering_prints_nothing():
    script = (
        "import logging, torch, torchao.quantization.pt2e\n"
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from qdq_graphs import *\n"
        "from quantplug.lowering.xnnpack import lower\n"
        "x = torch.randn(2, 16); g = graph_of(Net(lambda s, x: fake(torch.relu(fake(x)))), x)\n"
        "print('BEGIN', flush=True); print('BEGIN', file=sys.stderr, flush=True)\n"
        "before = list(logging.getLogger().handlers); lower(g, (x,))(x)\n"
        "assert logging.getLogger().handlers == before\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split("BEGIN\n")[1] == ""
    assert run.stderr.split("BEGIN\n")[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Softplus(), nn.Mish(), nn.Hardshrink()], ids=lambda m: type(m).__name__)
def test_float_operators_that_the_delegate_mixes_up_run_outside_of_it(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), activation, nn.Conv2d(16, 8, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x], progress=False)
    assert decibels(artefact(x), artefact.reference(x)) > 40
    assert {op.placement for op in artefact.program.ops if "conv2d" in op.target} == {"int8"}


class Scaled(nn.Module):
    """Images by a factor that the caller gives."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x, factor):
        return self.conv(x) * factor


@pytest.mark.slow
def test_a_factor_without_dimensions_stays_float_and_the_rest_runs():
    torch.manual_seed(0)
    model, inputs = Scaled().eval(), (torch.randn(2, 3, 8, 8), torch.tensor(2.0))
    artefact = quantplug.quantize(model, inputs, "xnnpack", [inputs], progress=False)
    other = (torch.randn(2, 3, 8, 8), torch.tensor(-3.0))
    for given in (inputs, other):
        assert float(sqnr(artefact(*given), artefact.reference(*given))) > 45
        assert float(sqnr(artefact(*given), model(*given))) > 30
