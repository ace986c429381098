"""Attention becomes the fused kernel that is best for what it means, in whatever spelling.

The graph is traced to ATen operators (`trace`), every softmax over keys between two products is read as a function of
batch, head, query and key (`match`), and the best fused form that the device has for that function takes its place
(`targets`). A call of `scaled_dot_product_attention` is read in the same way (`calls`), and stays as it is where
nothing better is found. What is not understood, or would not be faster, is left alone and reported with the node at
which reading ended.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Final

from torch.fx import GraphModule, Node

from omnicomp._torch.fx import erase_unused
from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.options.dtype_policy import DtypePolicy
from omnicomp.passes.attention.calls import calls, read_call
from omnicomp.passes.attention.candidates import candidates, unread
from omnicomp.passes.attention.combined import distribute
from omnicomp.passes.attention.encoder_layers import why_called, written_out
from omnicomp.passes.attention.flex_calls import flex_calls, read_flex_call
from omnicomp.passes.attention.in_parts import gather_parts
from omnicomp.passes.attention.match import check_score, match
from omnicomp.passes.attention.multi_head import (
    makes_weights,
    may_drop_weights,
    multi_heads,
    read_mask_of,
    without_mask,
    without_weights,
)
from omnicomp.passes.attention.nodes import is_encoder_layer, is_multi_head, is_pure, kind, weighs_values
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.replace import check_unused, replace
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import MatchEnded, Site
from omnicomp.passes.attention.targets import as_called, choose
from omnicomp.passes.attention.timings import Budget
from omnicomp.passes.attention.trace import Op, Trace, trace
from omnicomp.passes.attention.trial import Trial
from omnicomp.passes.base import PassContext
from omnicomp.timeline import Reason

_DERIVATIVES: Final = frozenset(("_grad_increment_nesting", "_jvp_increment_nesting"))
_BATCHED: Final = frozenset(("_vmap_increment_nesting",))


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Fuses the attention of a graph."""

    name: str  # of the pass
    # The policy that lowers the fused operators afterwards; which kernel is the best depends on it.
    dtype_policy: DtypePolicy
    eager_random: bool  # whether dropout has to draw the random numbers that eager draws; then it is not fused
    seconds: float  # that a graph may spend on timing candidates; 0: kernels are chosen by rule
    empty_row_gradients: bool  # whether rows without a key pass gradients on wherever eager's do

    def fuse_all(self, module: GraphModule, context: PassContext) -> bool:
        """Rewrite every site that is understood and profitable, and report the others; whether any was."""
        trials = self._written(module, context)
        session = Session(
            module,
            self._trace(module, context),
            Reader(),
            context,
            self.dtype_policy,
            self.eager_random,
            self.empty_row_gradients,
        )
        # The graphs inside a graph have one budget.
        session.budget = context.memo.setdefault("attention_budget", Budget(self.seconds))
        differentiated, batched = _inside(module, _DERIVATIVES), _inside(module, _BATCHED)
        modified = False
        for softmax, product in list(candidates(session.trace, module.graph)):
            if is_multi_head(softmax.node):
                continue  # what is within is the function's own
            try:
                if softmax.node in differentiated:
                    raise _inside_derivative(softmax.node)
                self._fuse(softmax, product, session)
                modified = True
            except MatchEnded as end:
                end = _inside_vmap(softmax.node, end) if softmax.node in batched - differentiated else end
                context.near_miss(self.name, "attention", softmax.node, self._reason(end))
        for op in list(calls(session.trace, module.graph)):
            read = functools.partial(read_call, op, session.trace, session.reader)
            modified |= self._better(op, read, session, op.node in differentiated)
        for op in list(flex_calls(session.trace, module.graph)):
            read = functools.partial(read_flex_call, op, module, session.trace, session.reader)
            modified |= self._better(op, read, session, op.node in differentiated)
        for softmax, end in unread(session.trace, module.graph):
            context.near_miss(self.name, "attention", softmax.node, self._reason(end))
        for node in filter(weighs_values, module.graph.nodes):
            context.near_miss(self.name, "attention", node, self._reason(_no_softmax(node)))
        modified |= self._multi_heads(session, differentiated)
        session.withdraw_unused()
        for each in reversed(trials):  # what one of them reads may be another one's
            modified |= each.settle()
        for node in filter(is_encoder_layer, module.graph.nodes):
            detail = why_called(node) or "its attention is not fused"
            context.rewrite(self.name, "attention", node, target=kind(node), detail=detail, kept=True)
        if modified:
            # Parts of masks that were hoisted for a site, and read by none in the end.
            erase_unused(module.graph, is_pure)
        return modified

    def _multi_heads(self, session: Session, differentiated: set[Node]) -> bool:
        modified, context = False, session.context
        for node in multi_heads(session.module.graph):
            settled = context.speculate and node not in differentiated and not self.eager_random
            known = list(context.assumptions)
            masking, unpadded = read_mask_of(node, session, settled=settled and may_drop_weights(node))
            modified |= bool(unpadded)
            detail = ""
            try:
                if makes_weights(node):
                    if node in differentiated:
                        raise _inside_derivative(node)
                    detail = without_weights(node, masking)
                elif masking is not None and node not in differentiated and not self.eager_random:
                    detail = without_mask(node, masking)
            except MatchEnded as end:
                context.near_miss(self.name, "attention", node, self._reason(end))
                if not unpadded:
                    context.assumptions = known
                continue
            modified |= bool(detail)
            detail = "; ".join(filter(None, (unpadded, detail)))
            told = detail or (f"mask ({masking.name})" if masking is not None else "")
            target = "multi_head_attention_forward"
            context.rewrite(self.name, "attention", node, target=target, detail=told, kept=not detail)
        return modified

    def _written(self, module: GraphModule, context: PassContext) -> list[Trial]:
        """Write layers out, parts of scores as one and combined weights apart, before the graph is traced with it."""
        root = context.root or module
        if "attention_trials" not in context.memo or context.root is None:
            context.memo["attention_trials"] = [
                *written_out(root.graph),
                *gather_parts(root.graph),
                *distribute(root.graph),
            ]
        return context.memo["attention_trials"] if module is root else []

    def _trace(self, module: GraphModule, context: PassContext) -> Trace:
        root = context.root
        if root is None:
            return trace(module)
        if "attention" not in context.memo:
            context.memo["attention"] = trace(root)
        found: Trace = context.memo["attention"]
        # A region that is called from several places has no single meaning for its inputs.
        return found if any(node.graph is module.graph for node in found.order) else trace(module)

    def _fuse(self, softmax: Op, product: Op, session: Session) -> None:
        site = match(softmax, product, session.trace, session.reader)
        check_unused(site)
        check_score(site, session.trace)
        chosen = choose(site, session)
        replace(site, chosen.node, session.trace)
        session.context.rewrite(
            self.name, "attention", chosen.node, target=chosen.target, detail=chosen.detail, timed=chosen.timed
        )

    def _better(self, op: Op, read: Callable[[], Site], session: Session, differentiated: bool) -> bool:
        """Better a call, or record that it stays as it is."""
        context, node, site = session.context, op.node, None
        try:
            if session.kernels_chosen:
                raise MatchEnded(node, "the program chooses its kernel by sdpa_kernel", needed="torch's own choice")
            site = read()
            if differentiated:
                raise _inside_derivative(node)
            chosen = choose(site, session)
        except MatchEnded as end:
            detail = str(end) if site is None else as_called(site, session)
            timed = session.timed.get(node)
            context.rewrite(self.name, "attention", node, target=op.name, detail=detail, kept=True, timed=timed)
            return False
        replace(site, chosen.node, session.trace)
        context.rewrite(
            self.name, "attention", chosen.node, target=chosen.target, detail=chosen.detail, timed=chosen.timed
        )
        return True

    def _reason(self, end: MatchEnded) -> Reason:
        return Reason(
            code=end.code,
            sentence=str(end),
            by=self.name,
            observed=end.observed,
            needed=end.needed,
            node=f"{end.node.name} ({op_name(end.node)})",
            source=source_line(end.node),
            lever=end.lever,
        )


def _inside(module: GraphModule, transforms: frozenset[str]) -> set[Node]:
    """The nodes within transforms of torch.func, such as those whose gradients are part of the graph."""
    entered: list[str] = []
    found: set[Node] = set()
    for node in module.graph.nodes:
        name = op_name(node).rpartition(".")[2] if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            entered.append(name)
        elif entered and name.endswith("_decrement_nesting"):
            entered.pop()
        if not transforms.isdisjoint(entered):
            found.add(node)
    return found


def _no_softmax(node: Node) -> MatchEnded:
    return MatchEnded(
        node,
        f"the weights are the {kind(node).rstrip('_')} of the scores, and no softmax over keys as in fused kernels",
        needed="a softmax over the keys",
        lever="write torch.softmax(scores, -1) @ v, if the model may be another one",
    )


def _inside_vmap(softmax: Node, end: MatchEnded) -> MatchEnded:
    return MatchEnded(
        softmax,
        "the attention is inside torch.vmap, whose operators do not show the dimension that they are repeated over",
        observed=str(end),
        needed="batches as dimensions of queries, keys and values",
        lever="write it for the whole batch without vmap: @ and softmax take further dimensions in front",
    )


def _inside_derivative(softmax: Node) -> MatchEnded:
    return MatchEnded(
        softmax,
        "the graph takes a derivative of the attention, and a fused kernel has no second one, none in forward mode, "
        "and gradients of another layout",
        observed="inside torch.func.grad, vjp, jvp or another transform made of them",
        needed="outside of them",
        lever="call backward on the compiled function's result instead",
        code="not_equal",
    )
