"""`train()` and `eval()` of exported graphs: operators follow, and nothing else about them changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from quantplug.core.errors import ModelError
from quantplug.core.graph.modes import SwitchableGraphModule
from quantplug.core.graph.working_copy import rebuilt, working_copy


def switchable(module: nn.Module, *inputs: torch.Tensor, training: bool = True) -> fx.GraphModule:
    return rebuilt(working_copy(torch.export.export(module.train(training), inputs).module()))


class Noisy(nn.Module):
    """Every kind of operator that behaves differently in training."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=2e-3, momentum=0.3)
        self.batch = nn.BatchNorm2d(4, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True, momentum=0.4)
        self.drop, self.drop2, self.alpha = nn.Dropout(0.15), nn.Dropout2d(0.35), nn.AlphaDropout(0.25)
        self.inplace, self.leaky = nn.Dropout(0.45, inplace=True), nn.RReLU(0.1, 0.4)
        self.memory = nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x):
        y = self.instance(self.batch(self.norm(self.conv(x))))
        y = self.leaky(self.alpha(self.drop2(self.drop(y))))
        return self.memory(self.inplace(y + 1).flatten(2).transpose(1, 2))[0]


@pytest.fixture
def image():
    torch.manual_seed(0)
    return torch.randn(4, 3, 6, 6)


@pytest.mark.few(1)
@pytest.mark.parametrize("training", [False, True], ids=["exported_in_eval", "exported_in_training"])
def test_both_modes_compute_what_the_module_computes(image, training):
    module = Noisy()
    model = switchable(copy.deepcopy(module), image, training=training)
    for mode in (True, False, True, False):
        model.train(mode)
        module.train(mode)
        torch.manual_seed(5)
        expected = module(image)
        torch.manual_seed(5)
        assert torch.equal(model(image), expected)
    expected_state = module.state_dict()
    for name in ("norm.running_mean", "norm.running_var", "instance.running_mean"):
        assert torch.equal(model.state_dict()[name], expected_state[name])


def test_rates_eps_and_momentum_stay(image):
    model = switchable(Noisy(), image)
    literals = [[a for a in n.args if isinstance(a, float)] for n in model.graph.nodes]
    model.eval()
    model.train()
    assert [[a for a in n.args if isinstance(a, float)] for n in model.graph.nodes] == literals


def test_batches_are_counted_in_training_only(image):
    model = switchable(Noisy(), image)
    model(image)
    model.eval()
    model(image)
    assert model.state_dict()["norm.num_batches_tracked"] == 1
    model.train()
    model(image)
    assert model.state_dict()["norm.num_batches_tracked"] == 2


def test_methods_follow_torch(image):
    model = switchable(Noisy(), image)
    assert model.eval() is model
    assert not model.training
    assert model.train() is model
    assert model.training


def test_a_copy_switches_on_its_own(image):
    model = switchable(Noisy(), image)
    duplicate = copy.deepcopy(model)
    assert isinstance(duplicate, SwitchableGraphModule)
    duplicate.eval()
    assert torch.equal(duplicate(image), duplicate(image))
    assert not torch.equal(model(image), model(image))


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


def test_attention_remembers_its_dropout():
    x = torch.randn(1, 2, 8, 4)
    model = switchable(Attention(), x)
    model.eval()
    assert torch.equal(model(x), Attention().eval()(x))
    for trained in (copy.deepcopy(model).train(), model.train()):
        torch.manual_seed(1)
        once = trained(x)
        torch.manual_seed(1)
        assert torch.equal(once, Attention()(x))
        assert not torch.equal(once, trained(x))


class Branch(nn.Module):
    """Dropout inside the submodels of control flow."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.drop(y) + 1, lambda y: self.drop(y) - 1, (x,))


def test_submodels_of_control_flow_follow():
    x = torch.ones(64)
    model = switchable(Branch(), x)
    assert not torch.equal(model(x), x + 1)
    model.eval()
    assert torch.equal(model(x), x + 1)
    assert torch.equal(model(-x), -x - 1)


def test_decomposed_graph_refuses_training_and_stays_as_it_was(image):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model = rebuilt(torch.export.export(module, (image,)).run_decompositions().module())
    before = str(model.graph)
    with pytest.raises(ModelError, match=r"batch_norm.*module '1'.*run_decompositions"):
        model.train()
    assert str(model.graph) == before
    assert torch.equal(model.eval()(image), model(image))


def test_switched_model_is_exported_again(image):
    model = switchable(Noisy(), image).eval()
    again = torch.export.export(model, (image,)).module()
    assert torch.equal(again(image), model(image))
