"""What a pass changed in a graph, as pairs of small graphs that claim to compute the same.

A graph before and after a pass are compared by the names of their nodes. A node that stayed, and reads something else
than before, claims that both are equal. What computes each of the two is cut out up to the nodes that stayed, which
become inputs of both small graphs. A cut is as small as it can be, but for what one side reads alone, as a mask that
became a flag: the masks, positions and views that make it are a part of that side. `wider` moves a cut up, first to
where values come from costly operators, then to the graph's own inputs, and, in a graph that another one calls, to
where that makes these by cheap operators, for claims that hold because of how an input of the small graphs was made.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import lazy_module
from omnicomp.analysis.nodes import SAME_VALUE, fake_value
from omnicomp.passes.assumptions import is_cheap, may_write
from omnicomp.passes.attention.nodes import is_pure, mutates

_MOST_CONSTANT_BYTES: Final = 2**20
_MOST_WHOLE: Final = 512
# Costly operators that a cut goes through to what both sides read.
_MOST_BETWEEN: Final = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A part of a graph before and after a pass."""

    before: GraphModule  # it as it was
    after: GraphModule  # it as it is, with the same placeholders and as many outputs
    at: Node  # the node of the new graph that stands for it
    nodes: tuple[str, ...] = ()  # names of the nodes that the pass put there
    whole: bool = False  # whether it is the whole graph, because of what is written to in it
    wider: Callable[[], "Change | None"] = lambda: None  # the same part, cut farther up; None if it can't be
    # The same part and what reads its result, which may be right where the result differs: the other operand of a sum,
    # or the input of a view. None if that has an effect.
    read: Callable[[], "Change | None"] = lambda: None
    # Has the new graph compute it as the old one did; None if that can't be told from the rest.
    undo: Callable[[], None] | None = None


_FUNCTIONAL: Final[Mapping[Any, Callable[..., Any]]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""Writes in place, and what makes a new value of the same operands."""


class UncutError(Exception):
    """Why a change can't be cut out of its graph."""


def changes(before: GraphModule, after: GraphModule, caller: Node | None = None) -> Iterator[Change]:
    """The parts of a graph that a pass changed; parts that share nothing but what they read are apart.

    Where a part draws random numbers, writes to memory, or reads memory that is written to, the graphs are compared as
    a whole.

    Args:
        before: a copy of the graph as it was, with the same names of nodes.
        after: the graph as it is.
        caller: the node that calls it with what it takes, if it is a region of another graph.

    Raises:
        UncutError: it can't be cut, and the graph is too large to be compared as a whole.
    """
    comparison = _Comparison(before, after, caller=caller)
    if not comparison.changed:
        return
    obstacle = comparison.obstacle()
    if obstacle is not None:
        if len(after.graph.nodes) > _MOST_WHOLE:
            raise UncutError(f"{obstacle.name} writes to memory or draws random numbers, and the graph is large")
        nodes = tuple(node.name for node in after.graph.nodes if node in comparison.new.inside)
        change = Change(before=before, after=after, at=comparison.first, nodes=nodes, whole=True)
        yield dataclasses.replace(change, wider=lambda: comparison.called(change))
        return
    for pair in comparison.pairs():
        change = comparison.cut(pair)
        # Of several results those count that are read.
        several = isinstance(fake_value(comparison.new.nodes[pair[1]]), (tuple, list))
        taken = change.read() if several else None
        yield (
            change if taken is None else dataclasses.replace(taken, at=change.at, nodes=change.nodes, undo=change.undo)
        )


class _Side:
    """One of the two graphs."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.nodes: dict[str, Node] = {node.name: node for node in module.graph.nodes}
        self.places: dict[str, int] = {name: place for place, name in enumerate(self.nodes)}
        self.inside: set[Node] = set()
        self.twins: set[Node] = set()  # nodes inside that claim to have the value of the node of their name
        writes = [node for node in self.nodes.values() if node.target in _FUNCTIONAL]
        held: dict[int, list[Node]] = {}
        for node in self.nodes.values() if writes else ():
            for place in _memory(node):
                held.setdefault(place, []).append(node)
        self.local = {node for node in writes if self._writes_to_own(node, held)}

    def _writes_to_own(self, node: Node, held: Mapping[int, Sequence[Node]]) -> bool:
        """Whether a write in place is as good as a new value: nobody reads the memory behind it but by its result."""
        written, value = node.args[0], fake_value(node)
        if not isinstance(written, Node) or not isinstance(value, torch.Tensor):
            return False
        holders = [each for place in _memory(node) for each in held[place]]
        first = holders[0]
        if not _is_call(first) or not _is_call(written) or mutates(first):
            return False  # memory that was there before, such as of an input
        behind = {node}
        for each in holders:
            if not behind.isdisjoint(each.all_input_nodes):
                behind.add(each)
        place = self.places[node.name]
        read = [user for each in holders if each not in behind for user in each.users if user is not node]
        if any(self.places[user.name] > place for user in read):
            return False
        added: Any = node.args[1]
        old, other = fake_value(written), fake_value(added) if isinstance(added, Node) else added
        whole = not isinstance(other, torch.Tensor) or torch.broadcast_shapes(old.shape, other.shape) == old.shape
        return whole and torch.result_type(old, other) == old.dtype

    def pure(self, node: Node) -> bool:
        """Whether a node has no effect but its result."""
        return node in self.local or is_pure(node)

    def slice_of(self, ends: Iterable[Node], extend: Callable[[Node], bool], *, through: bool = False) -> set[Node]:
        """What computes nodes, as far as it changed or `extend` says; behind twins only if it goes `through` them."""
        found: set[Node] = set()
        stack = list(ends)
        first = set(stack)
        while stack:
            node = stack.pop()
            if node in self.twins and node not in first and not through:
                continue
            if node in found or not (node in self.inside or self.drawn_in(node) or extend(node)):
                continue
            found.add(node)
            stack.extend(node.all_input_nodes)
        return found

    def in_order(self, inside: Collection[Node], ends: Iterable[Node]) -> list[Node]:
        """The nodes of a slice as its ends read them, so that equal slices are in one order, wherever nodes were put.

        In the order of the graph, if one has an effect.
        """
        if not all(self.pure(node) for node in inside if _is_call(node)):
            return sorted(inside, key=lambda node: self.places[node.name])
        found: dict[Node, None] = {}
        stack = [*ends][::-1]
        while stack:
            read = [each for each in stack[-1].all_input_nodes if each in inside and each not in found]
            if stack[-1] in inside and read:
                stack.extend(read[::-1])
                continue
            node = stack.pop()
            if node in inside:
                found.setdefault(node)
        return list(found)

    def ordered(self) -> list[str]:
        """The nodes whose place among each other counts: those with an effect, and what touches written memory."""
        calls = [node for node in self.nodes.values() if _is_call(node)]
        writing = [node for node in calls if mutates(node) and node not in self.local]
        written = {place for node in writing for read in node.all_input_nodes for place in _memory(read)}

        def touches(node: Node) -> bool:
            return any(place in written for read in node.all_input_nodes for place in _memory(read))

        return [node.name for node in calls if not self.pure(node) or (written and touches(node))]

    def drawn_in(self, node: Node) -> bool:
        """Whether a node that stayed is a part of each side all the same: a size, or a small constant."""
        if node.op == "get_attr":
            value = _attribute(self.module, str(node.target))
            if not isinstance(value, torch.Tensor):
                return True
            return value.layout is torch.strided and value.numel() * value.element_size() <= _MOST_CONSTANT_BYTES
        if not node.op.startswith("call_"):
            return False
        # Sizes, and tuples, which no graph takes.
        return not isinstance(fake_value(node), torch.Tensor)


class _Comparison:
    """Two graphs, node by node."""

    def __init__(
        self, before: GraphModule, after: GraphModule, readers: Collection[str] = (), caller: Node | None = None
    ) -> None:
        self.old, self.new, self.caller = _Side(before), _Side(after), caller
        old, new = self.old.nodes, self.new.nodes
        self.common = [name for name in new if name in old]
        self._claims: dict[tuple[str, str], str] = {}
        self.old.inside = {node for name, node in old.items() if name not in new}
        self.new.inside = {node for name, node in new.items() if name not in old}
        for name in self.common:
            claims = _claimed(old[name], new[name]) if name not in readers else None
            if claims is None and new[name].op == "output":
                raise UncutError("the pass changed how many values the graph returns")
            if claims is None:  # another operator of the same name
                self.old.inside.add(old[name])
                self.new.inside.add(new[name])
                continue
            for left, right in claims:
                if left != right:
                    self._claims.setdefault((left, right), name)
        for name in self.common:
            twins = old[name], new[name]
            if twins[1].meta.get(SAME_VALUE) and twins[1] in self.new.inside and _alike(*map(fake_value, twins)):
                self.old.twins.add(twins[0])
                self.new.twins.add(twins[1])
                self._claims.setdefault((name, name), name)
        self._reordered = self._first_reordered()
        replaced = {node.name for node in self.new.inside} & {node.name for node in self.old.inside}
        for name in self.common:
            for read in new[name].all_input_nodes:
                if read.name in replaced and new[name] not in self.new.inside:
                    self._claims.setdefault((read.name, read.name), name)

    @property
    def changed(self) -> bool:
        """Whether anything did."""
        return bool(self.old.inside or self.new.inside or self._claims or self._reordered)

    def _first_reordered(self) -> Node | None:
        """A node that has another place among those that write to memory, draw random numbers, or read such memory."""
        orders = [
            [name for name in side.ordered() if name in self.old.nodes and name in self.new.nodes]
            for side in (self.old, self.new)
        ]
        return next((self.new.nodes[b] for a, b in zip(*orders, strict=False) if a != b), None)

    @property
    def first(self) -> Node:
        """A node that stands for what changed."""
        if self._reordered is not None:
            return self._reordered
        inside = [node for node in self.new.nodes.values() if node in self.new.inside]
        users = [self.new.nodes[user] for user in self._claims.values()]
        return next(iter([*inside, *users]), next(iter(self.new.nodes.values())))

    def obstacle(self) -> Node | None:
        """A node for which a part of the graph can't be told from the rest; None if there is none."""
        if self._reordered is not None:
            return self._reordered
        touched = [*self.old.inside, *self.new.inside]
        local = self.old.local | self.new.local
        for node in touched:
            if _is_call(node) and not is_pure(node) and node not in local:
                return node
        read = {each for node in touched for each in (node, *node.all_input_nodes)}
        memory = {place for node in read for place in _memory(node)}
        places = [self.new.places[node.name] for node in self.new.inside]
        for name in self.common:
            node = self.new.nodes[name]
            if not _is_call(node) or not mutates(node) or node in local:
                continue
            written = {place for each in node.all_input_nodes for place in _memory(each)}
            # One without operands switches a mode.
            between = places and min(places) < self.new.places[name] < max(places)
            if written & memory or (not written and between):
                return node
        return None

    def pairs(self) -> list[tuple[str, str]]:
        """The values that are claimed to be equal, old and new, in the order of the graph."""
        return sorted(self._claims, key=lambda pair: self.new.places[pair[1]])

    def cut(self, *pairs: tuple[str, str], level: int = 0) -> Change:
        """The part that computes pairs of values."""
        ends = [self.old.nodes[name] for name, _ in pairs], [self.new.nodes[name] for _, name in pairs]
        sides = self.old, self.new
        between: set[str] = set()
        shared: Collection[str] = ()

        def apart(node: Node) -> bool:
            return node.name not in shared and (self._cheap(node) or node.name in between)

        def sliced(farther: Callable[[Node], bool]) -> tuple[list[list[Node]], list[dict[str, Node]]]:
            """The nodes of both sides in order, and what they read from outside."""
            through = level > 0
            slices = [side.slice_of(end, farther, through=through) for side, end in zip(sides, ends, strict=True)]
            ordered = [side.in_order(inside, end) for side, inside, end in zip(sides, slices, ends, strict=True)]
            read = [
                {read: None for read in [*(read for node in nodes for read in node.all_input_nodes), *end]}
                for nodes, end in zip(ordered, ends, strict=True)
            ]
            # By their first use: in equal layers they may be in another order, as where the first one makes a mask.
            return ordered, [
                {r.name: r for r in each if r not in inside} for each, inside in zip(read, slices, strict=True)
            ]

        def alone(outside: Sequence[Mapping[str, Node]]) -> list[Node]:
            """The results that one side reads and the other does not."""
            names = outside[0].keys() ^ outside[1].keys()
            return [node for each in outside for name, node in each.items() if name in names and _is_call(node)]

        ordered, outside = sliced((lambda _: False, self._cheap, _is_call)[level])
        if level == 0 and alone(outside):
            shared = outside[0].keys() & outside[1].keys()
            ordered, outside = deeper = sliced(apart)
            while costly := [node.name for node in alone(deeper[1])]:
                between.add(max(costly, key=lambda name: self.old.places.get(name, -1)))
                if len(between) > _MOST_BETWEEN:
                    break
                deeper = sliced(apart)
            else:
                ordered, outside = deeper
        names = {**outside[0], **outside[1]}
        missing = [name for name in names if name not in self.old.nodes or name not in self.new.nodes]
        if missing:
            raise UncutError(f"{missing[0]} is read by one side, and is not in the other graph")
        inputs = list(names)
        made = [_module(side, inputs, nodes, end) for side, nodes, end in zip(sides, ordered, ends, strict=True)]
        pair = pairs[0]
        return Change(
            before=made[0],
            after=made[1],
            at=ends[1][0] if ends[1][0] in self.new.inside else self.new.nodes[self._claims[pair]],
            nodes=tuple(node.name for node in ordered[1] if node in self.new.inside),
            wider=lambda: self._wider(pair, inputs, level + 1),
            read=lambda: self._read_by(pair),
            undo=lambda: self._undo(pair),
        )

    def _read_by(self, pair: tuple[str, str]) -> Change | None:
        """The part that computes what reads one of two values in place of the other."""
        found = [(self.old.nodes[name], self.new.nodes[name]) for name in self.common]
        readers = [new for old, new in found if pair in (_claimed(old, new) or ())]
        if not readers or not all(_is_call(node) and is_pure(node) for node in readers):
            return None
        names = [node.name for node in readers]
        return _Comparison(self.old.module, self.new.module, names, self.caller).cut(*zip(names, names, strict=True))

    def _undo(self, pair: tuple[str, str]) -> None:
        """Compute a value as the old graph did, for all that read it there."""
        graph, old, new = self.new.module.graph, self.old.nodes[pair[0]], self.new.nodes[pair[1]]
        wrong = self.new.slice_of([new], lambda _: False) & self.new.inside
        apart = self.new.inside - self.new.twins
        stayed = [name for name in self.common if self.new.nodes[name] not in apart]
        values = {self.old.nodes[name]: self.new.nodes[name] for name in stayed}
        readers = [name for name in stayed if old in self.old.nodes[name].all_input_nodes]
        readers = [name for name in readers if pair in (_claimed(self.old.nodes[name], self.new.nodes[name]) or ())]
        twin = new in self.new.twins
        if not readers and not twin:
            return
        gone = self.old.slice_of([old], lambda _: False) & self.old.inside
        with graph.inserting_before(new if twin else self.new.nodes[min(readers, key=self.new.places.__getitem__)]):
            for node in self.old.module.graph.nodes:
                if node in gone and not (twin and node is old):
                    values[node] = graph.node_copy(node, values.__getitem__)
                    values[node].meta = dict(node.meta)
        if twin:
            new.op, new.target = old.op, old.target
            new.args, new.kwargs = map_arg((old.args, old.kwargs), values.__getitem__)
        for name in () if twin else readers:
            _reread(self.old.nodes[name], self.new.nodes[name], old, new, values[old])
        for node in reversed(list(graph.nodes)):
            if node in wrong and not node.users:
                graph.erase_node(node)

    def _wider(self, pair: tuple[str, str], inputs: Sequence[str], level: int) -> Change | None:
        nodes = [self.new.nodes[name] for name in inputs]
        if level == 1 and not any(map(self._cheap, nodes)):
            level = 2
        if level <= 2 and any(map(_is_call, nodes)):
            return self.cut(pair, level=level)
        return None if self.caller is None else self.called(self.cut(pair, level=2))

    def called(self, change: Change) -> Change | None:
        """The same part with the cheap operators by which the caller makes what it takes; None if there are none."""
        if self.caller is None or self.caller.graph.owning_module is None:
            return None
        names = [node.name for node in self.new.module.graph.find_nodes(op="placeholder")]
        given = dict(zip(names, self.caller.args[1:], strict=True))
        taken = [given[node.name] for node in change.after.graph.find_nodes(op="placeholder") if node.name in given]
        outer = _Side(self.caller.graph.owning_module)
        found = outer.slice_of([each for each in taken if isinstance(each, Node)], is_cheap)
        read = {each for node in found for each in (node, *node.all_input_nodes)}
        if not any(map(_is_call, found)) or may_write(outer.module, read):
            return None
        nodes = [node for node in outer.nodes.values() if node in found]
        sides = [_called(outer, nodes, side, given) for side in (change.before, change.after)]
        return dataclasses.replace(change, before=sides[0], after=sides[1], wider=lambda: None)

    def _cheap(self, node: Node) -> bool:
        """Whether a node that stayed is one that masks, positions and views are made by."""
        return is_cheap(node) and node.name in self.old.nodes and node.name in self.new.nodes


def _is_call(node: Node) -> bool:
    return node.op.startswith("call_")


def _claimed(old: Node, new: Node) -> list[tuple[str, str]] | None:
    """The values that two nodes of one name read at the same places; None if they differ in more than that."""
    if old.op != new.op or old.target != new.target:
        return None
    left, right = ((_bare(node.args), _bare(node.kwargs)) for node in (old, new))
    if left != right:
        return None
    return [(a.name, b.name) for a, b in zip(_read(old), _read(new), strict=True)]


def _alike(old: Any, new: Any) -> bool:
    """Whether two fake values are tensors of one shape, layout and dtype."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    return (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)


def _memory(node: Node) -> Iterator[int]:
    """The memory of the tensors that a node returns."""
    for leaf in tree_leaves(fake_value(node)):
        while isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf):  # of a graph with a `vmap` in it
            leaf = get_unwrapped(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()._cdata


def _bare(value: Any) -> str:
    return repr(map_arg(value, lambda _: None))


def _read(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _reread(before: Node, reader: Node, old: Node, new: Node, value: Node) -> None:
    """Have a node read a value where it read `old` before, and reads `new` now."""
    then = iter(_read(before))
    reader.args, reader.kwargs = map_arg(
        (reader.args, reader.kwargs), lambda now: value if next(then) is old and now is new else now
    )


def _attribute(module: GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part, None)
    return value


def _module(side: _Side, inputs: Sequence[str], nodes: Sequence[Node], ends: Sequence[Node]) -> GraphModule:
    """The graph of a slice, whose nodes are in order."""
    graph = torch.fx.Graph()
    values: dict[Node, Node] = {}
    for name in inputs:
        node = side.nodes[name]
        made = graph.create_node("placeholder", name, name=name)
        made.meta.update(_described(node))
        values[node] = made
    held: dict[str, Any] = {}
    for node in nodes:
        made = graph.node_copy(node, values.__getitem__)
        made.target = _FUNCTIONAL[node.target] if node in side.local else made.target
        made.meta = {**_described(node), "nn_module_stack": node.meta.get("nn_module_stack")}
        values[node] = made
        if node.op in ("get_attr", "call_module"):
            held[str(node.target)] = _attribute(side.module, str(node.target))
    graph.output(tuple(values[end] for end in ends))
    return lazy_module(held, graph)


def _called(outer: _Side, nodes: Sequence[Node], inner: GraphModule, given: Mapping[str, Any]) -> GraphModule:
    """A graph behind nodes of its caller, which are in order.

    Args:
        outer: the graph of the caller.
        nodes: what makes the graph's inputs there.
        inner: the graph.
        given: what the caller gives for inputs, by their names.
    """
    graph = torch.fx.Graph()
    values: dict[Node, Any] = {}
    held: dict[str, Any] = {}
    inputs = inner.graph.find_nodes(op="placeholder")
    taken = [given.get(node.name, node) for node in inputs]
    for read in dict.fromkeys([*(read for node in nodes for read in node.all_input_nodes), *taken]):
        if isinstance(read, Node) and read not in nodes:
            values[read] = made = graph.create_node("placeholder", read.name, name=read.name)
            made.meta.update(_described(read))
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        if node.op == "get_attr":
            held[str(node.target)] = _attribute(outer.module, str(node.target))
    values |= {node: values[each] if isinstance(each, Node) else each for node, each in zip(inputs, taken, strict=True)}
    *own, output = (node for node in inner.graph.nodes if node.op != "placeholder")
    for node in own:
        values[node] = made = graph.node_copy(node, values.__getitem__)
        if node.op in ("get_attr", "call_module"):
            made.target = f"called_{str(node.target).replace('.', '_')}"
            held[made.target] = _attribute(inner, str(node.target))
    graph.output(map_arg(output.args[0], values.__getitem__))
    return lazy_module(held, graph)


_KEPT: Final = ("example_value", "val")


def _described(node: Node) -> Mapping[str, Any]:
    return {key: node.meta[key] for key in _KEPT if key in node.meta}
