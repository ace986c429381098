"""Running a Dynamo graph in a higher precision than it is written in: a dispatch mode that widens below autograd.

A Dynamo graph calls torch's functions, whose dtypes are often not in its nodes (`x.float()`, `torch.zeros(3)`,
`torch.autocast`); below them every operator of ATen names its dtype, and can be given another.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

_COMPLEX: Final = {torch.float64: torch.complex128, torch.float32: torch.complex64}
_INLINE: Final = frozenset(("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap"))


class CannotWiden(RuntimeError):
    """An operator means something else in another dtype."""


@contextlib.contextmanager
def on_real_tensors() -> Generator[None]:
    """Inside, operators compute, and record nothing for autograd, also while Dynamo or AOTAutograd compiles."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


class InPrecision(TorchDispatchMode):
    """Inside, every operator computes in `dtype`, floating-point operands that are in another are cast.

    Operators that draw random numbers draw those of float32, so that runs in several dtypes draw the same.

    Args:
        dtype: float64 or float32; None leaves all dtypes as they are but those of random numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator.

        Raises:
            CannotWiden: it reinterprets bits, or writes to a tensor that has another dtype.
        """
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return self._higher_order(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_plain_attention(func, args, kwargs):
            return self._random(func, args, kwargs)
        if self._dtype is None:
            return func(*args, **kwargs)
        if func is torch.ops.aten.view.dtype:
            raise CannotWiden("it reads the bits of floating-point numbers as those of another dtype")
        if func.is_view:
            return func(*args, **kwargs)
        args, kwargs = self._operands(func, args, kwargs, self._wide)
        result = func(*args, **kwargs)
        return result if func._schema.is_mutable else _mapped(self._wide, result)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.name() in _INLINE and callable(args[0]):
            with self:
                return args[0](*args[1:])
        if self._dtype is None:
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._wide, (args, kwargs))
        return tree_map(self._wide, func(*args, **kwargs))

    def _random(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        given: list[torch.dtype] = []

        def single(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            given.append(value.dtype)
            return value.to(torch.float32)

        def back(value: Any) -> Any:
            dtype = self._dtype or (given[0] if given else None)
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating and dtype is not None else value

        def draw(value: Any) -> Any:
            made = single(value)
            if made is not value:
                written.append((value, made))
            return made

        args, kwargs = self._operands(func, args, kwargs, single, draw)
        result = func(*args, **kwargs)
        for value, made in written:
            value.copy_(made)
        if func._schema.is_mutable:
            return next((value for value, made in written if made is result), result)
        return tree_map(back, result)

    def _operands(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cast: Callable[[Any], Any],
        cast_written: Callable[[Any], Any] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with those that are only read cast; what is written to must have the dtype already."""

        def each(value: Any, written: bool) -> Any:
            return _mapped((cast_written or self._check) if written else cast, value)

        schema = func._schema.arguments
        positional = tuple(each(value, _is_written(argument)) for value, argument in zip(args, schema, strict=False))
        by_name = {argument.name: argument for argument in schema}
        return positional, {name: each(value, _is_written(by_name[name])) for name, value in kwargs.items()}

    def _check(self, value: Any) -> Any:
        if self._wide(value) is not value:
            raise CannotWiden("it writes to a tensor that the graph itself holds")
        return value

    def _wide(self, value: Any) -> Any:
        """A value, or a dtype, in the precision of the mode."""
        dtype = self._dtype
        if dtype is None:
            return value
        if isinstance(value, torch.dtype):
            return dtype if value.is_floating_point else _COMPLEX[dtype] if value.is_complex else value
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        target = _COMPLEX[dtype] if value.is_complex() else dtype
        return value if value.dtype is target else value.to(target)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map`, which takes longer than most small operators for what is no container."""
    return tree_map(function, value) if isinstance(value, (tuple, list, dict)) else function(value)


def _is_plain_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is the CPU's kernel of attention, which has all dtypes, without a dropout to draw for."""
    if func is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return not (args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
