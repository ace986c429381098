"""Where AOTAutograd puts an input that a graph writes to and returns.

Such an input takes the place of the output that it is, but the place is counted from the first output of the program,
while the values of inputs that need gradients and are written to come before those. So a graph that writes to both
kinds of inputs, as `x.mul_(2); self.steps += 1; return x.sin()`, returned the buffer in the place of a result.
A reproducer is `tests/_torch/repairs/test_returned_inputs.py`.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._functorch._aot_autograd import graph_capture
from torch._functorch._aot_autograd.schemas import OutputType

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", fixed="2.15")


class _NoOutput:
    """Stands in the list of outputs for the new value of an input."""

    output_type = OutputType.non_alias


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that traces, with a description of its outputs that begins where they begin."""

    def traced(*args: Any, meta: Any, **kwargs: Any) -> Any:
        moved = copy.copy(meta)
        moved.output_info = [*[_NoOutput()] * meta.num_mutated_inp_runtime_indices, *meta.output_info]
        return original(*args, meta=moved, **kwargs)

    return traced


_TRACED: Final = Exchange(graph_capture, "create_functionalized_fn", _counted)


def returned_in_their_places() -> AbstractContextManager[None]:
    """While AOTAutograd traces: inputs that are written to and returned keep their places among the outputs."""
    return NEEDED.exchanging(_TRACED)
