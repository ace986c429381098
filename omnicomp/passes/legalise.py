"""The option `legalise`: what a device can't compute in, or can't even hold, becomes what it can.

A device whose `Capabilities` are `exhaustive` says which dtypes it lacks. Each operator that would compute in such a
one computes in the nearest that is there: the smallest that has all its values, else the widest of those that don't.
Values are cast where they are used; results keep the dtype they were computed in until something observes them, and
have the program's again in outputs and in what is changed in place, if it can be stored. An input in a dtype that the
device can't hold is a tensor of the host: its gradient has that dtype again.

It runs first and last. First, so that the passes after it see the dtypes that will be computed in, and choose kernels
and lower products by those. Last, as a pass may put in what the program did not have, such as positions in int64.
"""

import dataclasses
from typing import ClassVar

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult

from omnicomp.analysis.nodes import op_name
from omnicomp.options.policy import Policy
from omnicomp.passes.base import Pass, PassContext
from omnicomp.passes.legal.decisions import Decisions
from omnicomp.passes.legal.dtypes import Legal
from omnicomp.passes.legal.rewrite import Rewriting
from omnicomp.passes.legal.scan import in_transform, lacking, lacks_autocast, missing, without_missing_autocast

__all__ = ["Legalise"]


@dataclasses.dataclass(frozen=True)
class Legalise(Pass):
    """Moves operators to dtypes that the device has.

    Attributes:
        mode: `warn` says what moved; `error` raises if a range could be lost; `off` moves nothing.
        log: whether to log what moved.
    """

    name: ClassVar[str] = "legalise"
    mode: str = "warn"
    log: bool = True

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
        return lacks_autocast(context.device, legal) or any(lacking(node, legal) for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite one region.

        Raises:
            LegaliseError: with the mode `error`, if range would be lost; always, if no dtype of the device would do.
        """
        legal = Legal.of(context.device.capabilities())
        assert legal is not None  # or it would not apply
        if lacks_autocast(context.device, legal):
            context.while_traced(lambda: without_missing_autocast(context.device, legal))
        decisions = Decisions(self.name, context, strict=self.mode == "error", log=self.log)
        entered = in_transform(module)
        if entered is not None:
            first = next((node for node in module.graph.nodes if lacking(node, legal)), None)
            if first is None:
                return PassResult(module, False)
            why = f"is inside the transform of torch.func at {entered.name} ({op_name(entered)})"
            decisions.refused(first, missing(first, legal), why)
            decisions.report()
            return PassResult(module, False)
        root = context.root is None or context.root is module
        modified = Rewriting(module, legal, decisions, root=root).run()
        decisions.report()
        return PassResult(module, modified)
