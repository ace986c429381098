"""The forms that the values of a region have: casts where they are used, and what is proved of their range."""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.legal import checks
from omnicomp.passes.legal.decisions import Decisions
from omnicomp.passes.legal.dtypes import INTEGERS, Legal, largest, loses_range
from omnicomp.passes.legal.fakes import CAST, dtypes, leaves, literals, storages, written_storages
from omnicomp.passes.legal.operators import MOVES, writes_to
from omnicomp.passes.legal.ranges import Ranges, beyond, constant

__all__ = ["Values"]


class Values:
    """The values of one region while it is rewritten.

    Args:
        module: the region.
        legal: what the device has.
        decisions: where they go.

    Attributes:
        modified: whether anything was changed.
        expected: the dtypes that the program has at each node.
        ranges: what is proved of integers.
        written: storages that the region writes to.
    """

    def __init__(self, module: GraphModule, legal: Legal, decisions: Decisions) -> None:
        self.module, self.graph = module, module.graph
        self.legal, self.decisions = legal, decisions
        self.modified = False
        self.expected: dict[Node, Any] = {node: dtypes(node) for node in self.graph.nodes}
        self.ranges = Ranges()
        self.written = {key for node in self.graph.nodes for key in written_storages(node)}
        self._training = decisions.context.training
        given = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        self._outside = self.written & {key for node in given for key in storages(node)}
        self._casts: dict[tuple[Node, torch.dtype, bool], Node] = {}

    def at_once(self, node: Node) -> bool:
        """Whether a value that is only stored is cast once for all its uses, views among them.

        So in training, where autograd adds up the gradients of several uses, which is to happen in the dtype that is
        computed in. Not where an input is written to: a view of a copy would not see that. What the graph made itself
        is cast when it is made, and written to afterwards.
        """
        known = storages(node).union(*map(storages, node.all_input_nodes))
        return self._training and self._outside.isdisjoint(known)

    def use(self, value: Node, user: Node) -> Node:
        """The value in a dtype to compute in."""
        dtype = fake_value(value).dtype
        return value if self.legal.computes(dtype) else self.cast(value, self.nearest(value, dtype), user)

    def cast(self, value: Node, target: torch.dtype, user: Node) -> Node:
        """A cast before `user`, shared with later ones unless the value is written to in between."""
        fixed = self.written.isdisjoint(storages(value))
        # A cast made under no_grad carries no gradient for a user outside; the other way round it does no harm.
        for grad in (True,) if torch.is_grad_enabled() else (True, False):
            if fixed and (value, target, grad) in self._casts:
                return self._casts[value, target, grad]
        source = fake_value(value).dtype
        if not self.legal.stores(source):
            self.decisions.chosen(value, source, target, stored=False)
            if source in INTEGERS and not self.ranges.fits(value, largest(target)):
                checked = not self.decisions.strict and checks.insert(value, target, user, self.legal)
                what = "each call checks them" if checked else "values beyond wrap around, and are not checked"
                self.decisions.may_lose(value, source, target, f"its values are not known; {what}")
                self.ranges.set(value, largest(target))
            elif source.is_floating_point and loses_range(source, target):
                self._check_constant(value, source, target)
        cast = self.insert(user, CAST, (value, target))
        self.follow(cast, value)
        if fixed:
            self._casts[value, target, torch.is_grad_enabled()] = cast
        return cast

    def _check_constant(self, value: Node, source: torch.dtype, target: torch.dtype) -> None:
        known = constant(value)
        if known is None and self.decisions.strict:
            self.decisions.may_lose(value, source, target, "its values are not known")
        elif known is not None and known > largest(target):
            self.decisions.may_lose(value, source, target, f"its value {known} becomes infinite")

    def check_range(self, node: Node) -> None:
        """Prove, check at run time, or tell that an integer result may not fit; likewise a float's in `error`."""
        expected = self.expected[node]
        written = writes_to(node)
        if written is not None:
            self.ranges.forget(written)
        for dtype in {leaf.dtype for leaf in leaves(node)}:
            target = self.legal.nearest(dtype)
            if target is None or self.legal.computes(dtype) or not loses_range(dtype, target):
                continue
            if dtype not in INTEGERS:
                if self.decisions.strict and kind(node) not in MOVES:
                    self.decisions.may_lose(node, dtype, target, "its values are not known")
                continue
            numbers = beyond([v for v in literals(node) if type(v) is int])
            if numbers > largest(target) and isinstance(expected, torch.dtype):
                raise self.decisions.error(node, dtype, f"the number {numbers} does not fit {target}")
            if self.ranges.fits(node, largest(target)) or kind(node) in MOVES | {"getitem"}:
                continue
            if not self.decisions.strict and checks.insert_arithmetic(node, target, self.legal, self.use):
                self.decisions.may_lose(node, dtype, target, "its values are not known; each call checks them")
                self.ranges.set(node, largest(target))
                self.modified = True
            else:
                self.decisions.may_lose(node, dtype, target, "values beyond wrap around, and are not checked")

    def record(self, node: Node) -> None:
        """Note for each missing dtype of the node what takes its place."""
        operands = [self.expected[operand] for operand in node.all_input_nodes]
        for dtype in dict.fromkeys(tree_leaves((self.expected[node], operands))):
            if isinstance(dtype, torch.dtype) and not self.legal.computes(dtype):
                target = self.nearest(node, dtype)
                self.decisions.chosen(node, dtype, target, stored=self.legal.stores(dtype))

    def missing_of(self, node: Node) -> torch.dtype:
        """A dtype that the program has at the node, and the device does not compute in."""
        operands = [self.expected.get(operand) for operand in node.all_input_nodes]
        found = tree_leaves((self.expected[node], operands))
        lacked = [d for d in found if isinstance(d, torch.dtype) and not self.legal.computes(d)]
        return lacked[0] if lacked else torch.get_default_dtype()

    def nearest(self, node: Node, dtype: torch.dtype) -> torch.dtype:
        """What takes the place of a dtype.

        Raises:
            LegaliseError: the device has nothing that could.
        """
        target = self.legal.nearest(dtype)
        if target is None:
            raise self.decisions.error(node, dtype, "it has none of its kind that could take its place")
        return target

    def insert(self, anchor: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """Insert a call before `anchor`."""
        node = insert_call(anchor, target, args, kwargs)
        self.expected[node] = dtypes(node)
        self.modified = True
        return node

    def follow(self, cast: Node, value: Node) -> None:
        """`cast` stands for `value` from here on."""
        self.expected[cast] = self.expected[value]
        self.ranges.set(cast, self.ranges.of(value))
