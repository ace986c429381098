"""Arithmetic on vectors of residues: three towers of primes in which exponentials, roots and signs keep their laws.

A real number is kept modulo nine primes: three towers of three, r, q = 2r + 1 and p = 2q + 1. The exponential of a
number is g**x modulo p, where x is its residue modulo q, which is the order of g: sums become products. Its residue
modulo q comes from r in the same way, so that two exponentials may be nested; the third level is a hash.

All primes are -1 modulo 8 * 3 * 5 * 7 * 11 * 13. So -1 has no square root, squares have exactly one root that is a
square itself, and 2, 3, 5, 7, 11 and 13 are squares: the quadratic character is multiplicative, takes -1 to -1 and such
constants to 1, and is used as the sign of a number.
"""

import functools
import math
from fractions import Fraction
from typing import Final

import torch

from omnicomp._torch.autograd.run_in_precision import on_real_tensors

_LOWEST: Final = (529609079, 516155639, 513152639)
LEVELS: Final = 3
TOWERS: Final = len(_LOWEST)
PRIMES: Final = tuple(prime for low in _LOWEST for prime in (low, 2 * low + 1, 4 * low + 3))
COUNT: Final = len(PRIMES)
SMALLEST: Final = min(PRIMES)
# 4 has the order q, as it is a square.
_GENERATOR: Final = 4
_BITS: Final = 31
_WINDOW: Final = 8

with on_real_tensors():  # a compilation may be the first to import this, with fake tensors
    _MODULI: Final = torch.tensor(PRIMES)


def moduli(dims: int) -> torch.Tensor:
    """The primes as a column that broadcasts against `dims` further dimensions."""
    return _column(dims)


@functools.lru_cache(maxsize=16)
def _column(dims: int) -> torch.Tensor:
    return _MODULI.view(COUNT, *[1] * dims)


def mod(value: torch.Tensor) -> torch.Tensor:
    """The residues of integers below 2**63."""
    return value.remainder(moduli(value.ndim - 1))


def power(base: torch.Tensor, exponents: tuple[int, ...]) -> torch.Tensor:
    """Powers with one exponent for each prime."""
    primes = moduli(base.ndim - 1)
    bits = max(exponents).bit_length()
    result = torch.ones_like(base)
    same = len(set(exponents)) == 1
    for bit in range(bits - 1, -1, -1):
        if bit != bits - 1:
            result = result * result % primes
        if same:
            if exponents[0] >> bit & 1:
                result = result * base % primes
        else:
            factor = base if _all_bits(exponents, bit) else torch.where(_bit(exponents, bit, base.ndim), base, 1)
            result = result * factor % primes
    return result


@functools.lru_cache(maxsize=512)
def _all_bits(exponents: tuple[int, ...], bit: int) -> bool:
    return all(each >> bit & 1 for each in exponents)


@functools.lru_cache(maxsize=4096)
def _bit(exponents: tuple[int, ...], bit: int, ndim: int) -> torch.Tensor:
    return torch.tensor([bool(each >> bit & 1) for each in exponents]).view(COUNT, *[1] * (ndim - 1))


def inverse(value: torch.Tensor) -> torch.Tensor:
    """Reciprocals; that of zero is zero."""
    return power(value, tuple(prime - 2 for prime in PRIMES))


def root(value: torch.Tensor) -> torch.Tensor:
    """Square roots, multiplicative in all numbers; the square of a root is the number times its sign."""
    return power(value, tuple(((prime - 1) // 2 + 1) // 2 for prime in PRIMES))


def positive(value: torch.Tensor) -> torch.Tensor:
    """Whether numbers are positive: their quadratic character in the largest prime of the tower, as booleans."""
    character = power(value, tuple((prime - 1) // 2 for prime in PRIMES))
    return tops(character == 1)


def tops(value: torch.Tensor) -> torch.Tensor:
    """What the largest prime of each tower has, for all primes of the tower."""
    top = value.view(TOWERS, LEVELS, *value.shape[1:])[:, -1:]
    return top.expand(TOWERS, LEVELS, *value.shape[1:]).reshape(value.shape)


def exponential(value: torch.Tensor) -> torch.Tensor:
    """Exponentials, each from the residue modulo the prime below; for the lowest prime it is a hash of the highest."""
    below = torch.cat([value[:1], value[:-1]])
    lowest = hashed(value, 0)
    result = torch.empty_like(value)
    below = below.reshape(COUNT, -1)
    tables = _tables()
    rows = torch.arange(COUNT).view(COUNT, 1)
    found = tables[0][rows, below & 255]
    for window in range(1, 4):
        found = found * tables[window][rows, below >> (_WINDOW * window) & 255] % moduli(1)
    result = found.view(value.shape)
    result[::LEVELS] = lowest[::LEVELS]
    return result


@functools.cache
def _tables() -> list[torch.Tensor]:
    return [
        torch.tensor(
            [[pow(_GENERATOR, digit << (_WINDOW * window), prime) for digit in range(256)] for prime in PRIMES]
        )
        for window in range(4)
    ]


_MIX: Final = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on 64-bit integers."""
    value = value + _MIX[0]
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * _MIX[1]
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * _MIX[2]
    return value ^ (value >> 31 & 0x1FFFFFFFF)


def spread(hashes: torch.Tensor) -> torch.Tensor:
    """Hashes [TOWERS, ...] as residues [COUNT, ...]."""
    levels = torch.arange(1, LEVELS + 1).view(1, LEVELS, *[1] * (hashes.ndim - 1))
    mixed = mix(hashes.unsqueeze(1) + levels * 0x9E3779B9) & 0x7FFFFFFFFFFFFFFF
    return mod(mixed.view(COUNT, *hashes.shape[1:]))


def top(value: torch.Tensor) -> torch.Tensor:
    """The residues of the largest prime of each tower: [TOWERS, ...]."""
    return value[LEVELS - 1 :: LEVELS]


def hashed(value: torch.Tensor, salt: int) -> torch.Tensor:
    """Residues that are a function of the number and nothing else."""
    return spread(mix(top(value) ^ salt))


def fraction(value: Fraction) -> torch.Tensor:
    """A rational number as [COUNT] residues."""
    return torch.tensor(
        [value.numerator % prime * pow(value.denominator % prime, -1, prime) % prime for prime in PRIMES]
    )


@functools.lru_cache(maxsize=4096)
def constant(value: float) -> torch.Tensor:
    """A number of a program as [COUNT] residues.

    What is, to the precision of its format, a short fraction, the second or fourth root of one, or one of these times a
    power of pi or of the logarithm of two, is taken for it: so 1 / 8.94427191 and 0.1118034 are the same. Others stand
    for the binary fraction that they are.
    """
    if value == 0:
        return torch.zeros(COUNT, dtype=torch.int64)
    exact = Fraction(value)
    if exact.denominator == 1 and abs(exact.numerator) < 1 << 62:
        return fraction(exact)
    size = abs(value)
    single = float(torch.tensor(size, dtype=torch.float32)) == size
    for unit, symbol in _UNITS:
        ratio = size / unit
        for times in (1, 2, 4):
            found = _short(ratio**times, times, single=single and exact.numerator.bit_length() > 20)
            if found is None:
                continue
            residues = fraction(found)
            while times > 1:
                residues = root(residues)
                times //= 2
            residues = mod(residues * _symbol(symbol)) if symbol else residues
            return residues if value > 0 else mod(-residues)
    return fraction(exact)


_UNITS: Final = (
    (1.0, 0),
    (math.log2(math.e), -2),
    (math.log(2), 2),
    (math.pi, 3),
    (1 / math.pi, -3),
    (math.sqrt(math.pi), 4),
    (1 / math.sqrt(math.pi), -4),
)


@functools.cache
def _symbol(index: int) -> torch.Tensor:
    """Pi's root and the logarithm of two are indeterminates."""
    if index < 0:
        return inverse(_symbol(-index))
    if index == 3:
        return mod(_symbol(4) * _symbol(4))
    value = spread(mix(torch.arange(TOWERS) + 7919 * index))
    return mod(value * value)


def _short(value: float, times: int, *, single: bool) -> Fraction | None:
    """The fraction of small terms that a number is to its precision."""
    if not 1e-12 < value < 1e12:
        return None
    if times == 1 and not single:
        exact = Fraction(value)
        if exact.numerator.bit_length() <= 24:
            return exact
        decimal = Fraction(repr(value))
        if abs(float(decimal) - value) <= 1e-15 * value and len(str(decimal.numerator)) <= 8:
            return decimal
    if times == 1 and single:
        decimal = Fraction(f"{value:.6g}")
        if float(torch.tensor(float(decimal), dtype=torch.float32)) == value:
            return decimal
    limit, tolerance = (256, 1e-7) if single else (8192, 4e-15)
    found = Fraction(value).limit_denominator(limit)
    if found.numerator == 0 or found.numerator > limit * 16:
        return None
    return found if abs(float(found) - value) <= tolerance * times * value else None
