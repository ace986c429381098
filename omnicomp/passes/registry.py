"""Passes from outside: those that packages declare by the entry-point group `omnicomp.passes`, and those of the option.

A pass says where it runs by `runs_before` and `runs_after`. One that can't be used is left out, with a reason: an
entry point does not cost a compilation. What the option names, and is not there, is an error.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

import torch

from omnicomp._torch.inductor.own_context import apart
from omnicomp._torch.inductor.versions import describe
from omnicomp.errors import OptionError, PassError, first_line, nearest
from omnicomp.options.checks import listed
from omnicomp.passes.base import Pass
from omnicomp.safety.privacy import logger

log = logger("omnicomp.passes")

GROUP: Final = "omnicomp.passes"
_DEEPEST: Final = 16
# What a pass without a position runs behind: legalisation and the dtype policy see what it puts in.
_DEFAULT: Final = "attention_fusion"
_PLAIN: Final = (bool, int, float, complex, str, bytes)
_TORCHS: Final = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plugin:
    """An entry point of the group."""

    name: str
    origin: str
    item: Pass | None = None
    error: str = ""


@functools.cache
def plugins() -> tuple[Plugin, ...]:
    """The entry points of the group, by name; each is imported once."""
    found: list[Plugin] = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        try:
            declared = apart(entry.load)  # it is first asked for in the middle of a compilation
            item = checked(declared() if isinstance(declared, type) else declared)
            if any(known.item is not None and known.item.name == item.name for known in found):
                raise PassError(f"there already is a pass named {item.name!r}")
            found.append(Plugin(name=entry.name, origin=origin, item=item))
        except Exception as failure:  # noqa: BLE001 - someone else's package; kept, logged, and put into the timeline
            error = str(failure) if isinstance(failure, PassError) else first_line(failure)
            log.warning("the pass %s can't be used: %s", entry.name, error)
            found.append(Plugin(name=entry.name, origin=origin, error=error))
    return tuple(found)


def checked(item: Any) -> Pass:
    """A pass from outside, if it is one that can be named, placed and told from others.

    Raises:
        PassError: it is not; the message says what to do.
    """
    if isinstance(item, type) and issubclass(item, Pass):
        raise PassError(f"{item.__qualname__} is a class; give an object of it, {item.__qualname__}()")
    if not isinstance(item, Pass):
        raise PassError(f"{_named(item)} is no omnicomp.passes.Pass; derive its class from that")
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise PassError(f"{type(item).__qualname__} needs a `name` of letters, digits and underscores, not {name!r}")
    for side in ("runs_before", "runs_after"):
        if not isinstance(getattr(item, side), str):
            raise PassError(f"{side} of the pass {name!r} is the name of another pass, not {getattr(item, side)!r}")
    identity(item)
    return item


def select(built_in: Sequence[Pass], name: str, value: Any) -> tuple[Pass, ...] | None:
    """The option `passes`: the only passes from outside to run.

    Args:
        built_in: the passes of omnicomp.
        name: of the option.
        value: a list of passes, and of names of those that packages declare; None for all that are declared.

    Raises:
        OptionError: an entry is neither, or named twice, or has no place in the order.
    """
    if value is None:
        return None
    found: list[Pass] = []
    try:
        for entry in listed(name, value, "passes"):
            found.append(_declared(built_in, entry) if isinstance(entry, str) else checked(entry))
        ordered(built_in, found)
    except PassError as error:
        raise OptionError(f"{name}: {error}") from None
    return tuple(found)


def _declared(built_in: Sequence[Pass], name: str) -> Pass:
    known: dict[str, Pass] = {}
    for plugin in plugins():
        if plugin.item is None and plugin.name == name:
            raise PassError(f"the pass {name!r} can't be used: {plugin.error}")
        if plugin.item is not None:
            known[plugin.item.name] = plugin.item
    if any(item.name == name for item in built_in):
        raise PassError(f"{name!r} is built in, and runs unless disable_passes names it; take it out of the list")
    if name not in known:
        hint = nearest(name, known) or (f"; known ones are {', '.join(known)}" if known else "; none is installed")
        raise PassError(f"no package declares a pass named {name!r}{hint}")
    return known[name]


def chosen(built_in: Sequence[Pass], asked: Sequence[Pass] | None) -> tuple[tuple[Pass, ...], tuple[Plugin, ...]]:
    """The passes in the order in which they run, and the plugins that can't be used."""
    if asked is not None:
        return ordered(built_in, asked), ()
    usable = {id(plugin.item): plugin for plugin in plugins() if plugin.item is not None}
    left_out = [plugin for plugin in plugins() if plugin.item is None]
    while True:
        try:
            return ordered(built_in, [plugin.item for plugin in usable.values() if plugin.item]), tuple(left_out)
        except _Misplaced as error:
            left_out.append(dataclasses.replace(usable.pop(id(error.item)), item=None, error=str(error)))


class _Misplaced(PassError):
    """A pass has no place in the order."""

    def __init__(self, item: Pass, sentence: str) -> None:
        super().__init__(f"the pass {item.name!r} {sentence}")
        self.item = item


def ordered(built_in: Sequence[Pass], others: Sequence[Pass]) -> tuple[Pass, ...]:
    """Put passes into the pipeline, each where it says; of several at one place the first is in front.

    Raises:
        PassError: two have one name, or one names a pass that is not there, or an order that can't be.
    """
    taken = {item.name for item in built_in}
    for item in others:
        if item.name in taken:
            raise _Misplaced(item, "has the name of another one; give it a name of its own")
        taken.add(item.name)
    for item in others:
        for anchor in _anchors(item):
            if anchor not in taken or anchor == item.name:
                hint = nearest(anchor, taken - {item.name}) or f"; known ones are {', '.join(sorted(taken))}"
                raise _Misplaced(item, f"wants to run beside {anchor!r}, which is no other pass{hint}")
    line, waiting = list(built_in), list(others)
    while waiting:
        there = {item.name for item in line}
        ready = next((item for item in waiting if all(anchor in there for anchor in _anchors(item))), None)
        if ready is None:
            names = ", ".join(item.name for item in waiting)
            raise _Misplaced(waiting[0], f"waits for itself: none of {names} can be placed first")
        waiting.remove(ready)
        line.insert(_place(line, ready, others), ready)
    return tuple(line)


def _anchors(item: Pass) -> Iterator[str]:
    yield from filter(None, (item.runs_after, item.runs_before))


def _place(line: Sequence[Pass], item: Pass, others: Sequence[Pass]) -> int:
    """The index that a pass gets: behind the last run of the one, in front of the first run of the other."""
    names = [each.name for each in line]
    behind = item.runs_after or ("" if item.runs_before else _DEFAULT)
    last = names.index(item.runs_before) if item.runs_before else len(line)
    if behind not in names:
        return last
    first = len(line) - names[::-1].index(behind)
    if first > last:
        raise _Misplaced(item, f"can't run behind {behind!r} and before {item.runs_before!r}")
    # Behind those that are there for the same reason.
    while first < last and any(line[first] is each and each.runs_after == item.runs_after for each in others):
        first += 1
    return first


def identity(item: Pass) -> tuple[str, str]:
    """What a pass from outside is known by in the keys of caches: a version, and a hash.

    The hash is of its name, options, position and version, and of the sources of its class and package.

    Raises:
        PassError: an option has no text that is the same in every process.
    """
    from omnicomp.devices.inductor.spec import code_digest, package_sources

    cls = type(item)
    options = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    texts: list[str] = []
    for name, value in {**options, **vars(item), **_enclosed(cls)}.items():
        try:
            texts.append(f"{name}={_text(value)}")
        except _Untold as error:
            raise PassError(
                f"the pass {item.name!r} has {error} in {name!r}, by which no cache can tell it from another one; use "
                "numbers, texts, dtypes, functions, and tuples or frozen dataclasses of them"
            ) from None
    sources = package_sources(cls.__module__.partition(".")[0])
    values = (item.name, item.runs_before, item.runs_after, item.version, *texts, sources)
    return item.version, code_digest([cls], values)


def key_of(item: Pass) -> tuple[str, str]:
    """`identity`, with the version of the package that declares the pass."""
    version, digest = identity(item)
    origin = next((plugin.origin for plugin in plugins() if plugin.item is item), "")
    return ", ".join(filter(None, (origin, version))), hashlib.sha256(f"{origin} {digest}".encode()).hexdigest()[:16]


class _Untold(Exception):
    """A value has no text of its own."""


def _text(value: Any, depth: int = 0) -> str:
    """A value as text that is the same in every process, and another one for another value."""
    if depth > _DEEPEST:
        raise _Untold("values within values without end")
    if isinstance(value, enum.Enum):
        return f"{_text(type(value))}.{value.name}"
    if value is None or type(value) in _PLAIN or isinstance(value, (PurePath, *_TORCHS)):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__}[{', '.join(_text(each, depth + 1) for each in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{', '.join(sorted(_text(each, depth + 1) for each in value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(k, depth + 1)}: {_text(v, depth + 1)}' for k, v in value.items())}}}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{_text(type(value))}{_text(fields, depth + 1)}"
    if isinstance(value, functools.partial):
        return f"partial{_text((value.func, value.args, value.keywords), depth + 1)}"
    if isinstance(value, types.FunctionType):
        inside = [_text(each, depth + 1) for each in (*_cells(value), value.__defaults__, value.__kwdefaults__)]
        return f"{describe(value)} {inside}"
    if isinstance(value, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{value.__module__}.{getattr(value, '__qualname__', value)}"
    raise _Untold(_named(value))


def _cells(function: types.FunctionType) -> list[Any]:
    """What a function closes over; the class of a method that calls `super()` is known already."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return [cell.cell_contents for name, cell in cells if name != "__class__"]
    except ValueError:
        raise _Untold("a variable without a value") from None


def _enclosed(cls: type) -> dict[str, types.FunctionType]:
    """The methods of classes that were made inside a function: they may close over what the sources do not say."""
    made = (base for base in cls.__mro__ if "<locals>" in base.__qualname__)
    members = ((name, getattr(member, "__func__", member)) for base in made for name, member in vars(base).items())
    return {f"{name}()": each for name, each in members if isinstance(each, types.FunctionType) and each.__closure__}


def _named(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"a value of type {type(value).__qualname__}"
