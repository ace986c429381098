"""The option `dtype_policy`: each operator in the dtype that the policy gives it, everything else as it was written.

By default, lowered are linear layers, matrix products, convolutions and attention whose floating operands are all
float32. Softmax, norms, losses, reductions, pointwise arithmetic and residual streams stay in float32, and so do the
graph's outputs, whatever the graph mutates, parameters and their gradients. float64, half precision that is there
already, integers and complex numbers are left alone, and so is what runs under `torch.autocast`. Rules of the policy
name operators, modules and nodes that are to compute in another dtype than that.

A user should know that a result above 65504 becomes infinite in float16, and that small gradients vanish in it, as they
do under `torch.autocast`: train with a gradient scaler. On an accelerator, a row that a float attention mask masks
throughout with a finite number attends to everything in float16, as -65504 does not swallow the scores: use a boolean
mask.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from omnicomp.analysis.certify import FINITE_INPUTS, NO_OVERFLOW, ROUNDING, Assumption
from omnicomp.analysis.nodes import op_name
from omnicomp.options.dtype_policy import NAME, PRESETS, DtypePolicy, short
from omnicomp.options.policy import Policy
from omnicomp.passes.base import Pass, PassContext
from omnicomp.timeline import Option, Reason

if TYPE_CHECKING:
    from omnicomp.passes.dtypes.calibrate import Bound
    from omnicomp.passes.dtypes.rewrite import Compute, Rewriting
    from omnicomp.passes.dtypes.rules import Decision

_TOLD: Final = "told"
# How many roundings of the narrowest dtype a result may be off, where no bound is asked for.
_ROUNDINGS: Final = 8


@dataclasses.dataclass(frozen=True)
class DtypePass(Pass):
    """Runs operators in the dtypes of a policy."""

    name: ClassVar[str] = NAME
    policy: DtypePolicy = PRESETS["keep"]  # which dtype each operator computes in
    bound: "Bound | None" = None  # of the error of the outputs; None for none

    def claims(self, context: PassContext) -> tuple[Assumption, ...]:
        """Another rounding, which the option `dtype_error` may bound, and a smaller range in float16."""
        from omnicomp.passes.dtypes.fp8 import FLOAT8

        policy = self.policy
        dtypes = [dtype for dtype in (policy.compute, *policy.ops.values(), *policy.modules.values()) if dtype]
        dtypes += [FLOAT8] if policy.fp8 else [torch.bfloat16] if policy.auto else []
        roundings = _ROUNDINGS * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        bound = roundings if self.bound is None else self.bound.error
        return (Assumption(ROUNDING, detail=f"{bound:g}"), *map(Assumption, (NO_OVERFLOW, FINITE_INPUTS)))

    def of(self, policy: Policy) -> "DtypePass":
        """This pass with the options that the user's policy gives it."""
        if policy.dtype_error is None:
            return DtypePass(policy=policy.dtype_policy)
        from omnicomp.passes.dtypes.calibrate import Bound

        return DtypePass(policy=policy.dtype_policy, bound=Bound.of(policy, policy.dtype_error))

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the policy asks for dtypes and the graph has an operator that it names."""
        policy = self.policy
        if not policy.rewrites:
            return False
        if policy.auto:  # as if the device were fast, which may have to be measured
            policy = dataclasses.replace(policy, auto=False, compute=torch.bfloat16)
        return bool(_decided(module, policy, context))

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite the operators of one region."""
        from omnicomp.passes.dtypes.fp8 import in_fp8
        from omnicomp.passes.dtypes.resolve import resolve
        from omnicomp.passes.dtypes.rewrite import Rewriting

        policy, reason = resolve(self.policy, context.device, training=context.training)
        if reason is not None:
            _tell_option(context, self.policy, "keep", reason)
        candidates = dict(_decided(module, policy, context))
        if not candidates:
            return PassResult(module, False)
        if torch.is_autocast_enabled(context.device.type):
            context.near_miss(self.name, "dtype", next(iter(candidates)), _AUTOCAST)
            return PassResult(module, False)
        wide: Mapping[str, Reason] = {}
        if self.bound is not None:
            from omnicomp.passes.dtypes.calibrate import must_stay_wide

            wide = must_stay_wide(self, self.bound, module, context)
        rewriting = Rewriting(module, context.device.type)
        entered_at = rewriting.scopes.entered
        # All of it is asked before anything is rewritten, which makes casts that the user did not write.
        obstacles = {
            node: _entered(entered_at[node])
            if node in entered_at
            else _obstacle(node, decision, context) or wide.get(node.name)
            for node, decision in candidates.items()
        }
        told: set[object] = set()
        modified = False
        for node, decision in candidates.items():
            obstacle, entered = obstacles[node], entered_at.get(node)
            if obstacle is not None:
                # Of a region, and of a dtype that the device lacks, one is enough.
                lacking = obstacle.code == "option_ineffective" and bool(obstacle.observed)
                once = entered or (decision.dtype if lacking else node)
                if once not in told:
                    context.near_miss(self.name, "dtype", node, obstacle)
                    told.add(once)
                continue
            form = in_fp8(node, policy, context) if decision.rule == "compute" else None
            if isinstance(form, Reason):
                if form.sentence not in told:
                    context.near_miss(self.name, "fp8", node, form)
                    told.add(form.sentence)
                form = None
            self._rewrite(node, decision, rewriting, context, form)
            modified = True
        if modified:
            rewriting.read_before_casts()
            rewriting.clean()
        return PassResult(module, modified)

    def _rewrite(
        self, node: Node, decision: "Decision", rewriting: "Rewriting", context: PassContext, form: "Compute | None"
    ) -> None:
        from omnicomp.passes.dtypes.fp8 import FLOAT8
        from omnicomp.passes.dtypes.operators import kind
        from omnicomp.passes.dtypes.resolve import warn_if_slow
        from omnicomp.passes.dtypes.rules import floating_dtypes

        before = ", ".join(sorted(short(d) for d in floating_dtypes(node) - {decision.dtype}))
        target = short(decision.dtype if form is None else FLOAT8)
        detail = f"{kind(node)} {before} -> {target}"
        if decision.rule != "compute":
            detail += f", by {decision.rule}"
        if not self.policy.auto and warn_if_slow(decision.dtype, context.device):
            detail += "; this device is not faster in it than in float32"
        context.rewrite(self.name, "dtype", node, target=target, detail=detail)
        rewriting.recast(node, decision.dtype, form)


def _decided(module: GraphModule, policy: DtypePolicy, context: PassContext) -> "list[tuple[Node, Decision]]":
    """The operators that the policy wants in another dtype than the one they are in."""
    from omnicomp.passes.dtypes.analysis import is_floating_work
    from omnicomp.passes.dtypes.rules import decide, floating_dtypes

    found: list[tuple[Node, Decision]] = []
    for node in module.graph.nodes:
        if not is_floating_work(node, context.device.type):
            continue
        decision = decide(node, policy)
        if decision is not None and floating_dtypes(node) != {decision.dtype}:
            found.append((node, decision))
    return found


def _tell_option(context: PassContext, policy: DtypePolicy, effective: str, reason: Reason) -> None:
    """Record, once for each graph, that the policy has no effect here."""
    if not context.memo.setdefault(_TOLD, False):
        context.memo[_TOLD] = True
        requested = str(policy)
        context.timeline.append(
            Option(graph=context.graph_id, key=NAME, requested=requested, effective=effective, reason=reason)
        )


def _entered(entered: Node) -> Reason:
    return _AUTOCAST if "autocast" in entered.name else _FUNCTORCH


def _obstacle(node: Node, decision: "Decision", context: PassContext) -> Reason | None:
    """Why an operator stays as it is, though the policy wants it in another dtype."""
    from omnicomp.passes.dtypes.analysis import exactness, is_plain_call, wide_cast
    from omnicomp.passes.dtypes.operators import BUNDLES, FLOAT32_AT_LEAST, is_optimizer, kind
    from omnicomp.passes.dtypes.resolve import unsupported

    missing = unsupported(decision.dtype, context.device)
    if missing is not None:
        return missing
    if (decision.forced or decision.rule != "compute") and not is_plain_call(node):
        return _NOT_PLAIN
    if torch.finfo(decision.dtype).bits < 32 and kind(node) in FLOAT32_AT_LEAST:
        return _NO_KERNEL
    if not decision.forced:
        if kind(node) in BUNDLES and decision.rule == "compute":
            return _BUNDLE
        if is_optimizer(node):
            return _OPTIMIZER
        if decision.rule == "compute":
            cast = next(filter(None, map(wide_cast, node.all_input_nodes)), None)
            if cast is not None:
                return _user_cast(cast)
    narrow = torch.finfo(decision.dtype).bits < 32
    cause = exactness(node) if narrow and not decision.by_node else None
    return None if cause is None else _not_exact(cause)


_AUTOCAST: Final = Reason(
    code="option_ineffective",
    sentence="torch.autocast is in force here, and its dtypes are kept",
    by=NAME,
    observed="inside torch.autocast",
    needed="outside of torch.autocast",
    lever="remove torch.autocast where dtype_policy is to decide",
)
_FUNCTORCH: Final = Reason(
    code="match_ended",
    sentence="the operator is inside a transform of torch.func",
    by=NAME,
    needed="outside of torch.func",
    lever="apply dtypes inside the function that torch.func transforms",
)
_BUNDLE: Final = Reason(
    code="unsupported_op",
    sentence="the operator does softmax or gates together with its matrix work, and stays in float32 as a whole",
    by=NAME,
    needed="separate linear, matmul and attention operators",
    lever="write the layer with torch.nn.Linear and scaled_dot_product_attention, or name it in the policy's ops",
)
_OPTIMIZER: Final = Reason(
    code="not_equal",
    sentence="the operator is an optimizer's, whose steps would lose the small changes that they add up",
    by=NAME,
    needed="an operator outside of torch.optim",
    lever="name the operator in the policy's ops",
)
_NOT_PLAIN: Final = Reason(
    code="unsupported_op",
    sentence="the operator writes to an operand, gives a view of it, or has a dtype in its call, and stays as it is",
    by=NAME,
    needed="an operator that makes new tensors, in the dtype of its operands",
    lever="leave the operator out of the policy's rules",
)

_NO_KERNEL: Final = Reason(
    code="unsupported_op",
    sentence="torch has no kernel of the operator in half precision, and it stays as it is",
    by=NAME,
    needed="an operator that torch computes in half precision",
    lever="leave the operator out of the policy's rules",
)


def _user_cast(cast: Node) -> Reason:
    return Reason(
        code="option_ineffective",
        sentence="the program itself casts an operand to float32, and its dtype is kept",
        by=NAME,
        node=f"{cast.name} ({op_name(cast)})",
        cause=cast.name,
        needed="operands that the program does not cast",
        lever="remove the cast, or name the operator in the policy's ops",
    )


def _not_exact(cause: Node) -> Reason:
    return Reason(
        code="not_equal",
        sentence="the operator multiplies integers or computes an angle, which half precision can't hold",
        by=NAME,
        node=f"{cause.name} ({op_name(cause)})",
        cause=cause.name,
        needed="operands that are no integers, and no sine or cosine of the result",
        lever="name the node in the policy's ops",
    )
