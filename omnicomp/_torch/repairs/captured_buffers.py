"""What FlexAttention's graphs read, computed before they read it.

Inductor builds the code of the graphs for scores and mask first, and has what they capture computed afterwards. What
is not computed by then, such as `attention_mask.bool()`, goes into the kernel as code, where its indices name blocks
that a template does not have: Triton stops with `NameError('XBLOCK is not defined')`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._inductor import ir
from torch._inductor.kernel.flex import flex_attention

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11")


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(args: Sequence[Any], subgraph: Any) -> Any:
        for arg in args:
            if isinstance(arg, ir.TensorBox) and not isinstance(arg.data, ir.BaseConstant):
                arg.realize()
        return original(args, subgraph)

    return build


_BUILD: Final = Exchange(flex_attention, "build_subgraph_buffer", _computing)


def captured_computed() -> AbstractContextManager[None]:
    """Inside, what a graph of FlexAttention captures is a buffer when the graph is built."""
    return NEEDED.exchanging(_BUILD)
