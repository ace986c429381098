"""Functions that Inductor's vectorised C++ code computes by formulas that lose small results, or overflow.

`expm1(x)` is `exp(x) - 1` there, and so 0 for small x, as are `elu` and `selu`; `atanh` is made of logarithms, with the
same loss; a remainder is `a - floor(a / b) * b`, which is off by the whole divisor for large quotients, and has the
wrong zeros; `acosh` overflows to inf from 1.8e19 on. The integers of `torch.arange(64) * 1_000_000_000` are added up in
32 bits within a vector. A reproducer is `tests/_torch/repairs/test_vector_functions.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import sympy
import torch
from torch._inductor.codegen.cpp import CppVecKernel, CppVecOverrides

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/198183")


def _expm1(original: Callable[..., str]) -> Callable[..., str]:
    """Near zero by the series; Sleef's function takes three times as long as all of this."""

    def expm1(x: Any) -> str:
        if x.dtype == torch.float64:
            return f"{x}.expm1()"
        vector = f"decltype({x})"
        series = f"{vector}({1 / 5040})"
        for factor in (720, 120, 24, 6, 2, 1):
            series = f"({series} * {x} + {vector}({1 / factor}))"
        return f"{vector}::blendv({original(x)}, {series} * {x}, {x}.abs() < {vector}(0.25))"

    return expm1


def _atanh(_: Callable[..., str]) -> Callable[..., str]:
    return lambda x: f"{x}.atanh()"


def _acosh(original: Callable[..., str]) -> Callable[..., str]:
    def acosh(x: Any) -> str:
        vector = f"decltype({x})"
        large = f"{x}.log() + {vector}(0.69314718055994530942)"
        return f"{vector}::blendv({original(x)}, {large}, {x} > {vector}(1e9))"

    return acosh


def _remainder(original: Callable[..., str]) -> Callable[..., str]:
    def remainder(a: Any, b: Any) -> str:
        if not a.dtype.is_floating_point:
            return original(a, b)
        vector, rest = f"decltype({a})", f"{a}.fmod({b})"
        zero = f"{vector}(0)"
        other = f"({rest} != {zero}) & (({rest} < {zero}) ^ ({b} < {zero}))"
        return f"{vector}::blendv({rest}, {rest} + {b}, {other})"

    return remainder


def _arange(original: Callable[..., Any]) -> Callable[..., Any]:
    def arange(self: CppVecKernel, index: Any, stride: sympy.Expr) -> Any:
        return original(self, index, sympy.Symbol(f"static_cast<int64_t>({stride})"))

    return arange


_FUNCTIONS: Final = (
    Exchange(CppVecOverrides, "expm1", _expm1),
    Exchange(CppVecOverrides, "atanh", _atanh),
    Exchange(CppVecOverrides, "acosh", _acosh),
    Exchange(CppVecOverrides, "remainder", _remainder),
    Exchange(CppVecKernel, "arange", _arange),
)


def accurate_functions() -> AbstractContextManager[None]:
    """Inside, vectorised code calls the functions that eager's kernels call."""
    return NEEDED.exchanging(*_FUNCTIONS)
