"""Programs of x86 on one row: kernels that read weights faster, and a second graph where a state is kept."""

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quantplug
from quantplug import X86Program
from quantplug.core.specs.levels import sqnr
from quantplug.lowering.cached_attention import CACHED_ATTENTION, cached_attention
from quantplug.lowering.x86.kernels import few_rows

WIDTH = 64


class Decoder(nn.Module):
    """Attention to a table whose rows are filled from a position on, and a gated block."""

    def __init__(self, rows=16, bias=False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=bias and i != 1) for i in range(3))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.register_buffer("keys", torch.zeros(rows, WIDTH))
        self.register_buffer("values", torch.zeros(rows, WIDTH))

    def forward(self, x, start):
        at = start + torch.arange(x.shape[0])
        keys = self.keys.index_copy_(0, at, self.key(x))
        values = self.values.index_copy_(0, at, self.value(x))
        seen = torch.arange(len(keys)) <= at[:, None]
        x = x + F.scaled_dot_product_attention(self.query(x)[None], keys[None], values[None], seen[None])[0]
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def quantized(config, **options):
    torch.manual_seed(0)
    model = Decoder(**options).eval()
    given = torch.randn(5, WIDTH), torch.tensor([0])
    rows = {"x": {0: torch.export.Dim("rows", min=1, max=8)}, "start": None}
    exported = torch.export.export(model, given, dynamic_shapes=rows)
    return model, quantplug.quantize(exported, given, "x86", [given], config=config, progress=False)


def program_of(model, x, config):
    made = quantplug.quantize(model, (x,), "x86", [x], config=config, progress=False)
    return made.reference, cast("X86Program", made.program)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


FBGEMM = "quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default"


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("config", "level"), [("int8_dynamic", 90), ("int8", 45), ("int8_weight_only", 45)])
def test_a_program_with_a_state_is_called_with_rows_and_with_single_ones(config, level, bias, tmp_path):
    model, made = quantized(config, bias=bias)
    graph, program = made.reference, X86Program.load(made.program.save(tmp_path / "model.pt2"))
    rows, firsts = torch.randn(16, WIDTH), []
    for _ in range(2):
        float_model, start = Decoder(bias=bias).eval(), 0
        float_model.load_state_dict(model.state_dict())
        for count in (3, 1, 1, 4, 1):
            given = rows[start : start + count], torch.tensor([start])
            expected, found = graph(*given), program(*given)
            assert sqnr(found, expected) > level, (start, count)
            assert sqnr(found, float_model(*given)) > 20
            start += count
        firsts.append(found)
        program.restart()
    assert torch.equal(*firsts)
    assert torch.equal(program.module.get_buffer("keys"), torch.zeros(16, WIDTH))


def test_single_rows_have_kernels_of_their_own_and_those_that_read_the_same_are_one():
    _, made = quantized("int8_dynamic", bias=True)
    assert targets(made.program.single).count(FBGEMM) == 3  # query, key and value; gate and up; down
    assert FBGEMM not in targets(made.program.module)
    assert not [target for target in targets(made.program.single) if "sym_size" in target]


def test_other_programs_have_one_graph():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, 8)).eval(), torch.randn(4, WIDTH)
    rows = ({0: torch.export.Dim("rows", min=1, max=8)},)
    exported = torch.export.export(model, (x,), dynamic_shapes=rows)
    _, program = program_of(exported, x, "int8_dynamic")
    assert program.single is None
    assert program(x[:1]).shape == (1, 8)


@torch.no_grad()
@pytest.mark.parametrize("config", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("function", [nn.ReLU(), nn.SiLU(), nn.GELU("tanh"), nn.LeakyReLU(0.3), nn.Hardswish()])
def test_a_row_of_floats_is_quantized_by_the_kernel_that_multiplies_it(function, config):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 32), function, nn.Linear(32, 17)).eval(), torch.randn(1, 48)
    graph, program = program_of(model, x, config)
    kernels = [target for target in targets(program.module) if "linear_with_input_q_dq" in target]
    assert len(kernels) == 2
    for other in (x, -x, torch.zeros_like(x), 3 * x):
        assert sqnr(program(other), graph(other)) > 60


@torch.no_grad()
@pytest.mark.parametrize(("saturates", "kernels"), [(False, 1), (True, 0)])
def test_rows_stay_where_their_other_kernel_would_overflow(saturates, kernels, monkeypatch):
    """A processor with the VNNI of AVX2, which oneDNN uses and FBGEMM does not."""
    assert few_rows.fbgemm_saturates() is not torch.cpu.get_capabilities()["avx512_vnni"]
    monkeypatch.setattr(few_rows, "kernels_saturate", lambda: False)
    monkeypatch.setattr(few_rows, "fbgemm_saturates", lambda: saturates)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 32)).eval(), torch.randn(1, 48)
    assert targets(program_of(model, x, "int8")[1].module).count(FBGEMM) == kernels


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_what_is_no_number_gives_no_number(bad):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 17)).eval(), torch.randn(1, 48)
    _, program = program_of(model, x, "int8_dynamic")
    assert FBGEMM in targets(program.module)
    x[0, 5] = bad
    assert program(x).isnan().all()


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(("heads", "groups", "width"), [(2, 3, 8), (1, 4, 8), (3, 1, 12)])
def test_attention_to_a_cache(heads, groups, width, count, start):
    """Values of other widths than keys, as latent attention has them."""
    torch.manual_seed(0)
    query, keys = torch.randn(1, count, heads * groups, 8), torch.randn(1, 16, heads, 8)
    values, at = torch.randn(1, 16, heads, width), torch.tensor([start])
    seen = torch.arange(16) <= torch.arange(start, start + count)[:, None]
    read, given = (part.transpose(1, 2).repeat_interleave(groups, 1) for part in (keys, values))
    expected = F.scaled_dot_product_attention(query.transpose(1, 2), read, given, seen, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(cached_attention(query, keys, values, at, 0.3), expected)
    torch.library.opcheck(CACHED_ATTENTION, (query, keys, values, at, 0.3))
    exact = [part.double().requires_grad_() for part in (query, keys, values)]
    assert torch.autograd.gradcheck(lambda *rows: cached_attention(*rows, at, 0.3), exact)
