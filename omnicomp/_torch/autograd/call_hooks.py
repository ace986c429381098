"""Listening to calls of operators, whoever makes them, and running a function with wider dtypes than it names."""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp.safety.forks import new_lock

Listener = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]
"""Gets an operator, its arguments, and what it calls; returns what the caller gets."""

_lock: Final = new_lock()
_taps: Final[dict[OpOverload, tuple["_Tap", int]]] = {}
_local: Final = threading.local()


class _Tap:
    """What an operator calls while someone listens: a listener of this thread, or what it always calls."""

    def __init__(self, operator: OpOverload) -> None:
        self.operator, self.original = operator, operator._op
        self._hash = hash(operator)

    def __hash__(self) -> int:
        return self._hash  # an operator's hash is that of what it calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listener: Listener | None = getattr(_local, "listeners", {}).get(self.operator)
        if listener is None or any(isinstance(value, FakeTensor) for value in tree_leaves((args, kwargs))):
            return self.original(*args, **kwargs)
        with untapped():
            return listener(self.operator, args, kwargs, self.original)


@contextlib.contextmanager
def tapped(operators: Sequence[OpOverload], listener: Listener) -> Generator[None]:
    """Inside, calls of these operators by this thread go to `listener`, but for those on fake tensors.

    Generated code and FX graphs call the same object, whose one attribute is exchanged; nothing is in the way of a call
    before and after. Calls from C++ are not seen.

    Args:
        operators: what to listen to.
        listener: called in place of the operator; calls that it makes itself are not seen.
    """
    before = getattr(_local, "listeners", {})
    with _lock:
        for operator in operators:
            tap, count = _taps.get(operator) or (_Tap(operator), 0)
            operator._op = tap
            _taps[operator] = tap, count + 1
    _local.listeners = {**before, **dict.fromkeys(operators, listener)}
    try:
        yield
    finally:
        _local.listeners = before
        with _lock:
            for operator in operators:
                tap, count = _taps.pop(operator)
                if count > 1:
                    _taps[operator] = tap, count - 1
                else:
                    operator._op = tap.original


@contextlib.contextmanager
def untapped() -> Generator[None]:
    """Inside, nobody listens to what this thread calls."""
    before = getattr(_local, "listeners", {})
    _local.listeners = {}
    try:
        yield
    finally:
        _local.listeners = before


class _Widened(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return self._dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


def widened(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """Inside, every floating-point dtype that an operator is given as an argument is `dtype`."""
    return _Widened(dtype)
