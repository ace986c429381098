"""Attention becomes the fused kernel that is best for what it means, in whatever spelling; `attention.fuse` does it.

What it did is kept (`replay`), and what reads attention is imported for a graph that is not known yet.
"""

import dataclasses
from typing import ClassVar

from torch.fx import GraphModule

from omnicomp._torch.inductor.compile_fx import fallback_random
from omnicomp.analysis.certify import (
    BLOCKS,
    DRAWS,
    FILL_HIDES,
    FINITE_INPUTS,
    NO_OVERFLOW,
    ROUNDING,
    Assumption,
)
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy
from omnicomp.options.policy import Policy
from omnicomp.passes.attention.nodes import (
    is_encoder_layer,
    is_function,
    is_fused_attention,
    is_multi_head,
    is_normalizing,
    weighs_values,
)
from omnicomp.passes.base import Pass, PassContext, PassResult
from omnicomp.passes.replay import decided


@dataclasses.dataclass(frozen=True)
class AttentionFusion(Pass):
    """Fuses attention that is written out, and betters attention that is called.

    Attributes:
        dtype_policy: the policy that lowers the fused operators afterwards; which kernel is the best depends on it.
        eager_random: whether dropout has to draw the random numbers that eager draws; then it is not fused.
        seconds: that a graph may spend on timing candidates; 0: kernels are chosen by rule.
        empty_row_gradients: whether rows without a key pass gradients on wherever eager's do.
    """

    name: ClassVar[str] = "attention_fusion"
    dtype_policy: DtypePolicy = PRESETS["keep"]
    eager_random: bool = False
    seconds: float = 0.0
    empty_row_gradients: bool = False

    def claims(self, context: PassContext) -> tuple[Assumption, ...]:
        """What a fused kernel rests on: it sums in another order, and what is masked weighs nothing."""
        return tuple(map(Assumption, (ROUNDING, NO_OVERFLOW, FINITE_INPUTS, FILL_HIDES, DRAWS, BLOCKS)))

    def of(self, policy: Policy) -> "AttentionFusion":
        """This pass with the options that the user's policy gives it."""
        return AttentionFusion(
            dtype_policy=policy.dtype_policy,
            eager_random=fallback_random(policy.inductor),
            seconds=policy.attention_seconds,
            empty_row_gradients=policy.empty_row_gradients,
        )

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has a softmax, maybe written out or inside another function, or what takes its place."""
        kinds = (is_normalizing, is_multi_head, is_encoder_layer, is_fused_attention, is_function, weighs_values)
        return any(is_one(node) for node in module.graph.nodes for is_one in kinds)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite every site that is understood and profitable, as before if the graph is known; report the others."""

        def fuse() -> bool:
            from omnicomp.passes.attention.fuse import Fusion

            fusion = Fusion(self.name, self.dtype_policy, self.eager_random, self.seconds, self.empty_row_gradients)
            return fusion.fuse_all(module, context)

        return PassResult(module, decided((self,), module, context, fuse, lambda: _is_final(context)))


def _is_final(context: PassContext) -> bool:
    """Whether there was time for all that was to be measured."""
    budget = context.memo["attention_budget"]
    return not budget.enabled or budget.seconds > 0
