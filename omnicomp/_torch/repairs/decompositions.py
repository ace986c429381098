"""Inductor's table of decompositions, with those of pointwise operators mended that compute something else than eager.

Each deviates by more than rounding: `1.0 // 0.1` is 10 and in eager 9, `(-0.0) ** -0.5` is
inf and in eager -inf, `erf(1e-8)` is 0 on CPUs, and `gelu` of inf is inf where eager's kernel, oneDNN's, gives NaN on
some processors, and positive zeros on others. A reproducer is `tests/_torch/repairs/test_decompositions.py`.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch._inductor import decomposition
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common.wrappers import elementwise_type_promotion_wrapper
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from omnicomp._torch.repairs.needed import Needed
from omnicomp.safety.forks import new_lock

NEEDED: Final = Needed(first="2.11")
_aten: Final[Any] = torch.ops.aten
_promoting: Final = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT


@contextlib.contextmanager
def decompositions_mended() -> Generator[None]:
    """Inside, `compile_fx` finds the mended decompositions in Inductor's table.

    A table that is passed to it would be in the keys of its caches, of which then none can be made.
    """
    with _lock:
        if not _inside.before and NEEDED.here:
            for table in _tables():
                before = {target: table.get(target) for target in _MENDED}
                table.update({target: _or_else(made, before[target]) for target, made in _MENDED.items()})
                _inside.before.append((table, before))
        _inside.count += 1
    try:
        yield
    finally:
        with _lock:
            _inside.count -= 1
            while _inside.before and not _inside.count:
                table, before = _inside.before.pop()
                for target, usual in before.items():
                    if usual is None:
                        del table[target]
                    else:
                        table[target] = usual


def _tables() -> tuple[Any, ...]:
    """Inductor's tables, with its own random numbers and without."""
    return decomposition.decompositions, decomposition.fast_random_decomps()


class _Inside:
    """How often somebody is inside, and what the tables were before."""

    count = 0
    before: ClassVar[list[tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any] | None]]]] = []


_lock: Final = new_lock()
_inside: Final = _Inside()


def _or_else(made: Callable[..., Any], usual: Callable[..., Any] | None) -> Callable[..., Any]:
    """A decomposition that leaves what it does not concern to the usual one."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        result = made(*args, **kwargs)
        return usual(*args, **kwargs) if result is NotImplemented and usual is not None else result

    return decomposition


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """The quotient of floating tensors, rounded down as Python and eager do it: from the exact remainder."""
    if rounding_mode != "floor" or not isinstance(a, Tensor):  # `torch.div(7, 2)` has numbers alone
        return NotImplemented
    floating = a.is_floating_point() or (b.is_floating_point() if isinstance(b, Tensor) else isinstance(b, float))
    return _floor_quotient(a, b) if floating else NotImplemented


@elementwise_type_promotion_wrapper(type_promoting_args=("a", "b"), type_promotion_kind=_promoting)
def _floor_quotient(a: Tensor, b: Any) -> Tensor:
    divisor: Tensor = b if isinstance(b, Tensor) else torch.scalar_tensor(b, dtype=a.dtype, device=a.device)
    remainder, exact = torch.fmod(a, divisor), a / divisor
    quotient = (a - remainder) / divisor
    below = (remainder != 0) & ((divisor < 0) != (remainder < 0))
    quotient = torch.where(below, quotient - 1, quotient)
    floor = torch.floor(quotient)
    floor = torch.where(quotient - floor > 0.5, floor + 1, floor)
    floor = torch.where(quotient == 0, torch.copysign(torch.zeros_like(exact), exact), floor)
    # The remainder, which is NaN there, comes first: the strides of the result are those of the condition.
    return torch.where(remainder.isnan() & (divisor == 0), exact, floor)


def _pow(a: Tensor, exponent: Any) -> Any:
    if exponent != -0.5 or a.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return NotImplemented
    return torch.rsqrt(a)


def _gelu(a: Tensor, approximate: str = "none") -> Any:
    single = type(a.numel()) is int and a.numel() == 1
    if a.device.type != "cpu" or a.dtype not in (torch.float32, torch.bfloat16) or approximate != "none" or single:
        return NotImplemented
    if not a.is_contiguous() or not torch.backends.mkldnn.is_available():
        return NotImplemented
    nan, negative = _gelu_here(a.dtype)
    return NotImplemented if negative and not nan else _gelu_of_onednn(a, nan)


@functools.cache
def _gelu_here(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether eager's `gelu` of inf is NaN, and that of -7 a negative zero: oneDNN's code depends on the processor."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        found = torch.nn.functional.gelu(torch.tensor([math.inf, -7.0] * 16, dtype=dtype, device="cpu"))
        return bool(found[0].isnan()), bool(found[1].signbit())


@elementwise_type_promotion_wrapper(type_promoting_args=("a",), type_promotion_kind=_promoting)
def _gelu_of_onednn(a: Tensor, nan: bool) -> Tensor:
    with _plain_erf():
        result = a * (1 + torch.erf(a * 0.70710678118654752440)) * 0.5
    # The product with zero is a zero of the result's sign, or NaN for an infinity.
    return result + a * 0.0 if nan else torch.where(result == 0, 0.0, result)


_plain = threading.local()


@contextlib.contextmanager
def _plain_erf() -> Generator[None]:
    """Inside, `erf` is left to Inductor, whose vectorised approximation has an absolute bound."""
    before, _plain.asked = getattr(_plain, "asked", False), True
    try:
        yield
    finally:
        _plain.asked = before


def _erf(a: Tensor) -> Any:
    """The series near zero, where Inductor's approximation on CPUs has no correct digit (pytorch/issues/198183)."""
    if getattr(_plain, "asked", False) or a.device.type != "cpu" or not a.is_floating_point():
        return NotImplemented
    return _erf_of_floats(a)


@elementwise_type_promotion_wrapper(type_promoting_args=("a",), type_promotion_kind=_promoting)
def _erf_of_floats(a: Tensor) -> Tensor:
    if a.dtype is not torch.float32:
        with _plain_erf():
            return torch.erf(a)
    square = a * a
    series = ((-0.02686617064513125 * square + 0.11283791670955126) * square - 0.37612638903183754) * square
    with _plain_erf():
        return torch.where(a.abs() < 0.1, a * (series + 1.1283791670955126), torch.erf(a))


_MENDED: Final[dict[Any, Callable[..., Any]]] = {
    _aten.div.Tensor_mode: _div,
    _aten.div.Scalar_mode: _div,
    _aten.pow.Tensor_Scalar: _pow,
    _aten.gelu.default: _gelu,
    _aten.erf.default: _erf,
}
