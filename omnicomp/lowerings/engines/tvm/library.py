"""TVM, imported when it is first used, and Relax expressions as the operator table sees them."""

from typing import Any, Final

import torch

from omnicomp.lowerings.engines.conversion import dtype_name
from omnicomp.lowerings.engines.lazy import Lazy

__all__ = ["Tvm", "const", "counted", "dims", "dtype_of", "emit", "nn", "op", "relax", "truth", "tvm"]

tvm: Final[Any] = Lazy("tvm")
relax: Final[Any] = Lazy("tvm.relax")
op: Final[Any] = Lazy("tvm.relax.op")
nn: Final[Any] = Lazy("tvm.relax.op.nn")


def emit(expression: Any) -> Any:
    """The expression as a variable, whose type is known from here on."""
    return relax.BlockBuilder.current().emit(expression)


def dims(value: Any) -> tuple[int, ...]:
    """The shape of a variable."""
    return tuple(int(size) for size in value.ty.shape)


def dtype_of(value: Any) -> str:
    """The dtype of a variable."""
    return str(value.ty.dtype)


def truth(x: Any) -> Any:
    """Whether each element of a variable is not zero. TVM generates no code that compares booleans."""
    return x if dtype_of(x) == "bool" else op.not_equal(x, const(0, x))


def counted(x: Any) -> Any:
    """The variable, or 0 and 1 for booleans."""
    return emit(op.astype(x, "int32")) if dtype_of(x) == "bool" else x


def const(value: Any, like: Any) -> Any:
    """A constant of the dtype of a variable."""
    return relax.const(value, dtype_of(like))


class Tvm:
    """What `convert` makes of Relax expressions."""

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """Booleans are computed as numbers, for which TVM generates code."""
        return torch.int32 if dtype == torch.bool else dtype

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """The value in another dtype."""
        wanted = dtype_name(dtype)
        if dtype_of(value) == wanted:
            return value
        if dtype == torch.bool:
            return emit(truth(value))
        return emit(op.astype(value, wanted))

    def number(self, value: float, dtype: torch.dtype) -> Any:
        """A zero-dimensional constant."""
        return relax.const(value, dtype_name(dtype))

    def constant(self, tensor: torch.Tensor) -> Any:
        """A constant of the graph."""
        return relax.const(tvm.runtime.from_dlpack(tensor.detach().cpu().contiguous().clone()))

    def kept(self, value: Any) -> Any:
        """The expression as a variable."""
        return value if isinstance(value, (relax.Var, tvm.ir.Constant)) else emit(value)

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape of a variable."""
        return dims(value)
