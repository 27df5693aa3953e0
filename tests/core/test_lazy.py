"""Graph modules that compile on first use: whoever runs, prints, copies or exports one sees no difference."""

import copy
import io

import pytest
import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from quantplug import XNNPACKQuantizer
from quantplug.core.graph.lazy import LazyGraphModule, compiled_when_run
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e

X = torch.tensor([[1.0, -2.0, 3.0]])


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every module that torch generated code for, in order."""
    seen: list[fx.GraphModule] = []
    compile_graph = fx.GraphModule.recompile

    def recorded(module: fx.GraphModule) -> object:
        seen.append(module)
        return compile_graph(module)

    monkeypatch.setattr(fx.GraphModule, "recompile", recorded)
    return seen


def lazy() -> LazyGraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
    return LazyGraphModule({}, graph)


def negate_instead(model: fx.GraphModule) -> None:
    node = next(n for n in model.graph.nodes if n.op == "call_function")
    node.target = torch.ops.aten.neg.default


def test_nothing_is_compiled_before_the_first_run_and_once_after(compilations):
    model = lazy()
    model.recompile()
    assert compilations == []
    assert torch.equal(model(X), X.relu())
    model(X)
    assert compilations == [model]


def test_first_use_may_be_the_forward_of_the_instance_or_of_its_class():
    assert torch.equal(lazy().forward(X), X.relu())
    model = lazy()
    assert torch.equal(type(model).forward(model, X), X.relu())
    assert torch.equal(model(X), X.relu())


@pytest.mark.parametrize("show", [lambda m: m.code, str, lambda m: m.print_readable(print_output=False)])
def test_what_is_printed_is_the_graph_as_it_is(show):
    model = lazy()
    assert "aten.relu.default(x)" in show(model)
    negate_instead(model)
    model.recompile()
    assert "aten.neg.default(x)" in show(model)
    assert "aten.relu.default(x)" not in show(model)


def test_an_edit_before_the_first_run_needs_no_compilation_of_its_own(compilations):
    model = lazy()
    negate_instead(model)
    model.recompile()
    assert torch.equal(model(X), -X)
    assert compilations == [model]


def test_an_edit_after_the_first_run_holds_once_recompiled():
    model = lazy()
    model(X)
    negate_instead(model)
    model.recompile()
    assert torch.equal(model(X), -X)


def test_two_modules_compile_apart():
    one, other = lazy(), lazy()
    negate_instead(other)
    assert torch.equal(one(X), X.relu())
    assert torch.equal(other(X), -X)


@pytest.mark.parametrize("runs_before", [False, True], ids=["never_run", "run"])
def test_a_deep_copy_is_edited_apart_from_its_original(runs_before):
    model = lazy()
    if runs_before:
        model(X)
    duplicate = copy.deepcopy(model)
    negate_instead(duplicate)
    duplicate.recompile()
    assert torch.equal(duplicate(X), -X)
    assert torch.equal(model(X), X.relu())


def test_a_copy_outlives_its_original():
    model = lazy()
    duplicate = copy.deepcopy(model)
    del model
    assert torch.equal(duplicate(X), X.relu())


def test_a_module_that_was_never_run_can_be_saved():
    stream = io.BytesIO()
    torch.save(lazy(), stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), X.relu())


@pytest.mark.parametrize("x", [X, -X], ids=["true_branch", "false_branch"])
def test_submodels_of_control_flow_compile_when_they_are_run(x, compilations):
    exported = torch.export.export(Branch(), (X,)).module()
    expected = exported(x)
    compilations.clear()
    model = working_copy(exported)
    assert compilations == []
    assert torch.equal(model(x), expected)
    assert compilations[0] is model
    assert all(isinstance(part, LazyGraphModule) for part in compilations)


def test_a_converted_model_that_was_never_run_can_be_exported():
    exported = torch.export.export(nn.Linear(3, 2), (X,), strict=True).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    prepared(X)
    converted = convert_pt2e(prepared)
    again = torch.export.export(converted, (X,)).module()
    assert any("quantize" in str(node.target) for node in again.graph.nodes)
    assert torch.equal(again(X), converted(X))


def test_a_list_of_ten_thousand_tensors_is_compiled_once(compilations):
    """Every edit may ask for a compilation: one each would be quadratic in the graph."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    parts = [graph.call_function(torch.ops.aten.add.Tensor, (x, float(i))) for i in range(10_000)]
    joined = graph.call_function(torch.ops.aten.cat.default, (parts,))
    graph.output(joined)
    model = LazyGraphModule({}, graph)
    for part in parts:
        part.target = torch.ops.aten.sub.Tensor
        model.recompile()
    assert torch.equal(model(torch.zeros(1)), -torch.arange(10_000.0))
    assert compilations == [model]


def test_a_quantizers_rewrites_compile_a_caller_s_graph_once(compilations):
    """XNNPACK's are thirty; torchao's prepare hands them a graph module that compiles at once."""
    model = torch.export.export(nn.Sequential(nn.Linear(3, 2), nn.SiLU(), nn.Hardsigmoid()), (X,)).module()
    expected = model(X)
    compilations.clear()
    rewritten = XNNPACKQuantizer().transform_for_annotation(model)
    assert [part for part in compilations if part is rewritten] == [rewritten]
    assert torch.ops.aten.silu.default not in {node.target for node in rewritten.graph.nodes}
    torch.testing.assert_close(rewritten(X), expected)
    rewritten.recompile()
    assert len(compilations) == 2


def test_blocks_that_overlap_leave_torchs_own_way_to_compile():
    own = fx.GraphModule.recompile
    first, second = compiled_when_run(), compiled_when_run()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert fx.GraphModule.recompile is own
