"""Blocks: the nodes that one call of a module put into a Dynamo graph, their inputs, outputs and effects.

Dynamo notes on every node the modules that were being called (`nn_module_stack`: a key for each call, with the path and
the class of the module). A block is the nodes that share a key.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule, validate_partition
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.autograd.dispatch_trace import listening, storage_key
from omnicomp._torch.autograd.overrides import HigherOrderOperator, mutated_arguments, source_name
from omnicomp._torch.symbols import expression
from omnicomp.analysis.collectives import communicates
from omnicomp.analysis.nodes import fake_value, op_name, plain_path

_MODES: Final = ("autocast", "grad_enabled", "inference_mode", "_functorch", "vmap_", "_nesting")
_STATE: Final = re.compile(r"(?:_parameters|_buffers)\['[^']+'\]$")


@records.dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The nodes of one call of a module, in a Dynamo graph."""

    key: str  # Dynamo's key of the call
    path: str  # qualified name of the module in the model, for example `layers.3.mlp`
    cls: type  # its class
    root: str  # the variable that Dynamo reached the model by, for example `L['self']`
    nodes: tuple[Node, ...]  # in program order

    @functools.cached_property
    def members(self) -> frozenset[Node]:
        """The nodes, as a set."""
        return frozenset(self.nodes)

    @functools.cached_property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes outside that it reads, in the order of first use."""
        used = (source for node in self.nodes for source in node.all_input_nodes if source not in self.members)
        return tuple(dict.fromkeys(used))

    @functools.cached_property
    def outputs(self) -> tuple[Node, ...]:
        """The nodes that are used outside, in program order."""
        return tuple(node for node in self.nodes if any(user not in self.members for user in node.users))

    @functools.cached_property
    def parameters(self) -> tuple[tuple[str, Node], ...]:
        """Parameters, buffers and other tensors of the module, by qualified name, dots as underscores."""
        found: list[tuple[str, Node]] = []
        for node in self.inputs:
            source = source_name(node) if node.op == "placeholder" else ""
            name = plain_path(source)
            if name.startswith(f"{self.path}.") and _root(source) == self.root:
                found.append((re.sub(r"\W+", "_", name[len(self.path) + 1 :]), node))
        return tuple(found)

    @functools.cached_property
    def activations(self) -> tuple[Node, ...]:
        """The other inputs, in the order of first use, without numbers that follow from the shapes of the tensors."""
        own = {node for _, node in self.parameters}
        values = [fake_value(node) for node in self.inputs]
        symbols = {s for v in values if isinstance(v, torch.Tensor) for size in v.shape for s in _symbols(size)}
        return tuple(node for node in self.inputs if node not in own and not _follows(fake_value(node), symbols))

    @functools.cached_property
    def foreign_state(self) -> tuple[str, ...]:
        """Parameters and buffers of other modules that it reads, such as tied weights."""
        names = (source_name(node) for node in self.activations if node.op == "placeholder")
        return tuple(plain_path(name) for name in names if _STATE.search(name))

    @functools.cached_property
    def between(self) -> tuple[Node, ...]:
        """Other nodes in program order between its first node and its last."""
        found: list[Node] = []
        node = self.nodes[0]
        while node is not self.nodes[-1]:
            node = node.next
            if node not in self.members and node.op not in ("placeholder", "get_attr"):
                found.append(node)
        return tuple(found)

    @property
    def convex(self) -> bool:
        """Whether nothing outside both reads something of the block and makes something for it."""
        return validate_partition(list(self.nodes))

    @property
    def operators(self) -> tuple[str, ...]:
        """The torch functions that it calls, in program order."""
        return tuple(op_name(node) for node in self.nodes)

    @property
    def literals(self) -> tuple[Any, ...]:
        """The numbers, dtypes and other constants that it calls them with, in program order.

        The override is not given them; a check that depends on one, such as an `eps`, looks here.
        """
        leaves = (leaf for node in self.nodes for leaf in tree_leaves((node.args, dict(node.kwargs))))
        return tuple(leaf for leaf in leaves if not isinstance(leaf, Node))

    def extract(self, owner: GraphModule) -> GraphModule:
        """A copy as a graph of its own, with `inputs` as its placeholders and a tuple of `outputs` as its result."""
        module, _, _ = fuse_as_graphmodule(owner, list(self.nodes), "Block", always_return_tuple=True)
        return module

    def matches(self, wanted: str | type) -> bool:
        """Whether it is of a class, or has a name or a path that ends as the pattern says."""
        if isinstance(wanted, type):
            # A subclass with a forward of its own computes something else.
            return issubclass(self.cls, wanted) and getattr(self.cls, "forward", None) is getattr(
                wanted, "forward", None
            )
        if wanted in (self.cls.__name__, f"{self.cls.__module__}.{self.cls.__qualname__}"):
            return True
        parts, pattern = self.path.split("."), wanted.split(".")
        tail = parts[-len(pattern) :]
        return bool(self.path) and len(tail) == len(pattern) and all(map(fnmatchcase, tail, pattern))


def find_blocks(module: GraphModule) -> list[Block]:
    """The blocks of a graph, outer ones before those inside them."""
    nodes: dict[str, list[Node]] = {}
    described: dict[str, tuple[str, type]] = {}
    for node in module.graph.nodes:
        stack = node.meta.get("nn_module_stack") if node.op.startswith("call_") else None
        for key, entry in (stack or {}).items():
            if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], type):
                nodes.setdefault(key, []).append(node)
                described.setdefault(key, (str(entry[0]), entry[1]))
    return [
        Block(key=key, path=plain_path(path), cls=cls, root=_root(path), nodes=tuple(nodes[key]))
        for key, (path, cls) in described.items()
    ]


def _root(source: str) -> str:
    found = re.match(r"[LG]\['\w+'\]", source)
    return found[0] if found else ""


def _symbols(value: Any) -> frozenset[Any]:
    return getattr(expression(value), "free_symbols", frozenset())


def _follows(value: Any, symbols: set[Any]) -> bool:
    """Whether a value that comes into a block says nothing that the shapes of the block's tensors do not."""
    if isinstance(value, (torch.SymInt, int)):
        return _symbols(value) <= symbols
    if isinstance(value, (tuple, list)):  # a torch.Size among them
        items: Sequence[Any] = value  # type: ignore[assignment]
        return all(not isinstance(item, torch.Tensor) and _follows(item, symbols) for item in items)
    return isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, str))


@records.dataclass(frozen=True, kw_only=True)
class Effects:
    """Effects of nodes besides computing values."""

    mutated: tuple[Node, ...]  # nodes outside of which the elements are changed
    # A sentence for each further effect: random numbers, a collective, a mode, a higher-order operator.
    other: tuple[str, ...]
    aliases: tuple[Node, ...]  # nodes whose result shares memory with a value from outside, or with another one's


def effects(nodes: Sequence[Node], results: Sequence[Node] = ()) -> Effects:
    """Run nodes on fake tensors, and note their effects.

    Raises:
        Exception: whatever an operator raises on fake tensors.
    """
    members = frozenset(nodes)
    other = list(_structural(nodes))
    if other:  # to run these would change modes, or run other graphs
        return Effects(mutated=(), other=tuple(other), aliases=())
    outside = tuple(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in members))
    memory = {storage_key(t): node for node in outside for t in _tensors(fake_value(node))}
    mutated: dict[Node, None] = {}

    def listen(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if draws(operator, args, kwargs):
            other.append(f"it draws random numbers ({operator})")
        if communicates(operator):
            other.append(f"it communicates ({operator})")
        for value in written(operator, args, kwargs):
            found = memory.get(storage_key(value))
            if found is not None:
                mutated[found] = None

    with listening([t for node in outside for t in _tensors(fake_value(node))], listen) as faked:
        # Others see these fakes: what is done to the shape of one in place must not reach it.
        values = {node: _map_tensors(fake_value(node), lambda t: faked(t).detach()) for node in outside}
        memory.update({storage_key(t): node for node, value in values.items() for t in _tensors(value)})
        for node in nodes:
            values[node] = _call(node, values)
    return Effects(mutated=tuple(mutated), other=tuple(dict.fromkeys(other)), aliases=_shared(results, values, memory))


def _structural(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        target: Any = node.target
        if isinstance(target, HigherOrderOperator) or node.op == "call_module":
            yield f"it calls a higher-order operator ({op_name(node)})"
        elif any(word in op_name(node) for word in _MODES):
            yield f"it changes a mode ({op_name(node)})"
        elif any(word in op_name(node) for word in ("_assert", "_check", "manual_seed", "print")):
            yield f"it has a side effect ({op_name(node)})"


def _call(node: Node, values: Mapping[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _shared(results: Sequence[Node], values: Mapping[Node, Any], memory: Mapping[int, Node]) -> tuple[Node, ...]:
    taken, found = set(memory), list[Node]()
    for node in results:
        keys = {storage_key(t) for t in _tensors(values[node])}
        if keys & taken:
            found.append(node)
        taken |= keys
    return tuple(found)


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an ATen operator draws random numbers; a dropout that is switched off does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    bound = _bind(operator, args, kwargs)
    name = operator._schema.name
    if "dropout" in name and bound.get("p") == 0:
        return False
    return bound.get("dropout_p", 1.0) != 0 and bound.get("train") is not False and bound.get("training") is not False


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors whose elements a call of an ATen operator changes."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    bound = _bind(operator, args, kwargs)
    return [tensor for name in mutated_arguments(operator) for tensor in _tensors(bound.get(name))]


def _bind(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = operator._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)) and _tensors(value):
        return type(value)([_map_tensors(item, function) for item in value])  # type: ignore[call-arg]
    return value
