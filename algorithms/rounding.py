"""A matrix rounded so that what it multiplies changes least.

Before: a matrix [groups, rows, columns], the grid of its integers, and for each group the sums of products of what the
columns multiply, [groups, columns, columns] (the Hessian of the squared error). After: values of the grid, or a grid.

- `Passing.rounded`: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
  Transformers", arXiv:2210.17323, algorithm 1, with columns in the order of their inputs' energy (its code's act-order)
  and scales that stay where they were when columns are reordered.
- `descended`: cyclic coordinate descent, each integer chosen anew given all others: Behdin et al., "QuantEase:
  Optimization-based Quantization for Language Models", arXiv:2309.01885, algorithm 1.
- `target_of`: what rounding before a layer changed, as far as the layer can make up for it: Li et al., "GPTAQ:
  Efficient Finetuning-Free Quantization for Asymmetric Calibration", arXiv:2504.02692; here by the solution of the
  regression, and so much of it as held-back samples confirm.
- `factors_of`: scales searched with errors weighted by the inputs' energy, the diagonal of the Hessian.
- `refitted`: given the integers the result is linear in the scales, so that the best are a least squares solution.
- `fitted`: the same where each element counts alike, as in a table: integers and scales in turns, after the search, as
  Lloyd's algorithm does it (Lloyd, "Least Squares Quantization in PCM", 1982).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantplug.algorithms.weights import Grid, over_shared

# Columns whose errors are passed on among themselves first: so many that rows of them stay in the cache.
_BLOCK = 32
# By which scales are multiplied in their search.
_FACTORS = torch.linspace(1.0, 0.5, 26)
# Numbers of a matrix, or of the systems of equations for scales, that are solved for at once.
_AT_ONCE = 2**22
# What is added to these systems' diagonals, as a share of them.
_RIDGE = 1e-4
# How often the scales of a table are fitted to its integers: a fifth time gains a hundredth of a decibel.
_TURNS = 4


@dataclass(frozen=True)
class Passing:
    """How the columns of a layer are taken, and what each hands on of its error to those after it.

    Attributes:
        order: of the columns of each group, those of the most energy first, [groups, columns].
        shares: upper triangular, the rows' errors handed on to the columns, [groups, columns, columns].
        damped: the Hessian with a diagonal that makes it positive definite.
    """

    order: Tensor
    shares: Tensor
    damped: Tensor

    @classmethod
    def of(cls, hessian: Tensor, damping: float) -> "Passing":
        """Returns what a Hessian asks for.

        Args:
            hessian: float32 [groups, columns, columns].
            damping: what is added to its diagonal, as a share of its mean.
        """
        damped = _damped(hessian, damping)
        diagonal = damped.diagonal(dim1=1, dim2=2)
        order = diagonal.argsort(descending=True)
        turned = damped.gather(1, order[:, :, None].expand_as(damped)).gather(2, order[:, None].expand_as(damped))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(turned))
        return cls(order, torch.linalg.cholesky(inverse, upper=True).float(), damped.float())

    def rounded(self, matrix: Tensor, grid: Grid) -> Tensor:
        """Returns a matrix rounded column by column, errors passed on to columns that come later."""
        order = self.order[:, :, None].expand(-1, -1, matrix.shape[1])
        rest, scale, zero_point = (_by_column(part).gather(1, order) for part in (matrix, *grid.spread_over(matrix)))
        rounded = torch.empty_like(rest)
        for start in range(0, rest.shape[1], _BLOCK):
            end = min(start + _BLOCK, rest.shape[1])
            part, share = rest[:, start:end], self.shares[:, start:end, start:end]
            errors = torch.empty_like(part)
            for column in range(end - start):
                at, own = start + column, part[:, column]
                rounded[:, at] = grid.rounded(own, scale[:, at], zero_point[:, at])
                errors[:, column] = (own - rounded[:, at]) / share[:, column, column, None]
                part.addcmul_(share[:, column, :, None], errors[:, column, None], value=-1)
            rest[:, end:].baddbmm_(self.shares[:, start:end, end:].transpose(1, 2), errors, alpha=-1)
        return torch.empty_like(rest).scatter_(1, order, rounded).transpose(1, 2)


def _by_column(matrix: Tensor) -> Tensor:
    """Returns a matrix [groups, rows, columns] as [groups, columns, rows], each column in one piece of memory."""
    return matrix.transpose(1, 2).contiguous()


def _damped(hessian: Tensor, damping: float) -> Tensor:
    """Returns a Hessian in float64 with a diagonal that makes it positive definite."""
    damped = hessian.double()
    diagonal = damped.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    diagonal += torch.where(mean > 0, damping * mean, 1.0)
    return damped


def target_of(matrix: Tensor, hessians: Tensor, changes: Tensor, damping: float) -> Tensor:
    """Returns the float weight whose results on what is read now are nearest to those of a weight on what was read.

    What other roundings changed before a layer is regressed on what it reads now. Of the step that this asks for so
    much is taken as suits each half of the samples where the other half found it: of few samples it is mostly chance.

    Args:
        matrix: that weight, float32 [groups, rows, columns].
        hessians: of two halves of the samples, [2, groups, columns, columns].
        changes: of the same, sums of products of what was read, less what is read now, with what is read now.
        damping: what is added to a Hessian's diagonal, as a share of its mean.
    """
    if not bool(changes.any()):
        return matrix
    parts = torch.split(matrix, max(1, _AT_ONCE // (matrix.shape[0] * matrix.shape[2])), 1)
    halves = [_Regression.of(change, hessian, damping) for change, hessian in zip(changes, hessians, strict=True)]
    gained, spent = (sum(numbers) for numbers in zip(*(_confirmed(part, halves) for part in parts), strict=True))
    share = min(max(gained / spent, 0.0), 1.0) if spent > 0 else 0.0
    both = _Regression.of(changes.sum(0), hessians.sum(0), damping)
    found = torch.empty_like(matrix)
    for part, into in zip(parts, torch.split(found, parts[0].shape[1], 1), strict=True):
        torch.add(part, both.step(part @ both.change), alpha=share, out=into)
    return found


@dataclass(frozen=True)
class _Regression:
    """What was changed before a layer, regressed on what the layer reads.

    Attributes:
        change: sums of products of what was changed with what is read, [groups, columns, columns].
        hessian: of what is read with itself.
        factor: Cholesky's of the Hessian, damped.
    """

    change: Tensor
    hessian: Tensor
    factor: Tensor

    @classmethod
    def of(cls, change: Tensor, hessian: Tensor, damping: float) -> "_Regression":
        return cls(change, hessian, torch.linalg.cholesky(_damped(hessian, damping)))

    def step(self, slope: Tensor) -> Tensor:
        """Returns the step that a slope [groups, rows, columns] of the error asks for."""
        return torch.cholesky_solve(slope.double().transpose(1, 2), self.factor).transpose(1, 2).float()


def _confirmed(part: Tensor, halves: list[_Regression]) -> tuple[float, float]:
    """Returns what the steps of each half of the samples gain on the other half, and what they spend of it."""
    slopes = [part @ half.change for half in halves]
    steps = [half.step(slope) for half, slope in zip(halves, slopes, strict=True)]
    gained = sum(float((step * slope).sum()) for step, slope in zip(steps, slopes[::-1], strict=True))
    spent = sum(float(errors_of(step, half.hessian).sum()) for step, half in zip(steps, halves[::-1], strict=True))
    return gained, spent


@dataclass(frozen=True)
class Tried:
    """A matrix rounded in some way.

    Attributes:
        values: the matrix, [groups, rows, columns].
        scale: of its grid, [groups, rows, blocks], 1 of what shares its scales.
        errors: the squared error of the layer's result, by row, [groups, rows].
    """

    values: Tensor
    scale: Tensor
    errors: Tensor

    def or_better(self, other: "Tried") -> "Tried":
        """Returns the better of two, row by row; rows that share a scale together, unless both have the same."""
        same = (self.scale == other.scale).all(2)
        together = over_shared(other.errors, self.scale) < over_shared(self.errors, self.scale)
        takes = torch.where(same, other.errors < self.errors, together)
        values = torch.where(takes[..., None], other.values, self.values)
        scale = torch.where(together[..., None], other.scale, self.scale)
        return Tried(values, scale, torch.where(takes, other.errors, self.errors))


def factors_of(grid: Grid, matrix: Tensor, hessian: Tensor) -> Tensor:
    """Returns by what to multiply each scale, so that rounding to nearest errs least where inputs are large."""
    energy = hessian.diagonal(dim1=1, dim2=2)[:, None]
    errors = [grid.by_block((matrix - grid.scaled(factor).nearest(matrix)).square_() * energy) for factor in _FACTORS]
    return _FACTORS[torch.stack(errors).argmin(0)]


def errors_of(difference: Tensor, hessian: Tensor) -> Tensor:
    """Returns by row the squared error of a layer's result, [groups, rows]."""
    return ((difference @ hessian) * difference).sum(2)


def descended(matrix: Tensor, values: Tensor, grid: Grid, damped: Tensor, sweeps: int = 2) -> Tensor:
    """Returns values of a grid of which each was chosen anew in turn, given all the others.

    Args:
        matrix: float32 [groups, rows, columns].
        values: where to start, values of the grid.
        grid: the values that there are.
        damped: the Hessian, positive definite.
        sweeps: how often each is chosen.
    """
    wanted, values = _by_column(matrix), _by_column(values)
    scale, zero_point = map(_by_column, grid.spread_over(matrix))
    curvature = damped.diagonal(dim1=1, dim2=2)
    for _ in range(sweeps):
        slope = damped @ (wanted - values)
        for start in range(0, values.shape[1], _BLOCK):
            end = min(start + _BLOCK, values.shape[1])
            before, part = values[:, start:end].clone(), slope[:, start:end]
            for column in range(start, end):
                own = values[:, column]
                best = own + part[:, column - start] / curvature[:, column, None]
                chosen = grid.rounded(best, scale[:, column], zero_point[:, column])
                part.addcmul_(damped[:, start:end, column, None], (chosen - own)[:, None], value=-1)
                values[:, column] = chosen
            slope[:, end:].baddbmm_(damped[:, end:, start:end], values[:, start:end] - before, alpha=-1)
    return values.transpose(1, 2)


def refitted(matrix: Tensor, values: Tensor, grid: Grid, damped: Tensor) -> tuple[Grid, Tensor]:
    """Returns the grid with the scales that suit the integers of some values best, and the values on it.

    Args:
        matrix: float32 [groups, rows, columns].
        values: of the grid.
        grid: its scales may be shared by all of the matrix, by a row, by a block of one, or by rows of several groups.
        damped: the Hessian, positive definite.
    """
    integers, blocks = values / grid.spread(grid.scale, matrix), grid.scale.shape[2]
    at_once = max(1, _AT_ONCE // (matrix.shape[0] * blocks**2))
    parts = zip(*(torch.split(part, at_once, 1) for part in (matrix, integers)), strict=True)
    systems = [
        [over_shared(side, grid.scale) for side in _equations(part, numbers, damped, blocks)] for part, numbers in parts
    ]
    if grid.scale.shape[1] == 1:
        systems = [[sum(parts[1:], parts[0]) for parts in zip(*systems, strict=True)]]
    solved = torch.cat([torch.linalg.solve(left, right) for left, right in systems], 1)[..., 0]
    found = solved.to(grid.scale.dtype)
    scale = torch.where(torch.isfinite(found) & (found > 0), found, grid.scale)
    fitted = replace(grid, scale=scale)
    return fitted, integers * fitted.spread(scale, matrix)


def fitted(matrix: Tensor, grid: Grid) -> Grid:
    """Returns the grid with the scales by which rounding a matrix to nearest errs least.

    Args:
        matrix: float32 [groups, rows, columns].
        grid: with the scales to begin with.
    """
    at_once = len(matrix[0]) if grid.scale.shape[1] == 1 else max(1, _AT_ONCE // matrix[:, 0].numel())
    parts = zip(*(torch.split(each, at_once, 1) for each in (matrix, grid.scale, grid.zero_point)), strict=True)
    scales = [_fitted(part, replace(grid, scale=scale, zero_point=zero)).scale for part, scale, zero in parts]
    return replace(grid, scale=torch.cat(scales, 1))


def _fitted(matrix: Tensor, grid: Grid) -> Grid:
    grid = grid.scaled(factors_of(grid, matrix, torch.eye(matrix.shape[2])[None]))
    for _ in range(_TURNS):
        integers = grid.nearest(matrix).div_(grid.spread(grid.scale, matrix))
        found = (grid.by_block(matrix * integers) / grid.by_block(integers.square_())).to(grid.scale.dtype)
        grid = replace(grid, scale=torch.where(torch.isfinite(found) & (found > 0), found, grid.scale))
    return grid


def _equations(matrix: Tensor, integers: Tensor, damped: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Returns both sides of each row's normal equations: [groups, rows, blocks, blocks], [groups, rows, blocks, 1]."""
    size = matrix.shape[2] // blocks

    def by_block(products: Tensor, start: int = 0) -> Tensor:
        return (products * integers[:, :, start:]).reshape(*matrix.shape[:2], -1, size).sum(3)

    left = matrix.new_empty(*matrix.shape[:2], blocks, blocks)
    for block in range(blocks):  # with those behind it: the Hessian is symmetric
        start, end = block * size, (block + 1) * size
        sums = by_block(integers[:, :, start:end] @ damped[:, start:end, start:], start)
        left[:, :, block, block:] = left[:, :, block:, block] = sums
    left.diagonal(dim1=2, dim2=3).mul_(1 + _RIDGE).add_(torch.finfo(left.dtype).tiny)
    return left, by_block(matrix @ damped)[..., None]
