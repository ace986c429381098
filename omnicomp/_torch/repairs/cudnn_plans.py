"""Plans of cuDNN's attention backward, which torch keeps under a key that lacks the layout of the output's gradient.

A plan is made for the strides that the gradient has in the first call. A later call with the same queries, keys and
values, but other strides of the gradient, is given the same plan, and computes gradients of something else: 88 % off in
a training step of BERT after the same attention had been timed with a contiguous gradient. Generated code therefore
lays the gradient out in one way, [B, H, Q, D] as a view of a dense [B, Q, H, D], and asks for plans of its own: a
dropout of -0.0 is none, and another key than 0.0.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch._inductor import graph, ir

from omnicomp._torch.repairs.needed import Exchange, Needed

# Since torch takes gradients in any layout (https://github.com/pytorch/pytorch/pull/141147); nobody reported it.
NEEDED: Final = Needed(first="2.11")

_BACKWARD: Final = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_DROPOUT: Final = next(i for i, each in enumerate(_BACKWARD._schema.arguments) if each.name == "dropout_p")


def _one_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's choice of a constraint on the layouts of an operator's arguments, with ours for cuDNN's backward."""

    def layout_constraints(operator: Any) -> Any:
        constraint = original(operator)
        if operator is not _BACKWARD:
            return constraint

        def constrained(node: Any, gradient: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if constraint is not None:
                others, kwargs = constraint(node, None, *args, **kwargs)
                args = others[1:]
            _, heads, queries, width = gradient.get_size()
            gradient = ir.ExternKernel.require_exact_strides(
                gradient, (queries * heads * width, width, heads * width, 1)
            )
            changed = [gradient, *args]
            changed[_DROPOUT] = changed[_DROPOUT] or -0.0
            return tuple(changed), kwargs

        return constrained

    return layout_constraints


_CHANGE: Final = Exchange(graph, "maybe_layout_constraints", _one_layout)


def one_layout_of_gradients() -> AbstractContextManager[None]:
    """Inside, Inductor gives cuDNN's backward gradients of one layout, and plans that nothing else takes."""
    return NEEDED.exchanging(_CHANGE)
