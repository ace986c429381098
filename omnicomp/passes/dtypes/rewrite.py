"""The rewrite: an operator computes in another dtype, and what it gives is cast back where the old dtype is wanted.

Such an operator leaves two values: what it computed, and that cast back, which takes the place of the old one. Later
operators that compute in the same dtype read the first, also through views of it, all others the second; one that
nobody reads goes away. A value is therefore never cast back and forth between two of them.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp.analysis.nodes import evaluate, fake_value, insert_call
from omnicomp.options.dtype_policy import short
from omnicomp.passes.dtypes.analysis import Scopes, changed_storages, storages
from omnicomp.passes.dtypes.operators import ATTENTION, VIEWS, is_cast, kind, source, tensors
from omnicomp.weights.cast_copies import CAST

# Devices whose attention kernels take a float32 mask with half-precision operands: a bias in it keeps all its bits.
# Not CUDA: cuDNN's kernel takes one and reads it wrongly (seen with torch 2.11 on Hopper).
WIDE_MASKS: Final = frozenset(("cpu",))

Compute = Callable[[Node, Any, Any, torch.dtype], Node]
"""Inserts the computation of an operator before it: given the node, its arguments and keywords, and their dtype."""


class Rewriting:
    """The state of one region's rewrite: which values exist in which dtype, and what must not be shared."""

    def __init__(self, module: GraphModule, device: str) -> None:
        self.graph = module.graph
        self.device = device
        self.scopes = Scopes(module)
        self.results: dict[Node, Node] = {}  # a value -> what was computed, or a view of that, before it was cast back
        self.casts: dict[tuple[Node, bool, torch.dtype], Node] = {}  # value, is it a mask, dtype -> its cast
        self.current = 0  # the scope that the casts are for
        self.changed = changed_storages(module)
        self.written: set[Node] = set()
        self.orphans: dict[Node, None] = {}  # nodes that may have lost their users

    def recast(self, node: Node, dtype: torch.dtype, compute: Compute | None = None) -> None:
        """Replace `node` by the same operator on operands in `dtype`, and casts back to the dtypes of its results.

        Args:
            node: an operator that makes new tensors; if it makes several, only `getitem` may read them.
            dtype: of its floating-point operands.
            compute: inserts what computes it before the node, given the node and its arguments in `dtype`; None for the
                operator itself.
        """
        if self.scopes.number[node] != self.current:
            # A cast made under no_grad carries no gradient for a user outside, and the other way round.
            self.current = self.scopes.number[node]
            self.casts.clear()
        mask = _mask(node)
        args, kwargs = map_arg(
            (node.args, dict(node.kwargs)), lambda value: self._in_dtype(value, dtype, node, value is mask)
        )
        make = compute or self.copy
        computed = make(node, args, kwargs, dtype)
        self.orphans.update(dict.fromkeys(node.all_input_nodes))
        if isinstance(fake_value(node), torch.Tensor):
            self._cast_back(node, computed)
        else:
            for item in list(node.users):
                self._cast_back(item, self.copy(item, (computed, *item.args[1:]), {}, dtype))
                self.graph.erase_node(item)
        self.graph.erase_node(node)

    def read_before_casts(self) -> None:
        """Let the user's own casts to the dtype that a value was computed in end there: they give the same bits.

        One of them for each value: a second is a tensor of its own, which the user may write to.
        """
        taken: set[Node] = set()
        for node in list(self.graph.nodes):
            value, dtype = node.args[0] if node.args else None, self._ends_in(node)
            root = value
            while isinstance(root, Node) and root not in self.results:
                root = source(root)
            if dtype is None or not isinstance(value, Node) or not isinstance(root, Node):
                continue
            made = self.results[root]
            before = None if made in taken else self._result(value, dtype)
            if before is not None:
                taken.add(made)
                self.orphans[value] = None
                node.replace_all_uses_with(before)
                self.graph.erase_node(node)

    def _ends_in(self, node: Node) -> torch.dtype | None:
        """The dtype of a cast of the user's that makes nothing else of its operand, and is not written to."""
        if not is_cast(node) or node.target is CAST or self._is_changed(node):
            return None
        after, before = tensors(node), tensors(node.args[0]) if isinstance(node.args[0], Node) else []
        if len(after) != 1 or len(before) != 1 or after[0].device != before[0].device:
            return None
        return after[0].dtype if node.kwargs.keys() <= {"dtype", "non_blocking"} else None

    def clean(self) -> None:
        """Erase the nodes that lost all users, and what only they used."""
        while self.orphans:
            node, _ = self.orphans.popitem()
            if not node.users and (node in self.results or node.target is CAST or source(node) is not None):
                self.orphans.update(dict.fromkeys(node.all_input_nodes))
                self.orphans.pop(node, None)
                self.graph.erase_node(node)

    def _cast_back(self, node: Node, computed: Node) -> None:
        """Put what was computed, in the old dtype, in the place of the tensor `node`."""
        value: torch.Tensor = fake_value(node)
        if fake_value(computed).dtype is value.dtype:
            node.replace_all_uses_with(computed)
        else:
            back = insert_call(node, CAST, (computed, value.dtype))
            if self._is_changed(node):
                self.written.add(back)
            else:
                self.results[back] = computed
            self.orphans[back] = None
            self.scopes.number[back] = self.current
            node.replace_all_uses_with(back)

    def _in_dtype(self, value: Node, dtype: torch.dtype, user: Node, mask: bool) -> Node:
        """A floating-point operand of `user` in `dtype`; other operands as they are."""
        fake = fake_value(value)
        if not (isinstance(fake, torch.Tensor) and fake.is_floating_point() and fake.dtype is not dtype):
            return value
        if mask and self.device in WIDE_MASKS and fake.dtype is torch.float32:
            return value
        result = self._result(value, dtype)
        if result is not None:
            return result
        if self._is_changed(value):
            # What was cast for one user may be stale for the next.
            return self._cast(value, dtype, user, mask)
        known = self.casts.get((value, mask, dtype))
        if known is not None:
            return known
        before = source(value, VIEWS)
        if before is not None and not self._is_changed(before) and self.scopes.number.get(value) == self.current:
            operand = self._in_dtype(before, dtype, user, mask)
            low = self.copy(value, (operand, *value.args[1:]), value.kwargs, dtype, before=user)
            self.orphans[value] = None
        else:
            # Before the first user, which dominates the later ones; at the graph's start, all weights of a model would
            # be held in two dtypes at once.
            low = self._cast(value, dtype, user, mask)
        self.casts[value, mask, dtype] = low
        return low

    def _result(self, value: Node, dtype: torch.dtype) -> Node | None:
        """The value in `dtype` without a cast: it was computed in it, or is an exact function of what was."""
        if value in self.results:
            computed = self.results[value]
            return computed if {value.dtype for value in tensors(computed)} == {dtype} else None
        if self._is_changed(value):
            return None
        if is_cast(value) and self.scopes.number.get(value) == self.current:
            # A cast up loses nothing, so that casting down again gives what was there before.
            before = value.args[0] if value.args else None
            if isinstance(before, Node) and _is_wider(tensors(value), tensors(before)):
                return before if fake_value(before).dtype is dtype and not self._is_changed(before) else None
        before = source(value)
        if before is None:
            return None
        computed = self._result(before, dtype)
        if computed is None:
            return None
        low = self.copy(value, (computed, *value.args[1:]), value.kwargs, dtype)
        self.results[value] = low
        self.orphans[value] = None
        return low

    def _cast(self, value: Node, dtype: torch.dtype, user: Node, mask: bool) -> Node:
        if mask and fake_value(value).dtype is torch.float32:
            # float32's smallest number would become -inf, and a row of nothing else NaN or zero instead of uniform. A
            # real -inf stays one.
            clamped = insert_call(user, torch.ops.aten.clamp.default, (value, torch.finfo(dtype).min))
            infinite = insert_call(user, torch.ops.aten.eq.Scalar, (value, -math.inf))
            value = insert_call(user, torch.ops.aten.masked_fill.Scalar, (clamped, infinite, -math.inf))
        return insert_call(user, CAST, (value, dtype))

    def copy(self, node: Node, args: Any, kwargs: Any, dtype: torch.dtype, *, before: Node | None = None) -> Node:
        """The call of `node` with other arguments, its fake value computed from theirs, before `before` or itself."""
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        value = evaluate(target, args, kwargs)
        with self.graph.inserting_before(before or node):
            copy = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_{short(dtype)}")
        copy.meta = {**node.meta, "example_value": value}
        return copy

    def _is_changed(self, node: Node) -> bool:
        """Whether the graph changes the value, or a view of it, in place."""
        return node in self.written or not self.changed.isdisjoint(storages(node))


def _mask(node: Node) -> Any:
    if kind(node) != ATTENTION:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _is_wider(after: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    """Whether one tensor was cast to a dtype that holds all of its values."""
    if len(after) != 1 or len(before) != 1 or after[0].device != before[0].device:
        return False
    return torch.promote_types(after[0].dtype, before[0].dtype) is after[0].dtype and before[0].is_floating_point()
