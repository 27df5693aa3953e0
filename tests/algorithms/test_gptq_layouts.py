"""GPTQ however a weight lies in its tensor: transposed convolutions, groups, scales along either axis, one sample."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import quantplug
from quantplug.algorithms.gptq import GPTQ
from quantplug.algorithms.products import _columns
from quantplug.algorithms.weights import weights_of
from quantplug.core.graph.facts import attribute, operands
from quantplug.core.specs.levels import sqnr

KINDS: Any = {
    (False, 1): (nn.Conv1d, nn.functional.conv1d),
    (False, 2): (nn.Conv2d, nn.functional.conv2d),
    (False, 3): (nn.Conv3d, nn.functional.conv3d),
    (True, 1): (nn.ConvTranspose1d, nn.functional.conv_transpose1d),
    (True, 2): (nn.ConvTranspose2d, nn.functional.conv_transpose2d),
    (True, 3): (nn.ConvTranspose3d, nn.functional.conv_transpose3d),
}


class WeightsOfConvolutions(Quantizer):
    """A quantizer of a user's: weights of few bits with scales along an axis, or one (None); "outputs" takes theirs."""

    def __init__(self, axis, bits=4):
        self.axis, self.limit = axis, 2 ** (bits - 1) - 1

    def spec(self, node):
        axis = int("transpose" in str(node.target) or operands(node).get("transposed", False))
        axis = axis if self.axis == "outputs" else self.axis
        made, scheme = MinMaxObserver, torch.per_tensor_symmetric
        if axis is not None:
            made, scheme = PerChannelMinMaxObserver, torch.per_channel_symmetric
        return QuantizationSpec(torch.int8, made, -self.limit, self.limit, scheme, axis)

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.op == "call_function" and "conv" in str(node.target):
                given = {operands(node)["weight"]: self.spec(node)}
                node.meta["quantization_annotation"] = QuantizationAnnotation(input_qspec_map=given, _annotated=True)
        return model

    def validate(self, model):
        pass


def inputs(*shape, seed=0):
    """Returns inputs whose channels go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) + 2 * torch.randn(shape[0], 1, *shape[2:], generator=generator)


def prepared(model, batches, axis="outputs", *, decomposed=False, bits=4):
    program = torch.export.export(model.eval(), (batches[0],))
    program = program.run_decompositions() if decomposed else program
    ready = quantplug.prepare_pt2e(program.module(), WeightsOfConvolutions(axis, bits))
    quantplug.calibrate(ready, batches, progress=False)
    return ready


def values_in(converted, ready):
    """Returns by layer the values that a converted graph's integers stand for, and the weight that `ready` holds."""
    given = {node.name: operands(node)["weight"].args[0] for node in ready.graph.nodes if "conv" in node.name[:4]}
    found = {}
    for node in converted.graph.nodes:
        if node.name in given and node.op == "call_function":
            back = operands(node)["weight"]
            args = [
                attribute(converted, str(one.target)) if isinstance(one, torch.fx.Node) else one for one in back.args
            ]
            assert args[0].dtype == torch.int8
            found[node.name] = (back.target(*args, **back.kwargs), attribute(ready, given[node.name].target))
    return found


@st.composite
def layers(draw, dims=(1, 2)):
    """Draws a convolution and the shape of what it reads."""
    transposed, spatial = draw(st.booleans()), draw(st.sampled_from(dims))
    groups, inside, outside = (draw(st.integers(1, 3)) for _ in range(3))

    def each(strategy):
        return tuple(draw(strategy) for _ in range(spatial))

    kernel, stride, dilation = each(st.integers(1, 3)), each(st.integers(1, 3)), each(st.integers(1, 2))
    padding = tuple(draw(st.integers(0, step * (size - 1) // 2)) for step, size in zip(dilation, kernel, strict=True))
    given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        most = (max(pair) - 1 for pair in zip(stride, dilation, strict=True))
        given["output_padding"] = tuple(draw(st.integers(0, end)) for end in most)
    torch.manual_seed(draw(st.integers(0, 99)))
    layer = KINDS[transposed, spatial][0](groups * inside, groups * outside, kernel, **given)
    return layer, (draw(st.integers(1, 4)), groups * inside, *each(st.integers(5, 7)))


@settings(max_examples=10, deadline=None)
@given(drawn=layers(), axis=st.sampled_from([None, 0, 1]), batched=st.booleans(), decomposed=st.booleans())
def test_columns_times_the_matrix_are_the_layers_result(drawn, axis, batched, decomposed):
    layer, shape = drawn
    x = inputs(*shape) if batched else inputs(*shape)[0]
    (weight,), left = weights_of(prepared(layer, [x], axis, decomposed=decomposed))
    assert left == {}
    assert torch.equal(weight.as_held(weight.matrix), layer.weight)
    # Decomposed, the axis of samples is there in any case.
    read = x if batched or not decomposed else x[None]
    columns = _columns(weight.layers[0], read.double(), weight.by_rows.shape)
    wanted = layer.double()(read.double()) - layer.bias.reshape(-1, *[1] * (len(shape) - 2))
    found = (weight.matrix.double() @ columns).reshape(wanted.movedim(1 - len(shape), 0).shape)
    torch.testing.assert_close(found, wanted.movedim(1 - len(shape), 0), rtol=1e-12, atol=1e-12)


@settings(max_examples=8, deadline=None)
@given(drawn=layers(), axis=st.sampled_from([None, 0, 1]), batched=st.booleans(), bits=st.integers(2, 5))
def test_no_layer_is_further_from_float_and_decibels_are_those_of_its_result(drawn, axis, batched, bits):
    layer, shape = drawn
    x = inputs(*shape) if batched else inputs(*shape)[0]
    ready = prepared(layer, [x], axis, bits=bits)
    wanted, levels = layer(x) - layer.bias.reshape(-1, *[1] * (len(shape) - 2)), []
    nearest = quantplug.convert_pt2e(ready)
    (found,) = GPTQ().apply(ready, [x]).values()
    for graph in (nearest, quantplug.convert_pt2e(ready)):
        ((weight, _),) = values_in(graph, ready).values()
        kept = torch.func.functional_call(layer, {"weight": weight, "bias": torch.zeros_like(layer.bias)}, (x,))
        levels.append(min(sqnr(kept, wanted), 80.0))
    assert [min(found.before, 80.0), min(found.after, 80.0)] == pytest.approx(levels, abs=0.1)
    assert found.after >= found.before - 1e-6


class Decoder(nn.Module):
    """Transposed convolutions: with a stride, in groups, over one dimension, of three."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1, output_padding=1)
        self.grouped = nn.ConvTranspose2d(16, 16, 3, groups=2, dilation=2)
        self.rows = nn.ConvTranspose1d(16, 12, 3)
        self.cubes = nn.ConvTranspose3d(12, 6, (1, 2, 3), padding=(0, 0, 1))

    def forward(self, x):
        x = self.rows(torch.relu(self.grouped(torch.relu(self.wide(x)))).mean(3))
        return self.cubes(torch.relu(x).reshape(len(x), 12, 2, 4, 2))


@pytest.mark.parametrize(("axis", "decomposed"), [("outputs", False), (None, True)])
def test_transposed_convolutions_get_integers_that_keep_more_and_convert_stores_just_them(axis, decomposed):
    batches = [inputs(4, 8, 5, 5, seed=seed) for seed in range(3)]
    ready = prepared(Decoder(), batches, axis, decomposed=decomposed)
    nearest = quantplug.convert_pt2e(ready)
    found = GPTQ().apply(ready, batches)
    assert (len(found), found.left) == (4, {})
    assert all(layer.after > layer.before + 1 for layer in found.values()), str(dict(found))
    converted = quantplug.convert_pt2e(ready)
    stored = values_in(converted, ready)
    assert set(stored) == set(found)
    assert all(torch.equal(*pair) for pair in stored.values())
    fresh, model = [inputs(4, 8, 5, 5, seed=seed) for seed in range(10, 14)], Decoder().eval()
    wanted = torch.cat([model(x) for x in fresh])
    gain = sqnr(torch.cat([converted(x) for x in fresh]), wanted) - sqnr(torch.cat([nearest(x) for x in fresh]), wanted)
    assert gain > 2


@pytest.mark.parametrize(("transposed", "groups"), itertools.product([False, True], [1, 3]))
def test_pieces_of_a_weight_have_the_rows_that_share_its_scales(transposed, groups, monkeypatch):
    x, levels = inputs(6, 9, 5, 5), []
    torch.manual_seed(0)
    layer = KINDS[transposed, 2][0](9, 15, 2, groups=groups)
    for rows in (4, 10**6):
        monkeypatch.setattr("quantplug.algorithms.pieces._ROWS", rows)
        ready = prepared(layer, [x])
        levels += [each.after for each in GPTQ().apply(ready, [x]).values()]
        assert all(torch.equal(*pair) for pair in values_in(quantplug.convert_pt2e(ready), ready).values())
    assert levels[0] == pytest.approx(levels[1], abs=0.2)


class Both(nn.Module):
    """Two layers of one size and settings that read one tensor, tied or not."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.there, self.back = nn.Conv1d(6, 6, 3), nn.ConvTranspose1d(6, 6, 3)
        if tied:
            self.back.weight = self.there.weight

    def forward(self, x):
        return self.there(x), self.back(x)


def test_layers_that_read_one_tensor_in_different_ways_are_each_rounded_for_theirs():
    x = inputs(4, 6, 9)
    ready, model = prepared(Both(tied=False), [x]), Both(tied=False)
    found = GPTQ().apply(ready, [x])
    stored = values_in(quantplug.convert_pt2e(ready), ready)
    for name, layer, function in (
        ("conv1d", model.there, nn.functional.conv1d),
        ("conv_transpose1d", model.back, nn.functional.conv_transpose1d),
    ):
        level = sqnr(function(x, stored[name][0]), function(x, layer.weight))
        assert found[name].after == pytest.approx(level, abs=0.05)
        assert found[name].after > found[name].before


def test_a_weight_that_is_multiplied_in_two_ways_is_left_with_the_reason():
    x = inputs(4, 6, 9)
    found = GPTQ().apply(prepared(Both(tied=True), [x], axis=None), [x])
    reason = "its weight is tied, and multiplied in different ways"
    assert found.left == {"conv1d": reason, "conv_transpose1d": reason}


def test_scales_along_a_kernel_are_left_with_the_reason():
    x = inputs(4, 6, 9)
    found = GPTQ().apply(prepared(nn.ConvTranspose1d(6, 4, 3), [x], axis=2), [x])
    assert found.left == {"conv_transpose1d": "its weight has scales along axis 2"}
