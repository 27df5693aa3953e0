"""Orthogonal matrices that spread every channel evenly over all of a block.

Before: a size. After: a matrix Q with Q Qᵀ = 1 whose numbers all have a magnitude near 1 / sqrt(size).

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv:2404.00456, section 2.2: a Hadamard
matrix whose rows have random signs, as Kronecker product of Sylvester's and of one for the rest of the size. The latter
are Paley's two constructions over prime fields ("On Orthogonal Matrices", Journal of Mathematics and Physics 12, 1933):
order q + 1 for a prime q = 3 mod 4, and 2 (q + 1) for a prime q = 1 mod 4. Where none fits, the odd part of the size
gets the orthonormal cosine transform.
"""

import math

import torch
from torch import Tensor


def rotation(size: int, *, seed: int, keeps_mean: bool) -> Tensor:
    """Returns an orthogonal matrix of floats in double precision, [size, size].

    Args:
        size: of a block of channels.
        seed: of the signs.
        keeps_mean: whether a vector of equal numbers is to stay what it is, as layer norms need that subtract means.
    """
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    found = signs[:, None] * _even(size)
    if not keeps_mean:
        return found
    # Householder's reflection of what becomes of equal numbers back to them.
    equal = torch.full((size,), size**-0.5, dtype=torch.float64)
    apart = equal @ found - equal
    if float(apart.norm()) < 1e-12:
        return found
    apart = apart / apart.norm()
    return found - 2 * torch.outer(found @ apart, apart)


def _even(size: int) -> Tensor:
    """Returns an orthogonal matrix of even magnitudes: of a Hadamard matrix, as far as one is known for the size."""
    power, odd = size & -size, size // (size & -size)
    for order in (odd * 2**exponent for exponent in range(power.bit_length())):
        paley = _paley(order)
        if paley is not None:
            return torch.kron(_sylvester(size // order), paley / order**0.5)
    return torch.kron(_sylvester(power), _cosines(odd))


def _sylvester(power: int) -> Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < power:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    scaled: Tensor = found / power**0.5
    return scaled


def _paley(order: int) -> Tensor | None:
    """Returns a Hadamard matrix of one of Paley's constructions, None where there is none of this order."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order % 4 == 0 and _is_prime(order - 1) and (order - 1) % 4 == 3:
        return _bordered(order - 1, -1) + torch.eye(order, dtype=torch.float64)
    half = order // 2
    if order % 4 == 0 and _is_prime(half - 1) and (half - 1) % 4 == 1:
        ones, signs = torch.tensor([[1.0, 1], [1, -1]]).double(), torch.tensor([[1.0, -1], [-1, -1]]).double()
        return torch.kron(_bordered(half - 1, 1), ones) + torch.kron(torch.eye(half, dtype=torch.float64), signs)
    return None


def _bordered(prime: int, sign: int) -> Tensor:
    """Returns Jacobsthal's matrix of a prime with a border of ones, whose first column has a sign."""
    squares = {number * number % prime for number in range(1, prime)}
    residues = torch.tensor([0.0 if not n else 1.0 if n in squares else -1.0 for n in range(prime)]).double()
    places = torch.arange(prime)
    found = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    found[0, 0], found[1:, 0] = 0, sign
    found[1:, 1:] = residues[(places[:, None] - places) % prime]
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _cosines(size: int) -> Tensor:
    """Returns the orthonormal discrete cosine transform, of type 2."""
    places = torch.arange(size, dtype=torch.float64)
    found: Tensor = torch.cos(math.pi / size * (places + 0.5) * places[:, None]) * (2 / size) ** 0.5
    found[0] /= 2**0.5
    return found
