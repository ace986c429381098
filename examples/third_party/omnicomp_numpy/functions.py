"""Operators of ATen as functions of NumPy arrays: what the engine and the device compute with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten
Array = np.ndarray[Any, Any]


def _addmm(bias: Array, x: Array, y: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return beta * bias + alpha * (x @ y)


FUNCTIONS: dict[Any, Callable[..., Array]] = {
    aten.add.Tensor: lambda x, y, *, alpha=1: np.add(x, np.multiply(y, alpha)),
    aten.mul.Tensor: np.multiply,
    aten.neg.default: np.negative,
    aten.sin.default: np.sin,
    aten.rsqrt.default: lambda x: 1 / np.sqrt(x),
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.mm.default: np.matmul,
    aten.addmm.default: _addmm,
    aten.t.default: np.transpose,
}
