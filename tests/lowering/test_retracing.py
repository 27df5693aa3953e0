"""Programs are decomposed once, sizes computed once: files are the same, byte for byte, as by ExecuTorch's own way."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
from language_models import causal
from test_serializer_passes import made
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import quantplug
from quantplug.core.peers.torch_names import FakeTensorMode
from quantplug.lowering.xnnpack import edge, pipeline
from quantplug.lowering.xnnpack.retracing import Remembering, tensors_remembered


def stack(layers):
    """Layers that are alike, some operators of which XNNPACK wants whole."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(16, 16), nn.ELU(), nn.Hardswish()))
    ).eval()


def lowered(model, **options):
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    quantizer = quantplug.get_quantizer("xnnpack").set_global("int8_dynamic")
    exported = torch.export.export(model, (inputs,)).module()
    converted = quantplug.convert_pt2e(quantplug.prepare_pt2e(exported, quantizer))
    return quantizer.backend.lower(converted, (inputs,), **options), converted, inputs


@pytest.fixture
def decompositions(monkeypatch):
    """Returns the tables that programs were decomposed by, in a list that grows."""
    tables, stock = [], ExportedProgram.run_decompositions

    def counted(self, table=None, **options):
        tables.append(table)
        return stock(self, table, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return tables


def test_a_program_is_decomposed_once(decompositions):
    program, converted, inputs = lowered(stack(1))
    assert program.delegates == 1
    assert len(decompositions) == 1
    for _ in range(2):
        torch.testing.assert_close(program(inputs), converted(inputs), atol=1e-3, rtol=1e-3)


def test_an_operator_that_is_refused_is_decomposed_as_executorch_does(decompositions):
    program, converted, inputs = lowered(stack(1), accepts=lambda node: "linear" not in str(node.target))
    assert len(decompositions) > 1
    linear = next(op for op in program.ops if "linear" in op.target)
    assert linear.placement == "portable"
    for _ in range(2):
        torch.testing.assert_close(program(inputs), converted(inputs), atol=1e-3, rtol=1e-3)


def test_sizes_of_layers_that_are_alike_are_computed_once(monkeypatch):
    computed = []

    @contextmanager
    def noted():
        with tensors_remembered() as remembering:
            yield remembering
        computed.append(remembering.computed)

    monkeypatch.setattr(pipeline, "tensors_remembered", noted)
    for layers in (2, 5):
        lowered(stack(layers))
    assert 0 < computed[0] == computed[1]


@pytest.mark.parametrize(
    "name", ["kinds", *(pytest.param(name, marks=pytest.mark.slow) for name in ("language model", "kws_dscnn", "bert"))]
)
def test_a_file_is_the_same_as_by_executorchs_own_way(name, monkeypatch, tmp_path):
    found = made(name).save(tmp_path / "once.pte").read_bytes()
    monkeypatch.setattr(edge, "_decomposed_once", lambda *_: None)
    monkeypatch.setattr(pipeline, "tensors_remembered", nullcontext)
    assert found == made(name).save(tmp_path / "stock.pte").read_bytes()


def test_results_that_depend_on_numbers_are_not_remembered():
    remembering, aten = Remembering(), torch.ops.aten
    with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
        one, other = torch.ones(3), torch.ones(3)
        assert remembering.call_function(aten.neg.default, (one,), {}) is remembering.call_function(
            aten.neg.default, (other,), {}
        )
        places = [remembering.call_function(aten.nonzero.default, (x,), {}) for x in (one, other)]
        assert places[0].shape[0].node.expr != places[1].shape[0].node.expr
        turned = [remembering.call_function(aten.neg.default, (x,), {}) for x in places]
        assert [x.shape[0].node.expr for x in turned] == [x.shape[0].node.expr for x in places]
        whole = remembering.call_function(aten.neg.default, (torch.ones(3, dtype=torch.int32),), {})
        assert whole.dtype == torch.int32
        known = torch.tensor(1.0)
        assert known.constant is not None  # type: ignore[attr-defined]  # it is a fake tensor
        remembering.call_function(aten.neg.default, (known,), {})
    assert remembering.computed == 2


def test_passes_have_their_own_interpreter_again():
    from executorch.exir.pass_base import ExportPass

    lowered(stack(1))
    assert "interpreter" not in vars(ExportPass)
    gc.collect()
    own = [vars(each)["interpreter"] for each in gc.get_objects() if isinstance(each, ExportPass)]
    assert own  # some passes are made when ExecuTorch is imported
    assert not any(isinstance(each, Remembering) for each in own)


def test_delegates_leave_no_second_copy_of_their_weights():
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    def delegates():
        return [each for each in gc.get_objects() if isinstance(each, LoweredBackendModule)]

    others = delegates()  # of other programs, which their makers may hold
    lowered(stack(1))
    # torch's caches hold some of them.
    stores = [each.named_data_store_output for each in delegates() if not any(each is other for other in others)]
    assert sum(len(buffer) for store in stores if store is not None for buffer in store.buffers) == 0


def floats_alive(shapes):
    """Returns the float tensors of some shapes that hold numbers of their own."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    return [x for x in tensors if x.dtype == torch.float32 and x.device.type == "cpu" and tuple(x.shape) in shapes]


@pytest.mark.parametrize("keep", [True, False])
def test_weights_in_float_are_gone_before_a_model_is_lowered(keep):
    shapes = {(88, 72), (72, 88), (72, 72)}  # of no other test's model
    assert not floats_alive(shapes)
    alive: list[int] = []

    def looked(_):
        if not alive:
            alive.append(len(floats_alive(shapes)))
        return True

    changes = {"hidden_size": 72, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = causal(num_hidden_layers=1, **changes)
    before = {name: value.clone() for name, value in model.state_dict().items() if tuple(value.shape) not in shapes}
    artefact = quantplug.quantize_language_model(
        model, "xnnpack", "int8_dynamic", context=16, table="float32", progress=False, accepts=looked, keep=keep
    )
    assert (alive[0] > 0) == keep
    for _ in range(2):
        assert len(list(artefact.generate([3, 5, 7], 5, stop=()))) == 5
    where = {value.device.type for value in model.parameters()}
    assert where == {"cpu" if keep else "meta"}
    if keep:
        assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)
