"""QAT with batch norms: torchao's numbers in training, one exact convolution after it."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ResNet18
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchao.quantization.pt2e import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    disable_fake_quant,
    disable_observer,
    move_exported_model_to_eval,
    quantize_pt2e,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

import quantplug
from quantplug.core.batch_norms.inference import fold_batch_norms
from quantplug.core.batch_norms.training import fold_batch_norms_qat, fuse_batch_norms_qat
from quantplug.core.errors import AnnotationError
from quantplug.core.graph.working_copy import working_copy
from quantplug.core.patterns.language import op
from quantplug.core.pt2e.convert import convert_pt2e
from quantplug.core.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e

PRODUCERS = op(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear"
).targets
BATCH_NORM = torch.ops.aten.batch_norm.default
# FusedMovingAvgObsFakeQuantize would not do here: for symmetric schemes its kernel trains with a scale that
# is 0.4 % off the one that its calculate_qparams gives convert.
PER_TENSOR = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
ACTIVATION = QuantizationSpec(torch.int8, PER_TENSOR, -128, 127, torch.per_tensor_affine)


def weight_spec(axis: int | None, least: int = -127, greatest: int = 127) -> QuantizationSpec:
    """A weight spec per channel along an axis, or per tensor."""
    observer = MovingAverageMinMaxObserver if axis is None else MovingAveragePerChannelMinMaxObserver
    constructor = FakeQuantize.with_args(observer=observer)
    scheme = torch.per_tensor_symmetric if axis is None else torch.per_channel_symmetric
    return QuantizationSpec(torch.int8, constructor, least, greatest, scheme, axis)


def int32_bias(producer: fx.Node, source: fx.Node, weight: fx.Node) -> DerivedQuantizationSpec:
    """A bias at the scale of the accumulator."""

    def derive(observers):
        scales = [observer.calculate_qparams()[0] for observer in observers]
        scale = (scales[0] * scales[1]).to(torch.float32)
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    sources, scheme = [(source, producer), (weight, producer)], torch.per_channel_symmetric
    return DerivedQuantizationSpec(sources, derive, torch.int32, -(2**31), 2**31 - 1, scheme, 0)


class PieceQuantizer(Quantizer):
    """Quantizes every producer with the batch norm and relu behind it as one piece."""

    def __init__(self, axis: int | None = 0, activation=ACTIVATION, weight=None, quantized_bias: bool = False):
        self.weight = weight or weight_spec(axis)
        self.activation, self.quantized_bias = activation, quantized_bias

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target in PRODUCERS:
                inputs = {node.args[0]: self.activation, node.args[1]: self.weight}
                if self.quantized_bias:
                    inputs[node.args[2]] = int32_bias(node, *node.args[:2])
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, _annotated=True)
                self._last(node).meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation(_annotated=True))
                self._last(node).meta[Q_ANNOTATION_KEY].output_qspec = self.activation
        return model

    @staticmethod
    def _last(node):
        for target in (BATCH_NORM, torch.ops.aten.relu.default):
            users = [user for user in node.users if user.target is target]
            node = users[0] if len(users) == 1 == len(node.users) else node
        return node

    def validate(self, model):
        pass


def exported(module: nn.Module, *inputs: torch.Tensor, training: bool = True) -> fx.GraphModule:
    return torch.export.export(copy.deepcopy(module).train(training), inputs).module()


def train(model: fx.GraphModule, *shape: int, steps: int = 4) -> list[torch.Tensor]:
    """Trains for a few steps on noise that is the same for every model; returns the outputs."""
    torch.manual_seed(7)
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        result = model(torch.randn(*shape))
        outputs.append(result.detach().clone())
        optimizer.zero_grad()
        (result - 0.5).square().mean().backward()
        optimizer.step()
    return outputs


def operators(model: fx.GraphModule) -> Counter:
    return Counter(str(n.target) for n in model.graph.nodes if n.op == "call_function")


KINDS = {
    "conv1d": (nn.Conv1d, nn.BatchNorm1d, 1),
    "conv2d": (nn.Conv2d, nn.BatchNorm2d, 2),
    "conv3d": (nn.Conv3d, nn.BatchNorm3d, 3),
    "conv_transpose1d": (nn.ConvTranspose1d, nn.BatchNorm1d, 1),
    "conv_transpose2d": (nn.ConvTranspose2d, nn.BatchNorm2d, 2),
    "conv_transpose3d": (nn.ConvTranspose3d, nn.BatchNorm3d, 3),
}


def network(kind: str, bias: bool, relu: bool, groups: int = 1, affine: bool = True, eps: float = 1e-5):
    """A network of two pairs, and the shape of its input."""
    torch.manual_seed(0)
    layer, norm, dims = KINDS[kind]
    parts = [layer(4, 6, 3, bias=bias, padding=1, groups=groups), norm(6, affine=affine, eps=eps)]
    parts += [nn.ReLU()] if relu else []
    parts += [layer(6, 4, 3, bias=bias, padding=1), norm(4, affine=affine, eps=eps)]
    return nn.Sequential(*parts), (3, 4, *(7,) * dims)


def four_pairs(kind: str):
    """A network of pairs with and without bias, with and without relu, and the shape of its input."""
    first, shape = network(kind, True, True)
    second, _ = network(kind, False, True)
    return nn.Sequential(*first, *second), shape


def check_training_equals_torchao(module, shape, quantizer):
    """Trains one model in both cores; returns them in evaluation mode, torchao's first."""
    peer = quantize_pt2e.prepare_qat_pt2e(exported(module, torch.randn(*shape)), quantizer)
    ours = prepare_qat_pt2e(exported(module, torch.randn(*shape)), quantizer)
    assert operators(ours) == operators(peer)
    for expected, found in zip(train(peer, *shape), train(ours, *shape), strict=True):
        assert torch.equal(found, expected)
    move_exported_model_to_eval(peer)
    ours.eval()
    x = torch.randn(*shape)
    assert torch.equal(ours(x), peer(x))
    return peer, ours


# torchao's convert re-exports 96 patterns when there is a batch norm, which takes half a minute.
@pytest.mark.parametrize(
    ("kind", "per_channel", "converts"),
    [
        ("conv2d", False, False),
        pytest.param("conv1d", True, False, marks=pytest.mark.slow),
        pytest.param("conv2d", True, True, marks=pytest.mark.slow),
        pytest.param("conv1d", True, True, marks=pytest.mark.slow),
        pytest.param("conv2d", False, True, marks=pytest.mark.slow),
    ],
)
def test_training_equals_torchao_bit_for_bit(kind, per_channel, converts):
    module, shape = four_pairs(kind)
    config = get_symmetric_quantization_config(is_per_channel=per_channel, is_qat=True)
    peer, ours = check_training_equals_torchao(module, shape, XNNPACKQuantizer().set_global(config))
    if converts:
        x, peer, ours = torch.randn(*shape), quantize_pt2e.convert_pt2e(peer), convert_pt2e(ours)
        # torchao goes on counting batches for folded batch norms, except for BatchNorm2d.
        counting = Counter({"aten.add_.Tensor": operators(peer)["aten.add_.Tensor"]})
        assert operators(ours) == operators(peer) - counting
        assert torch.equal(ours(x), peer(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["conv_transpose2d", pytest.param("conv_transpose1d", marks=pytest.mark.slow)])
def test_transposed_training_equals_torchao_per_tensor(kind):
    module, shape = four_pairs(kind)
    check_training_equals_torchao(module, shape, PieceQuantizer(None))


def check_folds_exactly(module, shape, axis=0, steps=4, **options):
    """Trains with quantized weights, freezes and converts: the result computes what the trained model did.

    Activations stay float: behind a quantized one, a last bit can become a whole quantization step.
    """
    quantizer = PieceQuantizer(axis, activation=None, **options)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), quantizer)
    train(prepared, *shape, steps=steps)
    prepared.apply(disable_observer)
    converted = convert_pt2e(prepared.eval())
    converted.graph.lint()
    x = torch.randn(*shape)
    assert (converted(x) - prepared(x)).abs().max() < 1e-5
    return converted


def pair_count(model):
    return sum(n.target is BATCH_NORM for n in model.graph.nodes)


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
@pytest.mark.parametrize("kind", KINDS)
def test_r15_qat_conv_bn_folds_to_one_conv(kind, affine, bias):
    module, shape = network(kind, bias, True, affine=affine, eps=3e-3)
    converted = check_folds_exactly(module, shape, 1 if "transpose" in kind else 0)
    assert {name.split(".")[1] for name in operators(converted)} == {kind, "relu", "dequantize_per_channel"}
    assert all(parameter.dim() == 1 for parameter in converted.parameters()), "a float weight was left behind"


@pytest.mark.parametrize("kind", ["conv2d", "conv_transpose1d", "conv_transpose2d"])
def test_r15_grouped_convolutions_fold(kind):
    module, shape = network(kind, True, True, groups=2)
    converted = check_folds_exactly(module, shape, None)
    assert pair_count(converted) == 0


@pytest.mark.parametrize("bias", [False, True])
def test_r15_linear_bn_folds(bias):
    module = nn.Sequential(nn.Linear(5, 8, bias=bias), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    converted = check_folds_exactly(module, (6, 5))
    assert pair_count(converted) == 0


def test_r15_integer_bias_is_derived_from_the_folded_weight():
    module, shape = network("conv2d", True, True)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer(quantized_bias=True))
    train(prepared, *shape)
    prepared.apply(disable_observer)
    converted = convert_pt2e(prepared.eval())
    x = torch.randn(*shape)
    assert any(b.dtype == torch.int32 and "bias" in name for name, b in converted.named_buffers())
    # Rounding the bias moves the accumulator by at most half a step of scale_x * scale_w, far below an output step.
    step = max(n.args[1] for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target))
    assert (converted(x) - prepared(x)).abs().max() <= 1.01 * step


@pytest.mark.parametrize("exact_roots", [True, False])
def test_trained_integers_are_the_stored_integers(exact_roots):
    """But on the border between two: training, as torchao's, divides by a root where folding takes its reciprocal."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64, momentum=0, eps=2.0**-16))
    module[1].running_var.copy_(torch.tensor([0.25, 1, 4])[torch.arange(64) % 3] - 2.0**-16)
    if not exact_roots:
        module[1].running_var.uniform_(0.2, 4)
    nn.init.uniform_(module[1].get_parameter("weight"), 0.2, 3)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(2, 64, 6, 6)), PieceQuantizer())
    prepared(torch.randn(2, 64, 6, 6))
    prepared.apply(disable_observer)
    conv = next(n for n in prepared.graph.nodes if n.target in PRODUCERS)
    used = []
    hook = prepared.get_submodule(str(conv.args[1].target)).register_forward_hook(lambda m, a, out: used.append(out))
    prepared.eval()(torch.randn(2, 64, 6, 6))
    hook.remove()
    converted = convert_pt2e(prepared)
    weight = next(n for n in converted.graph.nodes if n.target in PRODUCERS).args[1]
    scale, stored = (converted.get_buffer(str(n.target)) for n in (weight.args[1], weight.args[0]))
    steps = used[0] / scale.float().reshape(-1, 1, 1, 1)
    moved = (stored - steps).abs().round()
    assert moved.max() <= (0 if exact_roots else 1)
    assert moved.count_nonzero() <= 3e-4 * moved.numel()


def test_stored_integers_are_those_of_torchs_own_folding():
    """FX graph mode and torchao fold so; weights on the border between two integers show any other order."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64)
    module = nn.Sequential(conv, norm).eval()
    norm.running_var.uniform_(0.2, 4)
    nn.init.uniform_(norm.weight, 0.2, 3)
    factor = (norm.weight * torch.rsqrt(norm.running_var + norm.eps)).reshape(-1, 1, 1, 1)  # type: ignore[arg-type]
    steps = torch.randint(-120, 120, conv.weight.shape) + 0.5
    steps[0, 0, 0, 0] = 127
    conv.weight.data = (steps / 127 / factor).detach()
    x = torch.randn(2, 32, 6, 6)
    prepared = prepare_qat_pt2e(exported(module, x, training=False), PieceQuantizer(None, activation=None)).eval()
    prepared(x)
    converted = convert_pt2e(prepared)
    dequantize = next(n for n in converted.graph.nodes if n.target in PRODUCERS).args[1]
    args: Any = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    weight, _ = fuse_conv_bn_weights(conv.weight, conv.bias, *args)
    expected = torch.ops.quantized_decomposed.quantize_per_tensor(weight, *dequantize.args[1:])
    assert torch.equal(converted.get_buffer(str(dequantize.args[0].target)), expected)


class SharedLayers(nn.Module):
    """A convolution and batch norm that are called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(torch.relu(self.norm(self.conv(x)))))


def test_shared_layers_train_and_fold():
    torch.manual_seed(0)
    converted = check_folds_exactly(SharedLayers(), (2, 4, 6, 6))
    assert pair_count(converted) == 0


def test_zero_gamma_trains_and_folds():
    """Residual branches start with gamma = 0; dividing by it gives NaN in torchao."""
    module, shape = network("conv2d", True, False)
    nn.init.zeros_(module[3].weight)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer())
    first = train(prepared, *shape)
    assert all(torch.isfinite(output).all() for output in first)
    assert prepared.get_parameter("3.weight").abs().min() > 0
    untrained = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer(activation=None)).eval()
    x = torch.randn(*shape)
    expected = untrained(x)
    untrained.apply(disable_observer)
    torch.testing.assert_close(convert_pt2e(untrained)(x), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(expected, module[3].bias.reshape(1, -1, 1, 1).expand_as(expected))


def test_r15_fully_quantized_model_differs_by_rounding_only():
    module, shape = network("conv2d", True, True)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer())
    train(prepared, *shape)
    prepared.apply(disable_observer)
    converted, x = convert_pt2e(prepared.eval()), torch.randn(*shape)
    output = next(n for n in reversed(converted.graph.nodes) if "quantize_per_tensor" in str(n.target))
    steps = ((converted(x) - prepared(x)) / output.args[1]).abs()
    assert steps.max() < 1.01
    assert (steps > 0.5).float().mean() < 0.02


def test_eps_and_momentum_survive():
    module, shape = network("conv2d", True, True, eps=4e-3)
    module[1].momentum = 0.37
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer())
    prepared.eval()
    prepared.train()
    norm = next(n for n in prepared.graph.nodes if n.target is BATCH_NORM)
    assert norm.args[5:8] == (True, 0.37, 4e-3)


def test_gradients_reach_every_parameter():
    module, shape = network("conv2d", True, True)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer())
    prepared(torch.randn(*shape)).square().mean().backward()
    assert all(p.grad is not None for name, p in prepared.named_parameters())
    assert not any(p.grad is not None for p in module.parameters())


def test_b10_qat_and_ptq_agree_in_float():
    module, shape = network("conv2d", True, True)
    module[1].running_var.uniform_(0.3, 3)
    module[1].running_mean.uniform_(-1, 1)
    x = torch.randn(*shape)
    folded = prepare_pt2e(exported(module, x, training=False), XNNPACKQuantizer())
    fused = prepare_qat_pt2e(exported(module, x), PieceQuantizer()).eval()
    fused.apply(disable_fake_quant).apply(disable_observer)
    torch.testing.assert_close(fused(x), folded(x), rtol=0, atol=1e-6)


def test_e18_one_quantizer_serves_ptq_and_qat():
    module, shape = network("conv2d", False, True)
    x, quantizer = torch.randn(*shape), PieceQuantizer()
    results = {}
    for name, prepare, training in (("ptq", prepare_pt2e, False), ("qat", prepare_qat_pt2e, True)):
        prepared = prepare(exported(module, x, training=training), quantizer)
        prepared(x)
        results[name] = convert_pt2e(prepared.eval())
    assert operators(results["qat"]) == operators(results["ptq"])


def test_b15_fusion_only_inserts_no_quantization():
    class FusesOnly(Quantizer):
        def annotate(self, model):
            return model

        def validate(self, model):
            pass

    module, shape = network("conv2d", True, True)
    x = torch.randn(*shape)
    converted = prepare_pt2e(exported(module, x, training=False), FusesOnly())
    assert pair_count(converted) == 0
    assert not [name for name in operators(converted) if "quantize" in name]


# The rest is about which pairs are fused, and about what annotations look like afterwards.


def annotated(module, shape, quantizer=None, training=True):
    model = working_copy(exported(module, torch.randn(*shape), training=training))
    (quantizer or PieceQuantizer()).annotate(model)
    return model


def test_pair_without_quantized_weight_stays():
    class InputOnly(PieceQuantizer):
        def annotate(self, model):
            super().annotate(model)
            for node in model.graph.nodes:
                if node.target in PRODUCERS:
                    node.meta[Q_ANNOTATION_KEY].input_qspec_map.pop(node.args[1])

    module, shape = network("conv2d", True, True)
    model = annotated(module, shape, InputOnly())
    before = str(model.graph)
    outcome = fuse_batch_norms_qat(model)
    assert [folding.folded for folding in outcome] == [False, False]
    assert "weight of 'conv2d'" in outcome[0].reason
    assert "not quantized" in outcome[0].reason
    assert str(model.graph) == before


def test_pair_that_is_quantized_in_between_stays():
    module, shape = network("conv2d", True, True)
    model = annotated(module, shape)
    conv = next(n for n in model.graph.nodes if n.target in PRODUCERS)
    conv.meta[Q_ANNOTATION_KEY].output_qspec = ACTIVATION
    outcome = fuse_batch_norms_qat(model)
    assert [folding.folded for folding in outcome] == [False, True]
    assert "quantized before the batch norm" in outcome[0].reason


def test_backend_decides_which_pairs_fuse():
    module, shape = network("conv2d", True, True)
    outcome = fuse_batch_norms_qat(annotated(module, shape), allow=lambda producer, norm: "not here")
    assert {folding.reason for folding in outcome} == {"not here"}


def test_bias_with_a_range_of_its_own_is_an_error():
    module, shape = network("conv2d", True, True)
    model = annotated(module, shape)
    conv = next(n for n in model.graph.nodes if n.target in PRODUCERS)
    conv.meta[Q_ANNOTATION_KEY].input_qspec_map[conv.args[2]] = weight_spec(None)
    before = str(model.graph)
    with pytest.raises(AnnotationError, match=r"bias of 'conv2d'.*module '0'.*DerivedQuantizationSpec"):
        fuse_batch_norms_qat(model)
    assert str(model.graph) == before


def test_annotations_follow_to_the_scaled_weight_and_zero_bias():
    module, shape = network("conv2d", True, True)
    model = annotated(module, shape, PieceQuantizer(quantized_bias=True))
    first, second = (n for n in model.graph.nodes if n.target in PRODUCERS)
    specs = list(first.meta[Q_ANNOTATION_KEY].input_qspec_map.values())
    second.meta[Q_ANNOTATION_KEY].input_qspec_map[second.args[1]] = SharedQuantizationSpec((first.args[1], first))
    fuse_batch_norms_qat(model)
    found = first.meta[Q_ANNOTATION_KEY].input_qspec_map
    assert list(found) == list(first.args[:3])
    assert list(found.values())[:2] == specs[:2]
    assert found[first.args[2]].derived_from == [(first.args[0], first), (first.args[1], first)]
    shared = second.meta[Q_ANNOTATION_KEY].input_qspec_map[second.args[1]]
    assert shared == SharedQuantizationSpec((first.args[1], first))


def test_annotation_on_the_weight_itself_follows():
    module, shape = network("conv2d", True, True)
    model = annotated(module, shape)
    conv = next(n for n in model.graph.nodes if n.target in PRODUCERS)
    weight = conv.args[1]
    spec = conv.meta[Q_ANNOTATION_KEY].input_qspec_map.pop(weight)
    weight.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(output_qspec=spec, _annotated=True)
    assert all(folding.folded for folding in fuse_batch_norms_qat(model))
    assert conv.args[1].meta[Q_ANNOTATION_KEY].output_qspec is spec
    assert Q_ANNOTATION_KEY not in weight.meta


def test_fused_graph_computes_the_same_and_folds_back():
    module, shape = network("conv2d", True, True)
    x, model = torch.randn(*shape), annotated(module, shape, training=False)
    expected = model(x)
    fuse_batch_norms_qat(model)
    model.graph.lint()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert all("val" in n.meta and n.meta["val"].shape for n in model.graph.nodes if n.op == "call_function")
    assert all(folding.folded for folding in fold_batch_norms_qat(model))
    model.graph.lint()
    plain = working_copy(exported(module, x, training=False))
    fold_batch_norms(plain)
    assert operators(model) == operators(plain)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


@st.composite
def pairs(draw):
    """A random pair of layer and batch norm, and the shape of its input."""
    kind = draw(st.sampled_from([*KINDS, "linear"]))
    channels, bias, affine = draw(st.sampled_from([2, 4, 6])), draw(st.booleans()), draw(st.booleans())
    if kind == "linear":
        return nn.Sequential(nn.Linear(4, channels, bias), nn.BatchNorm1d(channels, affine=affine)), (3, 4)
    layer, norm, dims = KINDS[kind]
    groups, stride = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    made = layer(4, channels, 3, stride=stride, groups=groups, bias=bias)
    eps = draw(st.floats(1e-6, 1e-1))
    return nn.Sequential(made, norm(channels, affine=affine, eps=eps)), (3, 4, *(5,) * dims)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(pairs(), st.booleans(), st.integers(0, 2**16))
def test_any_pair_trains_as_it_was_and_folds_as_for_inference(pair, zero_gamma, seed):
    module, shape = pair
    torch.manual_seed(seed)
    norm = module[1]
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.3, 3)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
        with torch.no_grad():
            norm.weight[0] *= not zero_gamma
    x = torch.randn(*shape)
    model, plain = annotated(module, shape, training=False), working_copy(exported(module, x, training=False))
    expected = model(x)
    assert all(folding.folded for folding in fuse_batch_norms_qat(model))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert all(folding.folded for folding in fold_batch_norms_qat(model) + fold_batch_norms(plain))
    model.graph.lint()
    assert operators(model) == operators(plain)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_model_that_torchao_prepared_and_trained_folds():
    module, shape = network("conv2d", True, True)
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    quantizer = XNNPACKQuantizer().set_global(config)
    prepared = quantize_pt2e.prepare_qat_pt2e(exported(module, torch.randn(*shape)), quantizer)
    train(prepared, *shape)
    move_exported_model_to_eval(prepared)
    ours = convert_pt2e(prepared)
    x = torch.randn(*shape)
    assert pair_count(ours) == 0
    assert torch.equal(ours(x), quantize_pt2e.convert_pt2e(prepared)(x))


def test_foreign_structure_is_left_alone_with_a_reason():
    """A convolution that was fused by hand in another way keeps its batch norm."""
    module, shape = network("conv2d", True, True)
    model = annotated(module, shape)
    fuse_batch_norms_qat(model)
    conv = next(n for n in model.graph.nodes if n.target in PRODUCERS)
    conv.args = (conv.args[0], conv.args[1].args[0], *conv.args[2:])
    outcome = fold_batch_norms_qat(model)
    assert [folding.folded for folding in outcome] == [False, True]
    assert "does not read the scaled weight" in outcome[0].reason


def test_e17_gradient_is_one_inside_the_range_and_zero_outside():
    module, shape = nn.Sequential(nn.Linear(4, 4, bias=False)), (2, 4)
    spec = QuantizationSpec(torch.int8, PER_TENSOR, -8, 7, torch.per_tensor_symmetric)
    prepared = prepare_qat_pt2e(exported(module, torch.randn(*shape)), PieceQuantizer(weight=spec))
    prepared(torch.ones(*shape))
    prepared.apply(disable_observer)
    observed = next(n for n in prepared.graph.nodes if n.op == "call_module" and "weight" in n.args[0].name)
    fake_quantize: Any = prepared.get_submodule(str(observed.target))
    least, greatest = (float(fake_quantize.scale) * bound for bound in (-8, 7))
    x = torch.linspace(2 * least, 2 * greatest, 301, requires_grad=True)
    fake_quantize(x).sum().backward()
    half = float(fake_quantize.scale) / 2
    assert (x.grad[(x > least - half) & (x < greatest + half)] == 1).all()
    assert (x.grad[(x < least - half) | (x > greatest + half)] == 0).all()
    assert 0 < x.grad.mean() < 1


def test_what_was_trained_with_dropout_is_converted_without():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    x = torch.randn(4, 8)
    config = quantplug.get_symmetric_quantization_config(is_qat=True)
    quantizer = quantplug.get_quantizer("xnnpack").set_global(config)
    prepared = quantplug.prepare_qat_pt2e(torch.export.export(model.eval(), (x,)).module(), quantizer)
    assert not torch.equal(prepared(x), prepared(x))
    converted = quantplug.convert_pt2e(prepared)
    assert torch.equal(converted(x), converted(x))


def weights(graph):
    """The integers of weights that a q/dq graph holds, in an order that is the same in every graph."""
    held = (node.args[0] for node in graph.graph.nodes if str(node.target).startswith("quantized_decomposed.deq"))
    values = (graph.state_dict().get(str(node.target)) for node in held if node.op == "get_attr")
    found = [value for value in values if value is not None and value.dim() > 1]
    return sorted(found, key=lambda value: (value.shape, value[0].float().sum().item()))


@pytest.mark.slow
def test_q16_a_trained_resnet18_is_converted_to_what_torchao_converts_it_to():
    """Which is what FX graph mode gives, bit for bit; scales of batch norms are not one, as after training."""
    torch.manual_seed(0)
    model, x = ResNet18(), torch.randn(1, 3, 64, 64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    results = []
    for prepare, convert in (
        (prepare_qat_pt2e, convert_pt2e),
        (quantize_pt2e.prepare_qat_pt2e, quantize_pt2e.convert_pt2e),
    ):
        prepared = prepare(exported(model, x), XNNPACKQuantizer().set_global(config))
        torch.manual_seed(100)
        prepared(x)
        results.append(convert(move_exported_model_to_eval(prepared)))
    ours, theirs = map(weights, results)
    assert len(ours) == len(theirs) == 21
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(*(graph(x) for graph in results))
