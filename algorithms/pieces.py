"""A weight in pieces of a few output channels, of which each can be rounded by itself.

Before: a matrix [groups, rows, columns] and what its columns multiply. After: pieces of it, and the pieces' results put
together. Rows depend on each other only where they share a scale; such a weight is one piece. Pieces have the same rows
however many processes share them, so that the results have the same bits: products of matrices add in an order
that depends on their sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from quantplug.algorithms.rounding import Passing, Tried
from quantplug.algorithms.weights import Grid

# Rows of a piece: fewer are slower, because columns are taken one by one.
_ROWS = 256


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
    groups, rows = whole.matrix.shape[:2]
    if not whole.grid.by_row:
        return [whole]
    if groups == 1:
        return [_rows(whole, start, stop) for start, stop in _spans(rows, _ROWS)]
    return [_groups(whole, start, stop) for start, stop in _spans(groups, max(1, _ROWS // rows))]


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    """Returns ends of spans of nearly the same length, none longer than `most`."""
    number = -(-count // most)
    ends = [place * count // number for place in range(number + 1)]
    return list(pairwise(ends))


def _rows(whole: Piece, start: int, stop: int) -> Piece:
    return replace(whole, matrix=whole.matrix[:, start:stop].contiguous(), grid=_part(whole.grid, start, stop))


def _groups(whole: Piece, start: int, stop: int) -> Piece:
    passing, rows = whole.passing, whole.matrix.shape[1]
    own = Passing(*(part[start:stop] for part in (passing.order, passing.shares, passing.damped)))
    grid = _part(whole.grid, start * rows, stop * rows)
    return Piece(whole.matrix[start:stop], whole.hessian[start:stop], own, grid)


def _part(grid: Grid, start: int, stop: int) -> Grid:
    return replace(grid, scale=grid.scale[start:stop], zero_point=grid.zero_point[start:stop])


def joined(tried: Sequence[Tried], groups: int) -> Tried:
    """Returns what became of a weight, given what became of its pieces.

    Args:
        tried: of each piece, in order.
        groups: of the weight.
    """
    if len(tried) == 1:
        return tried[0]
    axis = 1 if groups == 1 else 0
    values, errors = (torch.cat([getattr(each, name) for each in tried], axis) for name in ("values", "errors"))
    return Tried(values, torch.cat([each.scale for each in tried]), errors)
