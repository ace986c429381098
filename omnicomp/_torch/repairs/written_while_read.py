"""Inductor writes to memory from which something else still has to be read.

What a program writes to an input is, for Inductor, a copy into it at the end of a graph. Four times it loses sight of
who reads the input as it was:

- The copy and what computes its source are one loop where the source is cheap, also where the loop reads the input at
  other places than it writes to: `x[1:] = x[:-1].clone()`, `torch._foreach_add_([x], [x.flip(0)])`, and where it writes
  to places that a tensor names.
- The scheduler fuses a reader with the copy if both are at the same index. It does not recognise a reader by the name
  that the memory has since an earlier write: `x.index_put_(i, y); x.add_(x.flip(0))`.
- Before the copy, what reads the input is computed, but not what reads it through a view that is a buffer of its own,
  as of another element size: `y = x.view(torch.int32) * 2; x.zero_()` for an int64.
- A source that is a whole input is read when the copy is made, behind the copy into that input: `dst[:] = src;
  src.add_(1)` puts the sum into both. In the same way an operator reads what it writes to, in the place of a clone.

`tests/_torch/repairs/test_written_while_read.py` has the reproducers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch._inductor import lowering
from torch._inductor.dependencies import MemoryDep, extract_read_writes
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_utils import get_node_storage
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import FlexibleLayout
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V, ops
from torch._subclasses.fake_tensor import FakeTensor

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/198270")

_WRITTEN: Final = "written"  # what the loop of a copy is called while its indices are compared
_copy_: Final = torch.ops.aten.copy_.default
_changes_bases: Final = torch.ops.higher_order.auto_functionalized_v2


def _source_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """`mutate_to`, whose loop reads what it writes to at the places alone that it writes to.

    The results of a list's operator are written one by one, before torch counts them as readers: these wait for the
    last one, and are computed first if one of them reads what another one is written to.
    """
    waiting = WeakKeyDictionary[GraphLowering, list[tuple[Any, Any]]]()

    def write(changed: Any, val: Any, unsafe_alias: bool) -> Any:
        if _reads_elsewhere(changed, val):
            return original(changed, _computed(val), False)
        return original(changed, val, unsafe_alias)

    def mutate_to(changed: Any, val: Any, unsafe_alias: bool = False) -> Any:
        node: Any = V.graph.current_node
        if node.target not in lowering.inplace_foreach_ops:
            return write(changed, val, unsafe_alias)
        pairs = waiting.setdefault(V.graph, [])
        pairs.append((changed, val))
        if len(pairs) == len(node.args[0]):
            del waiting[V.graph]
            crossed = _read_each_other(pairs)
            for _, value in pairs if crossed else ():
                value.realize()
            for one, value in pairs:
                write(one, value, unsafe_alias and not crossed)
        return changed

    return mutate_to


def _read_each_other(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether a result reads what another result is written to."""
    names = {changed.maybe_get_name(): index for index, (changed, _) in enumerate(pairs)}
    return any(names.get(name, index) != index for index, (_, val) in enumerate(pairs) for name in val.get_read_names())


def _reads_elsewhere(changed: Any, val: Any) -> bool:
    name, read = changed.maybe_get_name(), val.get_read_names()
    if name is None or not read:
        return False
    if any(view in read for view in _views(V.graph, name)):
        return True
    if name not in read:
        return False
    with patch.object(FlexibleLayout, "allow_indexing", True):  # as where Inductor itself asks what a loop reads
        target, source = changed.make_indexer(), val.make_loader()
        found = extract_read_writes(lambda index: ops.store(_WRITTEN, target(index), source(index)), changed.get_size())
    places = {_place(dep) for dep in found.writes}
    return any(dep.name == name and _place(dep) not in places for dep in found.reads)


def _values_of_their_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """`index_put_impl_`, whose loop reads neither values nor indices from what it writes to.

    Torch computes such values first, which does nothing for a view: `x.index_copy_(0, i, x[:2].clone())`.
    """

    def index_put(
        self: Any, indices: Any, values: Any, accumulate: bool, check: bool, may_realize: bool = False
    ) -> Any:
        if may_realize:
            self.realize()
            names = {self.get_name(), *_views(V.graph, self.get_name())}
            values = lowering.clone(values) if names & _read_by(values) else values
            indices = [
                _computed(index) if index is not None and names & _read_by(index) else index for index in indices
            ]
        return original(self, indices, values, accumulate, check, may_realize)

    return index_put


def _read_by(value: Any) -> set[str]:
    """Names of what it reads now; what Inductor keeps is of when a view was made."""
    with patch.object(FlexibleLayout, "allow_indexing", True):
        return {dep.name for dep in extract_read_writes(value.make_loader(), value.get_size()).reads}


def _computed(value: Any) -> Any:
    copied = lowering.clone(value)
    copied.realize()
    return copied


def _place(dep: Any) -> Any:
    """Where a loop reads or writes; of an unknown place, something that is no other's."""
    return (dep.index, dep.size) if isinstance(dep, MemoryDep) else object()


_views_of_graphs: Final = WeakKeyDictionary[GraphLowering, tuple[int, defaultdict[str, list[str]]]]()


def _views(graph: GraphLowering, name: str) -> Iterator[str]:
    """Names of the buffers that are views of another one."""
    known, views = _views_of_graphs.get(graph, (0, defaultdict[str, list[str]](list)))
    for operation in graph.operations[known:]:
        for base in operation.get_inputs_that_alias_output():
            views[base] += [buffer.get_name() for buffer in operation.get_outputs()]
    _views_of_graphs[graph] = (len(graph.operations), views)
    for view in views.get(name, ()):
        yield view
        yield from _views(graph, view)


def _readers_of_views(original: Callable[..., None]) -> Callable[..., None]:
    """`mark_buffer_mutated`, which has what reads a buffer computed, with what reads the buffer's views."""

    def mark_buffer_mutated(self: GraphLowering, name: str) -> None:
        for view in _views(self, name):
            for reader in self.name_to_users.get(view, ()):
                reader.realize()
        original(self, name)

    return mark_buffer_mutated


def _recognising(original: Callable[..., bool]) -> Callable[..., bool]:
    """`fusable_weak_dep`, for whatever name the memory that is written is read by."""

    def fusable_weak_dep(self: Any, weak_dep: Any, node1: Any, node2: Any) -> bool:
        if not original(self, weak_dep, node1, node2):
            return False
        names = self.mutation_real_name
        real = names[weak_dep.mutating_buf]
        places = {_place(dep) for dep in node2.read_writes.writes if dep.name == weak_dep.mutating_buf}
        reads = (dep for node in node1.get_nodes() for dep in node.read_writes.reads)
        return all(names.get(dep.name) != real or _place(dep) in places for dep in reads)

    return fusable_weak_dep


def _sources_first(original: Callable[..., None]) -> Callable[..., None]:
    """`remove_noop_ops`, behind which nothing reads an input that was written to meanwhile.

    At that time nothing writes but the copies at the end of the graph, and operators whose bases will be the inputs.
    """

    def remove(graph: torch.fx.Graph) -> None:
        calls = {call: dict(call.kwargs) for call in graph.find_nodes(op="call_function", target=_changes_bases)}
        original(graph)
        for call, given in calls.items():
            bases = {_storage(base) for base in call.kwargs["_all_bases"]}
            for name, read in call.kwargs.items():
                if read is not given[name] and _storage(read) in bases - {None}:
                    call.update_kwarg(name, _copied(graph, read, call))
        written: dict[int | None, torch.fx.Node] = {}
        for copy in graph.find_nodes(op="call_function", target=_copy_):
            target, source = copy.args[:2]
            write = written.get(_storage(source))
            if write is not None and source < write and _is_view_of_an_input(source):
                copy.update_arg(1, _copied(graph, source, write))
            if _storage(target) is not None:
                written.setdefault(_storage(target), copy)

    return remove


def _storage(node: Any) -> int | None:
    """The memory of a node; None of what is no node, or has none that is known."""
    return get_node_storage(node) if isinstance(node, torch.fx.Node) else None


def _is_view_of_an_input(node: torch.fx.Node) -> bool:
    """Whether it is an input or a view of one."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        (node,) = node.all_input_nodes[:1]
    return node.op == "placeholder"


def _copied(graph: torch.fx.Graph, source: torch.fx.Node, write: torch.fx.Node) -> torch.fx.Node:
    """A copy of an input or of a view of it, made before the write."""
    with graph.inserting_before(write):
        copied = graph.call_function(torch.ops.aten.clone.default, (source,))
    value: FakeTensor = source.meta["val"]
    with value.fake_mode:
        copied.meta = {**source.meta, "val": value.clone()}
    return copied


_LOOPS: Final = (
    Exchange(lowering, "mutate_to", _source_of_its_own),
    Exchange(lowering, "index_put_impl_", _values_of_their_own),
    Exchange(GraphLowering, "mark_buffer_mutated", _readers_of_views),
    Exchange(Scheduler, "fusable_weak_dep", _recognising),
)
_SOURCES: Final = Exchange(post_grad, "remove_noop_ops", _sources_first)


def read_before_overwritten() -> AbstractContextManager[None]:
    """While Inductor lowers a graph: what a program reads of an input is what it held before it was written to."""
    return NEEDED.exchanging(*_LOOPS, _SOURCES)


def sources_kept() -> AbstractContextManager[None]:
    """The same for Inductor's passes on graphs that are not partitioned yet."""
    return NEEDED.exchanging(_SOURCES)
