"""Shifted windows, as in Swin transformers: masks filled in place, rolled images, every second pixel."""

from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from qdq_graphs import Net, decibels
from torch import nn

import quantplug
from quantplug.lowering.xnnpack import XNNPACKProgram
from quantplug.lowering.xnnpack.rewrites import rewrite_for_xnnpack


def rewritten(function, x):
    """Rewrites a function, holds it against the original on other numbers, and returns its operators."""
    model = Net(lambda _, x: function(x))
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    fresh = torch.randn_like(x)
    torch.testing.assert_close(graph(fresh), model(fresh), rtol=0, atol=0)
    return [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]


def filled_by_constants(x):
    mask = x.new_zeros((4, 6))
    mask[:2, 1:3] = 1
    mask[1:] += 3
    mask.view(2, 12)[1].mul_(2)
    return x + mask


def filled_with_an_input(x):
    mask = torch.zeros(4, 6)
    mask[:2] = x[:2]
    mask[3] = 1
    return x * mask + mask.sum()


def filled_after_it_was_read(x):
    mask = x.new_zeros((4, 6))
    before = x + mask
    mask[:2] = 1
    return before * mask


def copied_before_it_is_changed(x):
    mask = torch.zeros(4, 6)
    row = mask[1].add_(2.0)
    kept = row.clone()
    row.add_(3.0)
    return x * mask + kept


def filled_at_random(x):
    mask = torch.zeros(4, 6)
    mask.bernoulli_(0.0)
    mask[0] = 1
    return x + mask


@pytest.mark.parametrize(
    ("function", "is_constant"),
    [
        (filled_by_constants, True),
        (copied_before_it_is_changed, True),
        (filled_with_an_input, False),
        (filled_after_it_was_read, False),
        (filled_at_random, False),
    ],
)
def test_a_mask_is_folded_with_all_that_is_written_to_it_or_not_at_all(function, is_constant):
    found = rewritten(function, torch.randn(4, 6))
    assert (set(found) <= {"aten::add", "aten::mul"}) == is_constant


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    size=st.integers(1, 9),
    start=st.integers(-9, 8),
    stop=st.one_of(st.none(), st.integers(-9, 12)),
    step=st.integers(2, 5),
    axis=st.integers(0, 2),
)
def test_strided_slices_are_slices_without_gaps(size, start, stop, step, axis):
    shape = [2, 3, 4]
    shape[axis] = size
    slices = tuple([slice(None)] * axis + [slice(start, stop, step)])
    hypothesis.assume(torch.zeros(shape)[slices].numel())
    model, x = Net(lambda _, x: x[slices] * 2), torch.randn(shape)
    graph = rewrite_for_xnnpack(torch.export.export(model, (x,)).module())
    assert torch.equal(graph(x), model(x))
    assert all(n.args[4:] in ((), (1,)) for n in graph.graph.nodes if n.target is torch.ops.aten.slice.Tensor)


def test_a_strided_slice_that_is_written_to_stays():
    def every_second(x):
        y = x * 2
        y[::2] += 1
        return y

    assert "aten::add_" in rewritten(every_second, torch.randn(4, 6))


@pytest.mark.parametrize(("shifts", "dims"), [(1, 0), ((1, -2), (0, 1)), ((-9, 3), (1, 0)), (0, 1), ((1, 1), (0, 0))])
def test_rolls_are_slices(shifts, dims):
    assert "aten::roll" not in rewritten(lambda x: torch.roll(x, shifts, dims) * 2, torch.randn(5, 4))


def test_steps_of_tensors_of_dynamic_sizes_stay():
    """Products pick single numbers of them; what is rolled along a known size is slices."""
    model, x = Net(lambda _, x: torch.roll(x, 1, 1)[:, ::2] * 2), torch.randn(3, 4)
    exported = torch.export.export(model, (x,), dynamic_shapes=(({0: torch.export.Dim("batch", max=8)},),)).module()
    graph = rewrite_for_xnnpack(exported)
    slices = [node for node in graph.graph.nodes if node.target is torch.ops.aten.slice.Tensor]
    assert [node.args[4] for node in slices if len(node.args) > 4] == [2]
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.roll.default)
    assert torch.equal(graph(x[:2]), model(x[:2]))


class ShiftedWindows(nn.Module):
    """Attention within windows of 4 x 4 pixels of a rolled image, then pixels merged by four."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.qkv = nn.Conv2d(3, 32, 2, 2), nn.Linear(32, 96)
        self.project, self.merge = nn.Linear(32, 32), nn.Linear(128, 16)
        self.positions = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = self.patches(x).permute(0, 2, 3, 1)
        y = y + self.attend(torch.roll(y, (-2, -2), (1, 2)))
        parts = [y[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.merge(torch.cat(parts, -1))

    def attend(self, y):
        windows = y.view(1, 2, 4, 2, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(4, 16, 32)
        q, k, v = self.qkv(windows).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + self.positions + self.mask(y)
        windows = self.project(F.softmax(scores, -1) @ v)
        y = windows.view(1, 2, 2, 4, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(1, 8, 8, 32)
        return torch.roll(y, (2, 2), (1, 2))

    def mask(self, y):
        area = y.new_zeros((8, 8))
        for i, rows in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
            for j, columns in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
                area[rows, columns] = 3 * i + j
        windows = area.view(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
        apart = windows.unsqueeze(1) - windows.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0)


@pytest.mark.slow
def test_shifted_windows_run_whole_in_one_delegate_and_keep_their_mask():
    model: Any = ShiftedWindows().eval()
    x = torch.randn(1, 3, 16, 16)
    artefact = quantplug.quantize(model, (x,), "xnnpack", [x, torch.randn(1, 3, 16, 16)], progress=False)
    assert isinstance(artefact.program, XNNPACKProgram)
    counts = artefact.program.counts
    assert (counts.delegates, counts.portable) == (1, 0)
    floats = {op.target for op in artefact.program.ops if op.placement == "float"}
    # Sums of scores are not rounded on their way from float to float.
    assert {"aten.add.Tensor", "aten.matmul.default", "aten.softmax.int"} <= floats
    with torch.no_grad():
        assert decibels(artefact.program(x), model(x)) > 30
        model.mask = lambda y: torch.zeros(())
        assert decibels(artefact.program(x), model(x)) < 25
