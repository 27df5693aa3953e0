"""What stays float in bfloat16, and weights that are streamed on processors with AMX."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quantplug
from quantplug.core.errors import LoweringError
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.x86 import X86Program, lower
from quantplug.lowering.x86.kernels import few_rows
from quantplug.lowering.x86.running.inductor import for_compilers

aten = torch.ops.aten


class Block(nn.Module):
    """Attention between quantized projections, then a convolution that stays float."""

    def __init__(self):
        super().__init__()
        self.projections, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.float_one = nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) + x
        return self.float_one(y.transpose(1, 2))


def quantized(model, inputs, *, dynamic_shapes=None, without=()):
    quantizer = quantplug.get_quantizer("x86").set_global("int8")
    for name in without:
        quantizer.set_module_name(name, None)
    exported = torch.export.export(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
    prepared = quantplug.prepare_pt2e(exported.module(), quantizer)
    with torch.no_grad():
        prepared(*inputs)
    return quantplug.convert_pt2e(prepared)


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 12, 64),)
    shapes = ({0: torch.export.Dim("batch", min=1, max=16)},)
    return quantized(Block(), inputs, dynamic_shapes=shapes, without=("float_one",)), inputs, shapes


@torch.no_grad()
def test_attention_and_float_layers_compute_in_bfloat16_on_what_kernels_write_in_it(block, tmp_path):
    graph, inputs, shapes = block
    program = lower(graph, inputs, dynamic_shapes=shapes, float_dtype=torch.bfloat16)
    told = {op.target for op in program.ops if op.how == "it computes in bfloat16"}
    assert told == {"aten.scaled_dot_product_attention.default", "aten.conv1d.default"}
    attention = next(n for n in program.module.graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    casts = [n for n in program.module.graph.nodes if n.target is aten.to.dtype and n.args[1] == torch.bfloat16]
    assert len(casts) == 1  # the convolution's input; the projections write bfloat16, its weight was converted once
    for x in (*inputs, torch.randn(5, 12, 64)):
        assert 35 < sqnr(graph(x), program(x)) < 90
        assert program(x).dtype == torch.float32
    assert attention.meta["val"].dtype == torch.bfloat16
    assert torch.equal(X86Program.load(program.save(tmp_path / "half.pt2"))(x), program(x))


@pytest.mark.slow
@torch.no_grad()
def test_a_package_computes_in_bfloat16_too(block, tmp_path):
    graph, inputs, shapes = block
    program = lower(graph, inputs, dynamic_shapes=shapes, float_dtype=torch.bfloat16)
    package = torch._inductor.aoti_load_package(str(program.package(tmp_path / "half.pt2")))
    assert sqnr(program(*inputs), package(*inputs)) > 40


@torch.no_grad()
def test_autotune_takes_bfloat16_where_it_is_faster_and_says_so(block, monkeypatch):
    graph, inputs, shapes = block
    monkeypatch.setattr(  # the first candidate is the integer or float32 kernel, the last always bfloat16
        "quantplug.lowering.x86.running.autotune._alternating",
        lambda candidates, x, repeats: [2.0, *[1.0] * (len(candidates) - 1)],
    )
    program = lower(graph, inputs, dynamic_shapes=shapes, autotune=True)
    assert {op.placement for op in program.ops if op.target == "aten.linear.default"} == {"float"}
    assert all("bfloat16" in op.how for op in program.ops if "attention" in op.target)
    assert sqnr(graph(*inputs), program(*inputs)) > 35


def test_another_float_dtype_is_refused(block):
    graph, inputs, _ = block
    with pytest.raises(LoweringError, match=r"float_dtype is torch.float16; choose torch.float32 or torch.bfloat16"):
        lower(graph, inputs, float_dtype=torch.float16)


@torch.no_grad()
@pytest.mark.parametrize(("rows", "is_streamed"), [(1, True), (4, True), (5, False)])
@pytest.mark.parametrize("bias", [True, False])
def test_compilers_get_a_large_weight_of_few_rows_streamed(rows, is_streamed, bias, monkeypatch):
    monkeypatch.setattr(few_rows, "kernels_saturate", lambda: True)
    monkeypatch.setattr(few_rows, "LEAST_HALF_ELEMENTS", 2**14)
    torch.manual_seed(0)
    inputs = (torch.randn(rows, 256),)
    layers = nn.Linear(256, 256, bias=bias), nn.ReLU(), nn.Linear(256, 64), nn.ReLU6(), nn.Linear(64, 256)
    graph = quantized(nn.Sequential(*layers), inputs)
    program = lower(graph, inputs)
    module = for_compilers(program.portable)
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(aten._weight_int8pack_mm.default) == (3 if is_streamed else 0)
    assert aten._weight_int8pack_mm.default not in [node.target for node in program.portable.graph.nodes]
    assert sqnr(graph(*inputs), module(*inputs)) > 35
    assert sqnr(graph(*inputs), program(*inputs)) > 40


@torch.no_grad()
@pytest.mark.parametrize("decomposed", [False, True], ids=["whole", "decomposed"])
def test_a_transposed_convolution_computes_in_bfloat16_however_it_was_exported(decomposed):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.ConvTranspose2d(8, 16, 3, stride=2, groups=2)).eval(), torch.randn(1, 8, 9, 9)
    exported = torch.export.export(model, (x,))
    graph = (exported.run_decompositions() if decomposed else exported).module()
    program = lower(graph, (x,), float_dtype=torch.bfloat16)
    told = [(op.reason, op.how) for op in program.ops]
    assert told == [("no integer kernel in this place", "it computes in bfloat16")]
    assert 40 < float(sqnr(program(x), model(x))) < 70
