"""A weight in pieces of a few output channels, of which each can be rounded by itself.

Before: a matrix [groups, rows, columns] and what its columns multiply. After: pieces of it, and the pieces' results put
together. Rows depend on each other only where they share a scale; such a weight is one piece. Pieces have the same rows
however many processes share them, so that the results have the same bits: products of matrices add in an order
that depends on their sizes.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from quantplug.algorithms.rounding import Passing, Tried
from quantplug.algorithms.weights import Grid

# Rows of a piece: fewer are slower, because columns are taken one by one.
_ROWS = 1024


@dataclass(frozen=True)
class Piece:
    """Output channels of a weight.

    Attributes:
        matrix: float32 [groups, rows, columns].
        hessian: what the columns multiply, [groups, columns, columns].
        passing: how the columns are taken.
        grid: the values that there are.
    """

    matrix: Tensor
    hessian: Tensor
    passing: Passing
    grid: Grid


def pieces_of(whole: Piece) -> list[Piece]:
    """Returns a weight in pieces, in the order of its output channels."""
    axis = _axis(whole.grid)
    if axis is None:
        return [whole]
    count, across = whole.matrix.shape[axis], whole.matrix.shape[1 - axis]
    return [_part(whole, axis, start, stop) for start, stop in _spans(count, max(1, _ROWS // across))]


def _axis(grid: Grid) -> int | None:
    """Returns along which axis a weight is cut: 0 where groups have scales of their own, 1 where only rows have."""
    return next((axis for axis in (0, 1) if grid.scale.shape[axis] > 1), None)


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    """Returns ends of spans of nearly the same length, none longer than `most`."""
    number = -(-count // most)
    ends = [place * count // number for place in range(number + 1)]
    return list(pairwise(ends))


def _part(whole: Piece, axis: int, start: int, stop: int) -> Piece:
    def cut(numbers: Tensor) -> Tensor:
        return numbers.narrow(axis, start, stop - start).contiguous()

    grid = replace(whole.grid, scale=cut(whole.grid.scale), zero_point=cut(whole.grid.zero_point))
    if axis == 1:
        return replace(whole, matrix=cut(whole.matrix), grid=grid)
    passing = Passing(*(cut(part) for part in (whole.passing.order, whole.passing.shares, whole.passing.damped)))
    return Piece(cut(whole.matrix), cut(whole.hessian), passing, grid)


def joined(tried: list[Tried], shape: torch.Size, grid: Grid) -> Tried:
    """Returns what became of a weight, given what became of its pieces.

    Args:
        tried: of each piece, in order; the list is emptied, so that nothing large is there twice.
        shape: of the weight, [groups, rows, columns].
        grid: of the weight.
    """
    axis = _axis(grid)
    if axis is None:
        return tried.pop()
    scale, errors = (torch.cat([getattr(each, name) for each in tried], axis) for name in ("scale", "errors"))
    values, end = tried[0].values.new_empty(shape), shape[axis]
    while tried:
        last = tried.pop().values
        end -= last.shape[axis]
        values.narrow(axis, end, last.shape[axis]).copy_(last)
    return Tried(values, scale, errors)
