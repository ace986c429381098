"""How much of a cold compilation the checks of omnicomp's own rewrites may take."""

import dataclasses
from typing import Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import fake_value

# Inductor was seen to take 80 to 200 ms of a processor for a node of Dynamo's graphs with a C++ compiler, and about
# 40 ms with Triton.
_CHECKED_PER_NODE: Final = 0.004
_OF_TRITON: Final = 0.5
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
        values = (fake_value(node) for node in module.graph.nodes)
        device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")
        share = _CHECKED_PER_NODE * (1.0 if device == "cpu" else _OF_TRITON)
        return cls(max(_LEAST_CHECKED, share * len(module.graph.nodes)))
