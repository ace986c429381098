"""OpenVINO, imported when it is first used, and its values as the operator table sees them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.conversion import Lazy

__all__ = ["NAMES", "OpenVino", "constant", "integers", "number", "openvino", "ops", "shape_of", "shared", "type_of"]

openvino: Final[Any] = Lazy("openvino")
_opset: Final[Any] = Lazy("openvino.opset15")

NAMES: Final[dict[torch.dtype, str]] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "boolean",
}


class _Operations:
    """The functions of the opset, which return a node, as functions that return its output, or all of several."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(_opset, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = function(*args, **kwargs).outputs()
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return call


ops: Final[Any] = _Operations()


def type_of(dtype: torch.dtype) -> Any:
    """OpenVINO's element type for a dtype.

    Raises:
        EngineError: it has none.
    """
    if dtype not in NAMES:
        raise EngineError(f"OpenVINO has no element type for {dtype}")
    return getattr(openvino.Type, NAMES[dtype])


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a value, all sizes of which are known."""
    return tuple(value.get_shape())


def integers(values: Sequence[int] | int) -> Any:
    """A constant of sizes, axes or the like."""
    return ops.constant(list(values) if isinstance(values, Sequence) else values, openvino.Type.i64)


def number(value: float, like: Any) -> Any:
    """A zero-dimensional constant with the element type of a value."""
    return ops.constant(value, like.get_element_type())


def constant(tensor: torch.Tensor) -> Any:
    """A constant that shares the memory of a tensor on the CPU, which has to be contiguous and to live as long."""
    return openvino.op.Constant(shared(tensor), shared_memory=True).output(0)


def shared(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU as OpenVINO's tensor, which does not keep it alive."""
    if tensor.dtype is torch.bfloat16:
        return openvino.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), openvino.Type.bf16)
    return openvino.Tensor(tensor.numpy(), shared_memory=True)


class OpenVino:
    """What `convert` makes of OpenVINO's values; keeps the memory of the constants alive."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """Half precision is computed in float32, as in torch's kernels, and rounded once."""
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """The value in another dtype; whatever is not zero is true."""
        if value.get_element_type() == type_of(dtype):
            return value
        if dtype is torch.bool:
            return ops.not_equal(value, number(0, value))
        return ops.convert(value, NAMES[dtype])

    def number(self, value: float, dtype: torch.dtype) -> Any:
        """A zero-dimensional constant."""
        return ops.constant(value, type_of(dtype))

    def constant(self, tensor: torch.Tensor) -> Any:
        """A constant with the memory of the tensor, or of a copy of one that is not contiguous."""
        plain = tensor.detach().contiguous()
        self.held.append(plain)
        return constant(plain)

    def kept(self, value: Any) -> Any:
        """The value: it may be used as often as wanted."""
        return value

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape."""
        return shape_of(value)
