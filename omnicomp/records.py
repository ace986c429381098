"""Frozen dataclasses that are cheap to make.

`dataclasses.dataclass` compiles up to seven methods for each frozen class, which takes it a millisecond. Here the
fields are the standard library's, which `dataclasses.fields`, `replace` and `asdict` read, and all classes share their
methods. What programs derive classes of their own from, as from `Pass`, is made by the standard library: it derives no
frozen dataclass from one of these.
"""

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, kw_only: bool = False, eq: bool = True, repr: bool = True) -> Callable[[type], type]:
        """Make a class a frozen dataclass; arguments are those of `dataclasses.dataclass`."""
        if not frozen:
            raise TypeError("a dataclass that is not frozen is made by dataclasses.dataclass")
        methods = dict(_METHODS)
        if not repr:
            del methods["__repr__"]
        if not eq:
            del methods["__eq__"], methods["__hash__"]

        def made(cls: type) -> type:
            dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
            for name, method in methods.items():
                if name not in cls.__dict__ or cls.__dict__[name] is None:
                    setattr(cls, name, method)
            return cls

        return made


class _Form(NamedTuple):
    """What the methods need of a class."""

    names: frozenset[str]
    required: frozenset[str]
    positional: tuple[str, ...]
    values: dict[str, Any]
    """Defaults in the order of the fields."""
    factories: tuple[tuple[str, Callable[[], Any]], ...]
    compared: Callable[[Any], Any]
    hashed: Callable[[Any], Any]
    then: bool
    """Whether the class has a `__post_init__`."""


_forms: dict[type, _Form] = {}


def _form(cls: Any) -> _Form:
    fields = dataclasses.fields(cls)
    missing = dataclasses.MISSING
    made = {field.name: field.default_factory for field in fields if field.default_factory is not missing}
    optional = {field.name for field in fields if field.default is not missing} | made.keys()
    names = frozenset(field.name for field in fields)
    compared = [field.name for field in fields if field.compare]
    hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
    form = _forms[cls] = _Form(
        names,
        names - optional,
        tuple(field.name for field in fields if not field.kw_only),
        {field.name: field.default for field in fields},
        tuple(made.items()),
        _taken(compared),
        _taken(hashed),
        hasattr(cls, "__post_init__"),
    )
    return form


def _taken(names: list[str]) -> Callable[[Any], Any]:
    """A function that gives the values of some fields as a tuple, so that what is the same object is equal."""
    return operator.attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, name) for name in names)


def _init(self: Any, /, *args: Any, **values: Any) -> None:
    cls = self.__class__
    form = _forms.get(cls) or _form(cls)
    if args:
        given = dict(zip(form.positional, args, strict=False))
        if len(args) > len(given) or given.keys() & values.keys():
            raise TypeError(f"{cls.__name__}() takes {', '.join(form.positional) or 'no argument'} by position, once")
        values.update(given)
    if not form.required <= values.keys() <= form.names:
        missing, unknown = sorted(form.required - values.keys()), sorted(values.keys() - form.names)
        raise TypeError(f"{cls.__name__}(): " + (f"missing {missing}" if missing else f"unexpected {unknown}"))
    state = self.__dict__
    state.update(form.values)
    state.update(values)
    for name, make in form.factories:
        if name not in values:
            state[name] = make()
    if form.then:
        self.__post_init__()


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    form = _forms.get(self.__class__) or _form(self.__class__)
    return form.compared(self) == form.compared(other)


def _hash(self: Any) -> int:
    form = _forms.get(self.__class__) or _form(self.__class__)
    return hash(form.hashed(self))


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _setattr(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


_METHODS = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
}
