"""How much of a cold compilation the checks of omnicomp's own rewrites may take."""

import dataclasses
from typing import Final

from torch.fx import GraphModule

# Inductor was seen to take 80 to 200 ms of a processor for a node of Dynamo's graphs, with a C++ compiler.
_CHECKED_PER_NODE: Final = 0.004
_LEAST_CHECKED: Final = 0.5


@dataclasses.dataclass
class CheckBudget:
    """What the checks of a graph may take of a cold compilation: no more are begun when it is spent.

    Attributes:
        seconds: of the processor.
        spent: how many were taken.
    """

    seconds: float
    spent: float = 0.0

    @classmethod
    def of(cls, module: GraphModule) -> "CheckBudget":
        """A twentieth of what Inductor takes for a graph of as many nodes, at least half a second."""
        return cls(max(_LEAST_CHECKED, _CHECKED_PER_NODE * len(module.graph.nodes)))
