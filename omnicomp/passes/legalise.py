"""Which nodes of a graph the device can't run as they are."""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from omnicomp._torch.dtypes import ENTER
from omnicomp.analysis.certify import DTYPES, NO_OVERFLOW, ROUNDING, Assumption
from omnicomp.analysis.nodes import op_name
from omnicomp.devices import Device
from omnicomp.options.policy import Policy
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.base import Pass, PassContext
from omnicomp.passes.legal.dtypes import Legal
from omnicomp.passes.legal.fakes import CAST, CASTS, FILLS, MARK, gathers, leaves, moves


def lacks_autocast(device: Device, legal: Legal) -> bool:
    """Whether autocast is on, to a dtype that the device lacks."""
    return torch.is_autocast_enabled(device.type) and not legal.computes(torch.get_autocast_dtype(device.type))


@contextlib.contextmanager
def without_missing_autocast(device: Device, legal: Legal) -> Generator[None]:
    """Autocast to a dtype that the device has, while a graph is traced under autocast to one that it lacks.

    The graph itself switches autocast off, but the operators of its derivative are traced outside of that. It must not
    be off altogether here: AOTAutograd switches off in each call what was on while it traced.
    """
    dtype = torch.get_autocast_dtype(device.type)
    nearest = legal.nearest(dtype)
    if nearest is None or not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.set_autocast_dtype(device.type, nearest)
    try:
        yield
    finally:
        torch.set_autocast_dtype(device.type, dtype)


def lacking(node: Node, legal: Legal, *, training: bool) -> bool:
    """Whether a node computes in, or is, something that the device lacks; its casts of other nodes are none."""
    if MARK in node.meta or node.op not in ("call_function", "call_method"):
        return False
    if node.target is CAST or node.target is torch.Tensor.copy_ or node.target == "copy_":
        return not all(legal.stores(leaf.dtype) for leaf in leaves(node)) and "copy_" not in op_name(node)
    if node.target is ENTER and node.args[2]:
        dtype: Any = node.args[1] or torch.get_autocast_dtype(str(node.args[0]))
        return not legal.computes(dtype)
    stored = moves(node) or kind(node) in FILLS or kind(node) in CASTS or kind(node) == "getitem"
    known = legal.stores if stored and not (training and gathers(node)) else legal.computes
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        known = legal.stores
    operands = [leaf for operand in node.all_input_nodes if MARK not in operand.meta for leaf in leaves(operand)]
    return not all(known(leaf.dtype) for leaf in (*leaves(node), *operands))


def missing(node: Node, legal: Legal) -> torch.dtype:
    """A dtype of a node that is `lacking`."""
    used = [leaf.dtype for value in (node, *node.all_input_nodes) for leaf in leaves(value)]
    return next((dtype for dtype in used if not legal.computes(dtype)), torch.get_default_dtype())


def in_transform(module: GraphModule) -> Node | None:
    """The first node of a region that enters a transform of torch.func, whose values are no plain tensors."""
    return next((n for n in module.graph.nodes if op_name(n).endswith("_increment_nesting")), None)


@dataclasses.dataclass(frozen=True)
class Legalise(Pass):
    """Moves operators to dtypes that the device has."""

    name: ClassVar[str] = "legalise"
    mode: str = "warn"  # `warn` says what moved; `error` raises if a range could be lost; `off` moves nothing
    log: bool = True  # whether to log what moved

    def claims(self, context: PassContext) -> tuple[Assumption, ...]:
        """Another rounding, and the range of the dtype that the device has, also in what other operators read."""
        return tuple(map(Assumption, (ROUNDING, NO_OVERFLOW, DTYPES)))

    def of(self, policy: Policy) -> "Legalise":
        """This pass with the options that the user's policy gives it."""
        return Legalise(mode=policy.legalise, log=policy.summary)

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the device says what it lacks, and the graph uses some of it."""
        if self.mode == "off":
            return False
        legal = Legal.of(context.device.capabilities())
        if legal is None:
            return False
        return lacks_autocast(context.device, legal) or any(
            lacking(node, legal, training=context.training) for node in module.graph.nodes
        )

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite one region.

        Raises:
            LegaliseError: with the mode `error`, if range would be lost; always, if no dtype of the device would do.
        """
        from omnicomp.passes.legal.decisions import Decisions

        legal = Legal.of(context.device.capabilities())
        assert legal is not None  # or it would not apply
        if lacks_autocast(context.device, legal):
            context.while_traced(lambda: without_missing_autocast(context.device, legal))
        decisions = Decisions(self.name, context, strict=self.mode == "error", log=self.log)
        entered = in_transform(module)
        if entered is not None:
            first = next((node for node in module.graph.nodes if lacking(node, legal, training=context.training)), None)
            if first is None:
                return PassResult(module, False)
            why = f"is inside the transform of torch.func at {entered.name} ({op_name(entered)})"
            decisions.refused(first, missing(first, legal), why)
            decisions.report()
            return PassResult(module, False)
        from omnicomp.passes.legal.rewrite import Rewriting

        root = context.root is None or context.root is module
        modified = Rewriting(module, legal, decisions, root=root).run()
        decisions.report()
        return PassResult(module, modified)
