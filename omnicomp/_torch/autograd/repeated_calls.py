"""Calls of a Dynamo graph that were run before on like tensors: what they dispatch is told again, on new tensors.

The layers of a model make the same calls on tensors of the same kind. Running one on fake tensors takes most of a
millisecond, and telling its operators again a tenth of that.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.autograd.dispatch_trace import Listener, storage_key

_KNOWN_MODULES: Final = ("torch", "_operator", "math", "builtins")
_KNOWN_OPERATORS: Final = ("aten", "prims", "prim")
_PLAIN: Final = frozenset(
    (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_SEQUENCES: Final = (tuple, list, torch.Size)


class _Unlike(Exception):
    """Something that may make two calls differ, or can't be told again."""


@records.dataclass(frozen=True)
class _Slot:
    """The place of a tensor among those that a call takes and makes."""

    index: int


@records.dataclass(frozen=True, kw_only=True)
class _Known:
    """What a call did, with slots for tensors."""

    made: list[tuple[FakeTensor, int | None]]  # what each new tensor is like, and the slot whose memory it is in
    dispatched: list[tuple[Any, Any, Any, Any]]  # operators, their arguments and results
    result: Any


class RepeatedCalls:
    """Runs calls, or tells what they dispatched before.

    Nothing outside of the calls may change what they mean, as autocast and the transforms of functorch do.

    Args:
        listener: called after every ATen operator with the operator, its arguments and its result.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._known: dict[Hashable, _Known | None] = {}
        self._seen: list[tuple[Any, Any, Any, Any]] | None = None

    def listen(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Tell of an operator that was dispatched; to be called by the mode in which calls are run."""
        if self._seen is not None:
            self._seen.append((operator, args, kwargs, out))
        self._listener(operator, args, kwargs, out)

    def run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """The result of a call.

        Args:
            target: a function, or the name of a method.
            args: its arguments.
            kwargs: likewise.
            call: runs it.
        """
        tensors: list[FakeTensor] = []
        try:
            key = _told_apart(target, args, kwargs, tensors)
        except _Unlike:
            return call()
        if key in self._known:
            known = self._known[key]
            return call() if known is None else self._again(known, tensors)
        self._seen = []
        try:
            result, seen = call(), self._seen
        finally:
            self._seen = None
        try:
            self._known[key] = _known(tensors, seen, result)
        except _Unlike:
            self._known[key] = None
        return result

    def _again(self, known: _Known, tensors: list[FakeTensor]) -> Any:
        for like, memory in known.made:
            tensors.append(twin(like, like.fake_mode, None if memory is None else tensors[memory]))
        for dispatched in known.dispatched:
            self._listener(*_filled(dispatched, tensors))
        return _filled(known.result, tensors)


def twin(like: FakeTensor, mode: FakeTensorMode, base: FakeTensor | None = None) -> FakeTensor:
    """A new fake tensor like a plain one, in memory of its own or in that of another one; nothing is dispatched."""
    size, stride = like.shape, like.stride()
    with in_kernel_invocation_manager(mode):
        if base is None:
            meta = torch.empty_strided(size, stride, dtype=like.dtype, device="meta")
        else:
            meta = base.as_strided(size, stride, like.storage_offset())
    return FakeTensor(mode, meta, like.device)


def alias(value: Any) -> Any:
    """A tensor in the same memory, fake in the mode that is in force; nothing is dispatched for most fake ones."""
    if not isinstance(value, torch.Tensor):
        return value
    mode = detect_fake_mode([value])
    if mode is None or not is_plain(value):
        return value.detach()
    return twin(value, mode, value)


def is_plain(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a fake tensor that its sizes, strides, dtype, device and memory tell all of."""
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.constant is not None:
        return False
    if value.is_nested or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(type(size) is int for size in sizes)


def _told_apart(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[FakeTensor]) -> Hashable:
    """What tells a call apart from others; the tensors among its arguments are added to a list.

    Raises:
        _Unlike: it can't be told apart.
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if not isinstance(target, (str, OpOverload)):
        module = getattr(target, "__module__", None) or type(getattr(target, "__self__", None)).__module__
        if not str(module).startswith(_KNOWN_MODULES):
            raise _Unlike
    if name.endswith("_") and not name.endswith("__"):
        raise _Unlike
    memory: list[int] = []
    return target, _text(tuple(args), tensors, memory), _text(dict(kwargs), tensors, memory)


def _text(value: Any, tensors: list[FakeTensor], memory: list[int]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if isinstance(value, _SEQUENCES):
        return kind, tuple([_text(item, tensors, memory) for item in value])
    if isinstance(value, dict):
        return kind, tuple([(name, _text(item, tensors, memory)) for name, item in value.items()])
    if kind is slice:
        return kind, _text((value.start, value.stop, value.step), tensors, memory)
    if not is_plain(value):
        raise _Unlike
    for index, known in enumerate(tensors):
        if known is value:
            return _Slot(index)
    key = storage_key(value)
    tensors.append(value)
    memory.append(key)
    return (value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset(), memory.index(key))


def _known(inputs: Sequence[FakeTensor], seen: Sequence[tuple[Any, Any, Any, Any]], result: Any) -> _Known:
    """What a call did, with slots for tensors.

    Raises:
        _Unlike: it can't be told again.
    """
    tensors, memory = list(inputs), [storage_key(each) for each in inputs]
    slots = {id(each): _Slot(index) for index, each in enumerate(tensors)}
    made: list[tuple[FakeTensor, int | None]] = []

    def add(tensor: Any) -> None:
        if id(tensor) in slots or not isinstance(tensor, torch.Tensor):
            return
        if not is_plain(tensor):
            raise _Unlike
        key = storage_key(tensor)
        base = memory.index(key) if key in memory else None
        if tensor.storage_offset() if base is None else tensor.dtype != tensors[base].dtype:
            raise _Unlike
        slots[id(tensor)] = _Slot(len(tensors))
        made.append((tensor, base))
        tensors.append(tensor)
        memory.append(key)

    dispatched: list[tuple[Any, Any, Any, Any]] = []
    for operator, args, kwargs, out in seen:
        if operator.namespace not in _KNOWN_OPERATORS or operator._schema.is_mutable:
            raise _Unlike
        taken = _with_slots((args, dict(kwargs)), slots)
        for leaf in tree_leaves(out):
            add(leaf)
        dispatched.append((operator, *taken, _with_slots(out, slots)))
    found = _with_slots(result, slots)
    if not any(isinstance(leaf, _Slot) for leaf in tree_leaves(found)):
        raise _Unlike  # a number, which costs nothing
    return _Known(made=made, dispatched=dispatched, result=found)


def _with_slots(value: Any, slots: Mapping[int, _Slot]) -> Any:
    kind = type(value)
    if kind in _PLAIN or kind is float:
        return value
    if isinstance(value, torch.Tensor) and id(value) in slots:
        return slots[id(value)]
    if kind in (tuple, torch.Size):
        return tuple([_with_slots(item, slots) for item in value])
    if isinstance(value, list):
        return [_with_slots(item, slots) for item in value]
    if isinstance(value, dict):
        return {name: _with_slots(item, slots) for name, item in value.items()}
    raise _Unlike


def _filled(value: Any, tensors: Sequence[FakeTensor]) -> Any:
    kind = type(value)
    if kind is _Slot:
        return tensors[value.index]
    if kind is tuple:
        return tuple([_filled(item, tensors) for item in value])
    if kind is list:
        return [_filled(item, tensors) for item in value]
    if kind is dict:
        return {name: _filled(item, tensors) for name, item in value.items()}
    return value
