"""What Inductor lowers an operator to has the dtype that the operator has in the graph.

`torch.any` of uint8 is a uint8, and Inductor makes it a bool; `torch.bmm(a[:, :1], b)` of int8 is an int8, and Inductor
makes it a sum, which of integers is an int64. What is computed from them then does not wrap.
`tests/_torch/repairs/test_lowered_dtypes.py` has the reproducers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._inductor import lowering
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import TensorBox

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/198081")


def _of_its_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    """`call_function`, which lowers the node that is current."""

    def call_function(self: GraphLowering, target: Any, args: Any, kwargs: Any) -> Any:
        made = original(self, target, args, kwargs)
        value = self.current_node.meta.get("val")
        if not isinstance(made, TensorBox) or not isinstance(value, torch.Tensor):
            return made
        return made if made.maybe_get_dtype() in (None, value.dtype) else lowering.to_dtype(made, value.dtype)

    return call_function


_CALLS: Final = Exchange(GraphLowering, "call_function", _of_its_dtype)


def dtypes_of_the_graph() -> AbstractContextManager[None]:
    """While Inductor lowers a graph: no lowering changes a dtype."""
    return NEEDED.exchanging(_CALLS)
