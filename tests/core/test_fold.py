"""Batch norms folded for inference: exact on every producer, left alone wherever folding would be wrong."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from quantplug.core.batch_norms.inference import Folding, fold_batch_norms
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.patterns.language import op

BATCH_NORM = op("batch_norm", "_native_batch_norm_legit_no_training").targets
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def lively(module: nn.Module) -> nn.Module:
    """Gives batch norms statistics and parameters that a wrong folding would show."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 2.0)
                nn.init.uniform_(part.bias, -1.0, 1.0)
            if part.track_running_stats:
                part.running_mean.uniform_(-1.0, 1.0)
                part.running_var.uniform_(0.3, 3.0)
    return module


def exported(module: nn.Module, *inputs: torch.Tensor, training: bool = False, decompose: bool = False):
    program = torch.export.export(module.train(training), inputs)
    return (program.run_decompositions() if decompose else program).module()


def batch_norms(model: fx.GraphModule) -> int:
    return sum(node.target in BATCH_NORM for node in model.graph.nodes)


def folded_copy(model: fx.GraphModule) -> tuple[fx.GraphModule, list[Folding]]:
    duplicate = working_copy(model)
    outcome = fold_batch_norms(duplicate)
    duplicate.graph.lint()
    return duplicate, outcome


def check_folds(module: nn.Module, *inputs: torch.Tensor, decompose: bool = False) -> fx.GraphModule:
    model = exported(lively(module), *inputs, decompose=decompose)
    expected = module(*inputs)
    folded, outcome = folded_copy(model)
    assert all(folding.folded for folding in outcome), outcome
    assert batch_norms(folded) == 0
    torch.testing.assert_close(folded(*inputs), expected, rtol=1e-4, atol=1e-5)
    return folded


@pytest.mark.few(3)
@pytest.mark.parametrize("decompose", [False, True], ids=["aten", "decomposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kinds", [CONVS, TRANSPOSED], ids=["conv", "conv_transpose"])
def test_convolutions_fold(kinds, dims, groups, affine, bias, decompose):
    torch.manual_seed(0)
    layer = kinds[dims](4, 6, 3, groups=groups, bias=bias, stride=2, padding=1)
    norm = NORMS[dims](6, affine=affine, eps=3e-3)
    check_folds(nn.Sequential(layer, norm, nn.ReLU()), torch.randn(2, 4, *(7,) * dims), decompose=decompose)


@pytest.mark.few(4)
@pytest.mark.parametrize("decompose", [False, True], ids=["aten", "decomposed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_linear_folds(affine, bias, decompose):
    torch.manual_seed(0)
    check_folds(
        nn.Sequential(nn.Linear(5, 6, bias=bias), nn.BatchNorm1d(6, affine=affine)),
        torch.randn(3, 5),
        decompose=decompose,
    )


def test_string_padding_folds():
    check_folds(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4)), torch.randn(1, 3, 6, 6))


class _Nothing(Quantizer):
    def annotate(self, model):
        return model

    def validate(self, model):
        pass


@pytest.mark.parametrize("layer", ["conv", "deconv", "linear"])
def test_folded_parameters_equal_torchao_bit_for_bit(layer):
    torch.manual_seed(3)
    kinds = {
        "conv": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.randn(2, 3, 9, 9)),
        "deconv": (nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8)), torch.randn(2, 3, 9, 9)),
        "linear": (nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8)), torch.randn(5, 9)),
    }
    module, x = kinds[layer]
    model = exported(lively(module), x)
    folded, _ = folded_copy(model)
    peer = prepare_pt2e(copy.deepcopy(model), _Nothing())
    assert torch.equal(folded(x), peer(x))


class SharedOutput(nn.Module):
    """A convolution whose result is also used beside the batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class TwoNorms(nn.Module):
    """One convolution, two batch norms on its result."""

    def __init__(self):
        super().__init__()
        self.conv, self.one, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.one(y) - self.other(y)


class LinearTwice(nn.Module):
    """Linear + BatchNorm1d with a second reader of the linear layer."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.linear(x)
        return self.norm(y) * y.sigmoid()


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (SharedOutput(), torch.randn(2, 3, 6, 6)),
        (TwoNorms(), torch.randn(2, 3, 6, 6)),
        (LinearTwice(), torch.randn(3, 5)),
    ],
    ids=["output_used_elsewhere", "two_norms", "linear_second_reader"],
)
def test_producers_with_other_readers_keep_their_norm(module, x):
    model = exported(lively(module), x)
    folded, outcome = folded_copy(model)
    assert not any(folding.folded for folding in outcome)
    assert all("also used by" in folding.reason and folding.producer for folding in outcome)
    assert torch.equal(folded(x), model(x))


class SharedConv(nn.Module):
    """One convolution on two paths, each with a batch norm of its own."""

    def __init__(self, same_norm: bool, bias: bool):
        super().__init__()
        self.conv, self.one = nn.Conv2d(3, 3, 3, padding=1, bias=bias), nn.BatchNorm2d(3)
        self.other = self.one if same_norm else nn.BatchNorm2d(3)

    def forward(self, x):
        return self.other(self.conv(torch.relu(self.one(self.conv(x)))))


@pytest.mark.parametrize("bias", [False, True])
def test_shared_convolution_folds_once_for_each_norm(bias):
    folded = check_folds(SharedConv(same_norm=False, bias=bias), torch.randn(2, 3, 6, 6))
    assert sum("folded" in name for name, _ in folded.named_parameters()) == 4


@pytest.mark.parametrize("bias", [False, True])
def test_pair_called_twice_folds_into_one_weight(bias):
    folded = check_folds(SharedConv(same_norm=True, bias=bias), torch.randn(2, 3, 6, 6))
    assert sum("folded" in name for name, _ in folded.named_parameters()) == 2


class SharedConvKeptOnce(nn.Module):
    """A shared convolution that is read once with and once without batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)) + self.conv(x * 2)


def test_shared_convolution_without_norm_keeps_its_weight():
    check_folds(SharedConvKeptOnce(), torch.randn(2, 3, 6, 6))


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x))


class FlatImage(nn.Module):
    """An unbatched convolution: the batch norm normalizes its rows, not its channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.conv(x))


UNFOLDABLE = {
    "no_statistics": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        torch.randn(2, 3, 6, 6),
        "'running_mean'",
    ),
    "computed_weight": (WeightNorm(), torch.randn(2, 3, 6, 6), "not a constant"),
    "no_producer": (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), torch.randn(2, 3, 6, 6), "relu"),
    "unbatched": (FlatImage(), torch.randn(3, 4), "axis 1"),
    "linear_3d": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(2, 6, 4), "axis 1"),
}


@pytest.mark.parametrize("case", UNFOLDABLE)
def test_what_cannot_be_folded_stays_and_says_why(case):
    module, x, words = UNFOLDABLE[case]
    model = exported(lively(module), x)
    expected = model(x)
    folded, (outcome,) = folded_copy(model)
    assert not outcome.folded
    assert words in outcome.reason
    assert torch.equal(folded(x), expected)


def test_backend_decides_which_pairs_fold():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3), nn.BatchNorm2d(4))
    model = working_copy(exported(lively(module), torch.randn(2, 3, 6, 6)))
    outcome = fold_batch_norms(
        model, allow=lambda producer, norm: "no kernel for it" if "transpose" in str(producer.target) else None
    )
    assert [folding.folded for folding in outcome] == [True, False]
    assert outcome[1] == Folding("batch_norm_1", "3", "conv_transpose2d", False, "no kernel for it")
    assert batch_norms(model) == 1


def test_parameters_of_the_caller_are_untouched():
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 6, 6)
    model = exported(module, x)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    names = set(model.state_dict())
    folded_copy(model)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert set(model.state_dict()) == names


def test_training_export_folds_with_running_statistics_and_stops_counting():
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    x = torch.randn(2, 3, 6, 6)
    folded, (outcome,) = folded_copy(exported(module, x, training=True))
    assert outcome.folded
    assert not [n for n in folded.graph.nodes if n.target is torch.ops.aten.add_.Tensor]
    torch.testing.assert_close(folded(x), module.eval()(x), rtol=1e-4, atol=1e-5)


def test_counter_of_a_norm_that_stays_goes_on():
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)))
    folded, _ = folded_copy(exported(module, torch.randn(2, 3, 6, 6), training=True))
    counters = [str(n.args[0].target) for n in folded.graph.nodes if n.target is torch.ops.aten.add_.Tensor]
    assert counters == ["3.num_batches_tracked"]


class Written(nn.Module):
    """A model that updates the weight of its own convolution when it runs."""

    def __init__(self):
        super().__init__()
        self.weight: torch.Tensor
        self.register_buffer("weight", torch.randn(4, 3, 3, 3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.norm(nn.functional.conv2d(x, self.weight))
        self.weight.mul_(0.5)
        return y


def test_weight_that_the_graph_changes_is_not_folded():
    model = exported(lively(Written()), torch.randn(2, 3, 6, 6))
    _, (outcome,) = folded_copy(model)
    assert not outcome.folded
    assert "writes to 'weight'" in outcome.reason


def test_dynamic_batch_folds():
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm(self.conv(x)).reshape(x.shape[0], -1)

    module, batch = lively(Viewed()).eval(), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (torch.randn(4, 3, 6, 6),), dynamic_shapes=({0: batch},))
    folded, (outcome,) = folded_copy(program.module())
    x = torch.randn(7, 3, 6, 6)
    assert outcome.folded
    torch.testing.assert_close(folded(x), module(x), rtol=1e-4, atol=1e-5)


def test_half_precision_keeps_its_dtype():
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(torch.bfloat16)
    x = torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)
    folded, (outcome,) = folded_copy(exported(module, x))
    assert outcome.folded
    assert folded(x).dtype == torch.bfloat16
    assert all(p.dtype == torch.bfloat16 for name, p in folded.named_parameters() if "folded" in name)


def test_folded_model_is_exported_and_loaded_again(tmp_path):
    module = lively(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()))
    x = torch.randn(2, 3, 6, 6)
    folded, _ = folded_copy(exported(module, x))
    torch.export.save(torch.export.export(folded, (x,)), tmp_path / "folded.pt2")
    assert torch.equal(torch.export.load(tmp_path / "folded.pt2").module()(x), folded(x))


@st.composite
def networks(draw):
    """A random chain of convolutions and batch norms, some sharing layers, some read twice."""
    steps = draw(st.lists(st.sampled_from(["conv", "deconv", "norm", "relu", "again", "skip"]), min_size=2, max_size=9))
    return steps, draw(st.booleans()), draw(st.integers(0, 2**16))


class Chain(nn.Module):
    def __init__(self, steps, bias):
        super().__init__()
        self.steps = steps
        layers = {"conv": nn.Conv1d, "deconv": nn.ConvTranspose1d}
        made = [layers[s](4, 4, 3, padding=1, bias=bias, groups=2) if s in layers else nn.BatchNorm1d(4) for s in steps]
        self.layers = nn.ModuleList(made)

    def forward(self, x):
        first = x
        for step, layer in zip(self.steps, self.layers, strict=True):
            if step == "again":
                x = self.layers[self.steps.index(step) - 1](x) if self.steps.index(step) else x
            elif step == "skip":
                x, first = x + first, x
            else:
                x = torch.relu(x) if step == "relu" else layer(x)
        return x


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(networks())
def test_folding_never_changes_what_a_network_computes(network):
    steps, bias, seed = network
    torch.manual_seed(seed)
    module = lively(Chain(steps, bias)).double().eval()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    model = exported(module, x)
    folded, outcome = folded_copy(model)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-9, atol=1e-9)
    assert sum(not folding.folded for folding in outcome) == batch_norms(folded)
