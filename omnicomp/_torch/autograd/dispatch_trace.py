"""Running a Dynamo graph on fake tensors while every ATen operator is shown to a listener."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from omnicomp._torch.autograd.attention import quiet

_Out = Any
Listener = Callable[[Any, Sequence[Any], Mapping[str, Any], _Out], None]


class _ListeningMode(TorchDispatchMode):
    def __init__(self, listener: Listener, before: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.listener, self.before = listener, before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.before is not None and torch.Tag.inplace_view in func.tags:
            self.before(args[0])
        out = func(*args, **(kwargs or {}))
        self.listener(func, args, kwargs or {}, out)
        return out


@contextlib.contextmanager
def listening(
    values: Sequence[Any], listener: Listener, before: Callable[[torch.Tensor], None] | None = None
) -> Generator[Callable[[torch.Tensor], torch.Tensor]]:
    """Run operators on fake tensors of the mode of `values`, without gradients and without adding guards.

    Args:
        values: fake tensors, or real ones if there are no fake ones.
        listener: called after every ATen operator with the operator, its arguments and its result.
        before: called with a tensor whose sizes and strides are about to be changed in place, as by `transpose_`.

    Yields:
        A function that gives the fake tensor of a real one.
    """
    mode = detect_fake_mode(list(values))
    if mode is None:
        with torch.no_grad(), _ListeningMode(listener, before):
            yield lambda tensor: tensor
        return
    environment = mode.shape_env
    with contextlib.ExitStack() as stack:
        if environment is not None:
            stack.enter_context(quiet(mode))
            # Operators whose results depend on data make symbols here that belong to no node.
            stack.enter_context(environment.ignore_fresh_unbacked_symbols())
        for context in (mode, torch.no_grad(), mock.patch.object(mode, "allow_non_fake_inputs", True)):
            stack.enter_context(context)
        with _ListeningMode(listener, before):
            yield mode.from_tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors that share memory, as long as both live; unique for tensors without storage."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def functional_counterpart(operator: Any) -> Any:
    """The operator that returns what an in-place one (`add_.Tensor`) writes, or None if it is none."""
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, operator._overloadname, None) if packet is not None else None
