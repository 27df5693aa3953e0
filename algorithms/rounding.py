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
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantplug.algorithms.weights import Grid, over_shared

# Columns whose errors are passed on among themselves first: so many that rows of them stay in the cache.
_BLOCK = 32
# By which scales are multiplied in their search.
_FACTORS = torch.linspace(1.0, 0.5, 26)
# Numbers of the systems of equations for scales that are solved at once.
_AT_ONCE = 2**24
# What is added to these systems' diagonals, as a share of them.
_RIDGE = 1e-4


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
        columns = self.order[:, None].expand_as(matrix)
        rest, scale, zero_point = (
            part.gather(2, columns)
            for part in (matrix, grid.spread(grid.scale, matrix), grid.spread(grid.zero_point, matrix))
        )
        rounded = torch.empty_like(rest)
        for start in range(0, rest.shape[2], _BLOCK):
            end = min(start + _BLOCK, rest.shape[2])
            part, share = rest[:, :, start:end].clone(), self.shares[:, start:end, start:end]
            errors = torch.empty_like(part)
            for column in range(end - start):
                at = start + column
                own = part[:, :, column]
                rounded[:, :, at] = grid.rounded(own, scale[:, :, at], zero_point[:, :, at])
                errors[:, :, column] = (own - rounded[:, :, at]) / share[:, column, column, None]
                part[:, :, column:] -= errors[:, :, column, None] * share[:, None, column, column:]
            rest[:, :, end:] -= errors @ self.shares[:, start:end, end:]
        return torch.empty_like(matrix).scatter_(2, columns, rounded)


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
    slopes = [matrix @ change for change in changes]
    steps = [_step(slope, hessian, damping) for slope, hessian in zip(slopes, hessians, strict=True)]
    gained = sum(float((step * slope).sum()) for step, slope in zip(steps, slopes[::-1], strict=True))
    spent = sum(float(errors_of(step, hessian).sum()) for step, hessian in zip(steps, hessians.flip(0), strict=True))
    share = min(max(gained / spent, 0.0), 1.0) if spent > 0 else 0.0
    return matrix + share * _step(slopes[0] + slopes[1], hessians.sum(0), damping)


def _step(slope: Tensor, hessian: Tensor, damping: float) -> Tensor:
    factor = torch.linalg.cholesky(_damped(hessian, damping))
    return torch.cholesky_solve(slope.double().transpose(1, 2), factor).transpose(1, 2).float()


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
    values, scale = values.clone(), grid.spread(grid.scale, matrix)
    zero_point, curvature = grid.spread(grid.zero_point, matrix), damped.diagonal(dim1=1, dim2=2)
    for _ in range(sweeps):
        slope = (matrix - values) @ damped
        for start in range(0, matrix.shape[2], _BLOCK):
            end = min(start + _BLOCK, matrix.shape[2])
            before, part = values[:, :, start:end].clone(), slope[:, :, start:end].clone()
            for column in range(start, end):
                own = values[:, :, column]
                wanted = own + part[:, :, column - start] / curvature[:, column, None]
                chosen = grid.rounded(wanted, scale[:, :, column], zero_point[:, :, column])
                part -= (chosen - own)[:, :, None] * damped[:, None, column, start:end]
                values[:, :, column] = chosen
            slope -= (values[:, :, start:end] - before) @ damped[:, start:end]
    return values


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


def _equations(matrix: Tensor, integers: Tensor, damped: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Returns both sides of each row's normal equations: [groups, rows, blocks, blocks], [groups, rows, blocks, 1]."""
    size = matrix.shape[2] // blocks

    def by_block(products: Tensor) -> Tensor:
        return (products * integers).reshape(*matrix.shape[:2], blocks, size).sum(3)

    places = [slice(block * size, (block + 1) * size) for block in range(blocks)]
    left = torch.stack([by_block(integers[:, :, place] @ damped[:, place]) for place in places], 2)
    left.diagonal(dim1=2, dim2=3).mul_(1 + _RIDGE).add_(torch.finfo(left.dtype).tiny)
    return left, by_block(matrix @ damped)[..., None]
