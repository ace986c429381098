"""Hand-written attention becomes a fused kernel, by what it means and in whatever spelling.

The graph is traced to ATen operators (`attention.trace`), every softmax over keys between two products is read as a
function of batch, head, query and key (`attention.match`), and the best fused form that the device has for that
function takes its place (`attention.targets`). What is not understood, or would not be faster, is left alone and
reported with the node at which reading ended.
"""

import dataclasses
from typing import ClassVar, Final

from torch.fx import GraphModule, Node

from omnicomp._torch.inductor.compile_fx import fallback_random
from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy
from omnicomp.options.policy import Policy
from omnicomp.passes.attention.candidates import candidates, unread
from omnicomp.passes.attention.match import match
from omnicomp.passes.attention.multi_head import is_multi_head, multi_heads, without_weights
from omnicomp.passes.attention.nodes import is_pure, kind
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.replace import check_unused, replace
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import MatchEnded
from omnicomp.passes.attention.targets import choose
from omnicomp.passes.attention.trace import Op, Trace, trace
from omnicomp.passes.base import Pass, PassContext, PassResult
from omnicomp.timeline import Reason

__all__ = ["AttentionFusion"]

_SOFTMAX: Final = frozenset(("softmax", "_softmax", "_safe_softmax", "log_softmax", "exp", "exp_"))
_DERIVATIVES: Final = frozenset(("_grad_increment_nesting", "_jvp_increment_nesting"))


@dataclasses.dataclass(frozen=True)
class AttentionFusion(Pass):
    """Fuses hand-written attention.

    Attributes:
        dtype_policy: the policy that lowers the fused operators afterwards; which kernel is the best depends on it.
        eager_random: whether dropout has to draw the random numbers that eager draws; then it is not fused.
    """

    name: ClassVar[str] = "attention_fusion"
    dtype_policy: DtypePolicy = PRESETS["keep"]
    eager_random: bool = False

    def of(self, policy: Policy) -> "AttentionFusion":
        """This pass with the options that the user's policy gives it."""
        return AttentionFusion(dtype_policy=policy.dtype_policy, eager_random=fallback_random(policy.inductor))

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has a softmax, maybe one that is written out or inside another function."""
        return any(kind(node) in _SOFTMAX or is_multi_head(node) for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite every site that is understood and profitable; report the others."""
        session = Session(module, self._trace(module, context), Reader(), context, self.dtype_policy, self.eager_random)
        differentiated = _differentiated(module)
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
                context.near_miss(self.name, "attention", softmax.node, self._reason(end))
        for softmax, end in unread(session.trace, module.graph):
            context.near_miss(self.name, "attention", softmax.node, self._reason(end))
        modified |= self._without_weights(module, differentiated, context)
        if modified:
            # Parts of masks that were hoisted for a site, and read by none in the end.
            module.graph.eliminate_dead_code(is_impure_node=lambda node: not is_pure(node))
        return PassResult(module, modified)

    def _without_weights(self, module: GraphModule, differentiated: set[Node], context: PassContext) -> bool:
        modified = False
        for node in multi_heads(module.graph):
            try:
                if node in differentiated:
                    raise _inside_derivative(node)
                detail = without_weights(node)
            except MatchEnded as end:
                context.near_miss(self.name, "attention", node, self._reason(end))
            else:
                modified = True
                context.rewrite(self.name, "attention", node, target="multi_head_attention_forward", detail=detail)
        return modified

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
        chosen = choose(site, session)
        replace(site, chosen.node, session.trace)
        session.context.rewrite(self.name, "attention", chosen.node, target=chosen.target, detail=chosen.detail)

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


def _differentiated(module: GraphModule) -> set[Node]:
    """The nodes within the transforms of torch.func that take derivatives: their gradients are part of the graph."""
    entered: list[str] = []
    found: set[Node] = set()
    for node in module.graph.nodes:
        name = op_name(node).rpartition(".")[2] if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            entered.append(name)
        elif entered and name.endswith("_decrement_nesting"):
            entered.pop()
        if not _DERIVATIVES.isdisjoint(entered):
            found.add(node)
    return found


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
