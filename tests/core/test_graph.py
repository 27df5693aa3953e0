"""Reading exported graphs: operands, modules, constants, values; and changes in place under other names."""

import copy

import pytest
import torch
from models import ResNet18, SampleModel, exported
from torch import nn

from quantplug.core.errors import ModelError
from quantplug.core.graph.aliases import changed_under_other_names
from quantplug.core.graph.facts import (
    attribute,
    compute_nodes,
    constant_value,
    describe,
    is_constant,
    is_float,
    module_path,
    module_stack,
    operands,
    rank,
    require_graph_module,
    tensor_value,
)


@pytest.fixture(scope="module", params=[False, True], ids=["nonstrict", "strict"])
def resnet(request):
    return exported(ResNet18(4, 4), torch.randn(1, 3, 32, 32), strict=request.param)


def by_name(model, name):
    return next(n for n in model.graph.nodes if n.name == name)


def test_operands_have_schema_names_and_defaults(resnet):
    found = operands(by_name(resnet, "conv2d"))
    assert found["stride"] == [2, 2]
    assert found["bias"] is None
    assert found["groups"] == 1
    assert list(found) == ["input", "weight", "bias", "stride", "padding", "dilation", "groups"]


def test_module_paths_agree_between_export_modes_and_between_calls_of_one_module(resnet):
    relus = [n for n in compute_nodes(resnet.graph) if "relu" in str(n.target)]
    assert [module_path(n) for n in relus[:3]] == ["relu", "layer1.0.relu", "layer1.0.relu"]
    assert module_stack(relus[1])[-1] == ("layer1.0.relu", "torch.nn.modules.activation.ReLU")
    assert module_stack(relus[1])[0][0] == ""
    assert "module 'layer1.0.relu'" in describe(relus[1])


def test_constants_and_values(resnet):
    conv = by_name(resnet, "conv2d")
    weight = operands(conv)["weight"]
    assert is_constant(weight)
    value = constant_value(weight)
    assert value is not None
    assert torch.equal(value, attribute(resnet, "conv1.weight"))
    assert rank(conv) == 4
    assert is_float(conv)
    assert tensor_value(conv).shape == (1, 4, 16, 16)
    assert not is_constant(conv)
    assert rank(None) is None


def test_a_missing_attribute_is_a_sentence(resnet):
    with pytest.raises(ModelError, match=r"attribute 'layer1.9.conv', which the module does not have \(at '9'\)"):
        attribute(resnet, "layer1.9.conv")


def test_only_exported_graphs_are_accepted():
    model = SampleModel().eval()
    program = torch.export.export(model, (torch.randn(1, 3, 32, 32),))
    assert require_graph_module(program.module(), "prepare") is not None
    for wrong, sentence in (
        (model, "prepare takes an exported graph module, found SampleModel"),
        (program, "found an ExportedProgram; pass `exported.module\\(\\)`"),
        (torch.fx.symbolic_trace(model), "found one from torch.fx.symbolic_trace"),
        (3, "found int"),
    ):
        with pytest.raises(ModelError, match=sentence):
            require_graph_module(wrong, "prepare")


def test_a_copied_graph_is_still_an_exported_one():
    copied = copy.deepcopy(exported(SampleModel(), torch.randn(1, 3, 32, 32)))
    assert require_graph_module(copied, "prepare") is copied


class Changes(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.conv, self.change = nn.Conv2d(2, 2, 1), change

    def forward(self, x):
        return self.change(self.conv(x))


def after_view(h):
    h.view(-1).relu_()
    return h


def half(h):
    part = h[:, :1]
    part.add_(1)
    return h * 2


def two_steps(h):
    return h.relu_().add_(1).mul_(2)


def read_before(h):
    kept = h.exp()
    return h.relu_() + kept


def read_after(h):
    changed = h.relu_()
    return changed + h  # one value: export knows that both names are the result


@pytest.mark.parametrize(
    ("change", "hidden"),
    [(after_view, True), (half, True), (read_after, False), (two_steps, False), (read_before, False)],
)
@pytest.mark.parametrize("strict", [False, True])
def test_changes_in_place_that_somebody_reads_under_another_name(change, hidden, strict):
    graph = exported(Changes(change), torch.randn(1, 2, 4, 4), strict=strict).graph
    found = changed_under_other_names(graph)
    assert bool(found) == hidden
    if hidden:
        assert "conv2d" in {n.name for n in found}
        assert {str(n.target) for n in found.values()} <= {"aten.relu_.default", "aten.add_.Tensor"}


def test_reused_inplace_relu_of_resnet_hides_nothing(resnet):
    assert changed_under_other_names(resnet.graph) == {}
