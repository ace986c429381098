"""Nodes that are written another way for the pass to read, and as they were again if nothing of it was fused."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from omnicomp.passes.attention.nodes import is_shape_only, mutates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Old:
    """How a node was made that is gone, and where it was."""

    node: Node
    before: Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    meta: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> "Old":
        """Remember a node that is to go."""
        fields = {name: getattr(node, name) for name in ("op", "target", "args", "kwargs", "name")}
        return cls(node=node, before=node.prev, meta=dict(node.meta), **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What was written another way."""

    products: tuple[Node, ...]  # the new products of weights and values, or other nodes that are gone if it was fused
    new: tuple[Node, ...]  # all new nodes, in their order; the last one took the place of the last old one
    old: tuple[Old, ...]  # the nodes that are gone, in their order
    stands_for: Node | None = None  # the node that the last one took the place of, if that is another one

    def settle(self) -> bool:
        """Write it as it was, unless one of the products was fused, or another rewrite took a part of old or new.

        Returns:
            Whether it stays.
        """
        read = any(user not in self.new for node in self.new[:-1] for user in node.users if not node._erased)
        ours, needed = {old.node for old in self.old}, list[Node]()
        map_arg([(old.args, old.kwargs) for old in self.old], needed.append)
        lost = any(node._erased for node in needed if node not in ours)  # a fused attention took its place
        if read or lost or any(map(_is_unused, self.products)):
            return True
        graph, made = self.new[-1].graph, dict[Node, Node]()
        together = any(old.before._erased and old.before not in ours for old in self.old)
        for old in self.old:
            args, kwargs = (map_arg(each, lambda node: made.get(node, node)) for each in (old.args, old.kwargs))
            before = made.get(old.before, old.before)
            with graph.inserting_before(self.new[0]) if together else graph.inserting_after(before):
                node = graph.create_node(old.op, old.target, args, kwargs)
            node.name = old.name  # the graph itself would not give it twice
            node.meta.update(old.meta)
            made[old.node] = node
        self.new[-1].replace_all_uses_with(self.stands_for or made[self.old[-1].node])
        for node in reversed(self.new):
            graph.erase_node(node)
        return False


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes of a graph from one on, up to another one, which is left out."""
    while first is not last:
        yield first
        first = first.next


def _is_unused(node: Node) -> bool:
    """Whether a node is gone, or nothing that stays reads its elements."""
    seen, queue = {node}, [] if node._erased else [node]
    while queue:
        for user in queue.pop().users:
            if not is_shape_only(user) and user not in seen:
                if user.op == "output" or mutates(user):
                    return False
                seen.add(user)
                queue.append(user)
    return True
