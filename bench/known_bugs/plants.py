"""Faults of former versions, put back: each changes Inductor's graph as the fault of then did.

A fault is planted into the graph behind Inductor's own passes, from which code is generated. Verification does not see
that graph: it compares with the one before.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

aten: Any = torch.ops.aten
convert: Any = torch.ops.prims.convert_element_type.default

Edit = Callable[[Graph], None]


class _Planted(CustomGraphPass):
    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, graph: Graph) -> None:
        self.edit(graph)
        graph.lint()

    def uuid(self) -> None:
        """No artefact of such a graph is kept."""


@contextlib.contextmanager
def _planted(edit: Edit) -> Iterator[None]:
    caches = {"fx_graph_cache": False, "post_grad_custom_post_pass": _Planted(edit)}
    with config.patch(caches), torch.compiler.config.patch(force_disable_caches=True):
        yield


def _calls(graph: Graph, *targets: Any) -> list[Node]:
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def _insert(before: Node, target: Any, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    made.meta["val"] = target(*values)
    return made


def _instead(node: Node, build: Callable[[Node], Node]) -> None:
    """Let the users of a node read what `build` makes of it."""
    users = list(node.users)
    made = build(node.next)
    for user in users:
        if user is not made:
            user.replace_input_with(node, made)


def _plant(edit: Edit) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return lambda: _planted(edit)


def read_after_write(target: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A node is computed from what its input is after the graph's last write."""

    def edit(graph: Graph) -> None:
        # The value that is written is computed from the old one, all else from the new.
        nodes = _calls(graph, target)
        for write in _calls(graph, aten.copy_.default):
            for node in nodes:
                for user in list(node.users):
                    if user.op == "output":
                        with graph.inserting_after(write):
                            late = graph.call_function(target, (write.args[1], *node.args[1:]))
                        late.meta.update(node.meta)
                        user.replace_input_with(node, late)

    return _plant(edit)


def _erase_writes(graph: Graph) -> None:
    for node in _calls(graph, aten.copy_.default):
        (target, *_) = node.args
        node.replace_all_uses_with(target)
        graph.erase_node(node)
    graph.eliminate_dead_code()


lost_write = _plant(_erase_writes)


def _halves_in_place(graph: Graph) -> None:
    """`a.copy_(a.flip(0))` element by element in one memory: the second half is that of the first."""
    for node in _calls(graph, aten.copy_.default):
        size = node.args[1].meta["val"].shape[0]
        first = _insert(node, aten.slice.Tensor, node.args[1], 0, 0, size // 2)
        mirrored = _insert(node, aten.flip.default, first, [0])
        with graph.inserting_before(node):
            both = graph.call_function(aten.cat.default, ([first, mirrored], 0))
        both.meta["val"] = node.args[1].meta["val"]
        node.args = (node.args[0], both)


copy_in_place_of_flip = _plant(_halves_in_place)


def _drop_factor(graph: Graph) -> None:
    for node in _calls(graph, aten.mul.Tensor, aten.div.Tensor):
        if not isinstance(node.args[1], Node):
            node.replace_all_uses_with(node.args[0])
            break


times_one = _plant(_drop_factor)


def retyped(target: Any, dtype: torch.dtype) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What an operator returns is cast to another dtype and back."""

    def edit(graph: Graph) -> None:
        for node in _calls(graph, target):
            own = node.meta["val"].dtype
            _instead(node, lambda at, n=node, d=own: _insert(at, convert, _insert(at, convert, n, dtype), d))

    return _plant(edit)


def wider(target: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Calls of an operator on uint8 are computed in int32; what is no uint8 again reads that."""

    def edit(graph: Graph) -> None:
        for node in _calls(graph, target):
            if node.meta["val"].dtype != torch.uint8:
                continue
            wide = [_insert(node, convert, arg, torch.int32) if isinstance(arg, Node) else arg for arg in node.args]
            made = _insert(node, target, *wide)
            narrow = _insert(node, convert, made, torch.uint8)
            for user in list(node.users):
                user.replace_input_with(node, narrow if user.op == "output" else made)

    return _plant(edit)


def _modulo(graph: Graph) -> None:
    for node in _calls(graph, aten.bitwise_left_shift.Tensor):
        node.args = (node.args[0], _insert(node, aten.bitwise_and.Scalar, node.args[1], 63))


shift_modulo = _plant(_modulo)


def zeroed(*targets: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """An operator returns zeros."""

    def edit(graph: Graph) -> None:
        for node in _calls(graph, *targets)[:1]:
            _instead(node, lambda at, n=node: _insert(at, aten.mul.Tensor, n, 0))

    return _plant(edit)


def _through_floats(graph: Graph) -> None:
    for node in _calls(graph, aten.mm.default):
        wide = [_insert(node, convert, arg, torch.float32) for arg in node.args]
        made = _insert(node, aten.mm.default, *wide)
        node.replace_all_uses_with(_insert(node, convert, made, torch.int32))


product_of_floats = _plant(_through_floats)


def _flush(graph: Graph) -> None:
    for node in _calls(graph, aten.mul.Tensor):

        def build(at: Node, n: Node = node) -> Node:
            small = _insert(at, aten.lt.Scalar, _insert(at, aten.abs.default, n), 2.0**-126)
            zero = _insert(at, aten.mul.Tensor, n, 0.0)
            return _insert(at, aten.where.self, small, zero, n)

        _instead(node, build)


denormals_flushed = _plant(_flush)


def nans_ignored(target: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A reduction takes the least number for a NaN."""

    def edit(graph: Graph) -> None:
        for node in _calls(graph, target):
            (value, *rest) = node.args
            number = _insert(node, aten.eq.Tensor, value, value)
            node.args = (_insert(node, aten.where.ScalarOther, number, value, -1e30), *rest)

    return _plant(edit)


def _clamp(graph: Graph) -> None:
    for node in _calls(graph, aten.maximum.default, aten.clamp_min.default):
        if isinstance(node.args[1], Node):
            greater = _insert(node, aten.gt.Tensor, node.args[0], node.args[1])
            made = _insert(node, aten.where.self, greater, node.args[0], node.args[1])
        else:
            greater = _insert(node, aten.gt.Scalar, node.args[0], node.args[1])
            made = _insert(node, aten.where.ScalarOther, greater, node.args[0], node.args[1])
        node.replace_all_uses_with(made)


nans_clamped = _plant(_clamp)


def _pad(graph: Graph) -> None:
    """The padding does not count."""
    for node in _calls(graph, aten.avg_pool2d.default):
        node.args = (*node.args[:5], False)


padding_counted = _plant(_pad)


def _sort(graph: Graph) -> None:
    for node in _calls(graph, aten.cat.default):
        parts: Any = node.args[0]
        order = {other: index for index, other in enumerate(graph.nodes)}
        node.args = (sorted(parts, key=lambda part: order[part]), *node.args[1:])


cat_in_order = _plant(_sort)
