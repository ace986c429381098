"""A subgraph in the terms of another library, operator by operator: what engines with an operator table share.

A table has one function for each ATen operator. Before it is called, arguments are put into the order of the operator's
schema, with its defaults, and what torch promotes is cast; after it, the result gets the dtype that torch's has, and
its shape is compared. So the functions say what an operator computes, and nothing else.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines.base import Engine
from omnicomp.lowerings.engines.operators import Operators
from omnicomp.lowerings.engines.subgraph import Subgraph

__all__ = [
    "Form",
    "Library",
    "convert",
    "declare_pointwise",
    "dtype_name",
    "form",
    "overloads",
    "plain",
]

# Where a tensor is put, and how, is not what it holds; subgraphs are on one device, and results are row-major.
_NOT_VALUES: Final = ("layout", "device", "pin_memory", "memory_format", "non_blocking")
_PROMOTED: Final = ("Tensor", "number")
_ALIGNMENT: Final = 64


class Library(Protocol):
    """What the conversion needs of a library; its values are symbolic tensors."""

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that elements of a promoted dtype are computed in, such as float32 for float16."""
        ...

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """The value in another dtype."""
        ...

    def number(self, value: float, dtype: torch.dtype) -> Any:
        """A zero-dimensional constant."""
        ...

    def constant(self, tensor: torch.Tensor) -> Any:
        """A constant of the graph, such as the list that `torch.tensor([1, 2])` was made of."""
        ...

    def kept(self, value: Any) -> Any:
        """A result of a function of the table, as one that may be used more than once."""
        ...

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape of a result of `kept`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A function of a table, and how its arguments are prepared.

    Attributes:
        function: takes the arguments of the operator's schema, all of them, those of keyword-only ones by name. What
            says where the result is put (`device`, `layout`, `pin_memory`, `memory_format`) is left out. Of several
            results it may return None for one that the table's `check` knows to be unused.
        promote: "result" casts tensors and numbers to the dtype of the result, "operands" to the one that torch
            promotes them to; or to the one that the library computes these in.
        keep: names of arguments that are not cast.
        like: whether the function gets the fake result, as `like=`.
    """

    function: Callable[..., Any]
    promote: str = ""
    keep: tuple[str, ...] = ()
    like: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def form(promote: str = "", *, keep: tuple[str, ...] = (), like: bool = False) -> Callable[[Callable[..., Any]], Form]:
    """Decorate a function of a table; see `Form`."""
    return lambda function: Form(function=function, promote=promote, keep=keep, like=like)


def dtype_name(dtype: torch.dtype) -> str:
    """The name that NumPy and its kin give a dtype: `float32`."""
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides of its shape, at an address that vector instructions take; a copy if it isn't so.

    Torch calls a tensor contiguous whatever the strides of its dimensions of size 1 are, and other libraries do not. A
    view may begin anywhere.
    """
    tensor = tensor.detach()  # a weight that is an input may be a parameter
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    if tensor.stride() != tuple(strides):
        tensor = tensor.contiguous().as_strided(tensor.shape, strides)
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def overloads(name: str, arity: int) -> list[torch._ops.OpOverload]:
    """The overloads of an ATen operator that take so many tensors or numbers, and nothing else, and return a tensor."""
    if not hasattr(torch.ops.aten, name):  # newer than this torch
        return []
    packet = getattr(torch.ops.aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [
        each
        for each in found
        if len(each._schema.arguments) == arity
        and all(str(argument.type) in _PROMOTED for argument in each._schema.arguments)
        and [str(result.type) for result in each._schema.returns] == ["Tensor"]
        and not each._schema.is_mutable
    ]


def declare_pointwise(
    engine: type[Engine], library: Any, names: Mapping[str, str], *, arity: int, promote: str, **options: Any
) -> None:
    """Declare operators that a library has a function for which takes the same operands.

    Args:
        engine: which.
        library: the module with the functions; it is not imported for it.
        names: of the functions, by the name of the ATen operator.
        arity: number of operands.
        promote: see `Form`.
        options: of `Engine.op`.
    """
    for name, called in names.items():
        engine.op(*overloads(name, arity), **options)(Form(function=_named(library, called), promote=promote))


def _named(library: Any, name: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        return getattr(library, name)(*operands)

    call.__name__ = name
    return call


def convert(subgraph: Subgraph, operators: Operators, library: Library, inputs: Sequence[Any]) -> dict[Node, Any]:
    """Compute the values of a subgraph in the terms of a library.

    Args:
        subgraph: without symbolic sizes.
        operators: with a function for each operator of the subgraph.
        library: what values are made of.
        inputs: the library's values, one a placeholder; None for those that are no tensor, which nothing reads.

    Returns:
        The values of all nodes.

    Raises:
        EngineError: the subgraph has symbolic sizes, or a value does not have the shape that torch's has.
        Exception: what a function of the table raises.
    """
    if subgraph.dynamic:
        raise EngineError("it is built for fixed sizes; take dynamic='classes' among its options")
    values = dict(zip(subgraph.placeholders, inputs, strict=True))
    for node in subgraph.module.graph.nodes:
        if node.op == "get_attr":
            values[node] = library.constant(operator.attrgetter(node.target)(subgraph.module))
        elif node.op == "call_function":
            values[node] = _called(node, operators, library, values)
    return values


def _called(node: Node, operators: Operators, library: Library, values: Mapping[Node, Any]) -> Any:
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    if node.target is operator.getitem:
        return args[0][args[1]]
    entry = operators.get(node.target)
    if entry is None or entry.convert is None:
        raise EngineError(f"there is no form of {op_name(node)}")
    made = entry.convert if isinstance(entry.convert, Form) else Form(function=entry.convert)
    fake = fake_value(node)
    positional, named = _bound(node, made, library, args, kwargs)
    if made.like:
        named["like"] = fake
    return _settled(library, made.function(*positional, **named), fake, node)


def _bound(
    node: Node, made: Form, library: Library, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in the order of the schema, promoted."""
    schema: Any = getattr(node.target, "_schema", None)
    dtype = _compute_dtype(node, made, library)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for index, argument in enumerate(schema.arguments):
        if index < len(args):
            value = args[index]
        else:
            value = kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)
        if dtype is not None and argument.name not in made.keep and "int" not in str(argument.type):
            value = _promoted(library, value, dtype, str(argument.type))
        if not argument.kwarg_only:
            positional.append(value)
        elif argument.name not in _NOT_VALUES:
            named[argument.name] = value
    return positional, named


def _promoted(library: Library, value: Any, dtype: torch.dtype, kind: str) -> Any:
    if value is None or not any(name in kind for name in _PROMOTED):
        return value
    if isinstance(value, (list, tuple)):
        return [_promoted(library, each, dtype, kind) for each in value]
    if isinstance(value, (bool, int, float)):
        return library.number(value, dtype)
    return library.cast(value, dtype)


def _compute_dtype(node: Node, made: Form, library: Library) -> torch.dtype | None:
    """The dtype that an operator computes in, or None where nothing is cast."""
    if not made.promote:
        return None
    if made.promote == "result":
        first = next(leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor))
        dtype = first.dtype
    else:
        operands: list[Any] = [fake_value(arg) if isinstance(arg, Node) else arg for arg in node.args[:2]]
        dtype = torch.result_type(*operands) if len(operands) == 2 else operands[0].dtype
    return library.computes_in(dtype)


def _settled(library: Library, value: Any, fake: Any, node: Node) -> Any:
    """A result in torch's dtype, once it has torch's shape."""
    if isinstance(fake, (tuple, list)):
        if len(value) != len(fake):
            raise EngineError(f"{op_name(node)} made {len(value)} results instead of {len(fake)}")
        return tuple(_settled(library, each, expected, node) for each, expected in zip(value, fake, strict=True))
    if value is None or not isinstance(fake, torch.Tensor):
        return None
    value = library.kept(value)
    shape = library.shape(value)
    if shape != tuple(fake.shape):
        raise EngineError(f"{op_name(node)} made the shape {shape} instead of {tuple(fake.shape)}")
    return library.kept(library.cast(value, fake.dtype))
