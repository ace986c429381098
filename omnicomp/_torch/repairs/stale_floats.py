"""A number that a compiled function is called with stays what it was when a graph with it was cached.

Dynamo passes a float that changes as an input. Where an operator needs a number (`clamp`, `full`, `eps` of a norm),
torch puts the one of now into the graph, with a guard. A restart, after which the number is a constant in Dynamo's
graph, is not made where the graph computes with the float as a tensor elsewhere, or where the operator is given an
expression of it. The cache of AOTAutograd does not keep the guard, and takes the graphs of all numbers for one: from
then on, `torch.clamp(x, max=a) * a` is that of the second `a` that it was called with.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final
from unittest.mock import patch

import sympy
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import inductor_prims
from torch.fx.passes import _tensorify_python_scalars
from torch.utils._sympy.symbol import SymT, symbol_is_type

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/197889")

_aten: Final = torch.ops.aten
# Beside those that torch knows: operators with a number, and with a tensor in its place, so that a graph serves all.
_TAKE_TENSORS: Final = {
    _aten.clamp.default: _aten.clamp.Tensor,
    _aten.clamp_min.default: _aten.clamp_min.Tensor,
    _aten.clamp_max.default: _aten.clamp_max.Tensor,
    inductor_prims.fma: inductor_prims.fma,
}


def _traced_anew(original: Callable[..., None]) -> Callable[..., None]:
    """`tensorify_python_scalars`, which has the program traced anew, the floats that guards fix being constants."""

    def tensorify(gm: Any, shape_env: Any, fake_mode: Any) -> None:
        with patch.dict(_tensorify_python_scalars.SUPPORTED_OPS, _TAKE_TENSORS):
            original(gm, shape_env, fake_mode)
        equalities = (guard.expr for guard in shape_env.guards if isinstance(guard.expr, sympy.Eq))
        names = {str(s) for each in equalities for s in each.free_symbols if symbol_is_type(s, SymT.FLOAT)}
        found = [name for name in names if not TensorifyState.should_specialize(name)]
        for name in found:
            TensorifyState.specialize(name)
        if found:
            raise TensorifyScalarRestartAnalysis

    return tensorify


_PASS: Final = Exchange(graph_compile, "tensorify_python_scalars", _traced_anew)


@contextlib.contextmanager
def floats_current() -> Generator[None]:
    """While autograd traces a graph: a float in it is an input or a constant of Dynamo's, which has a guard."""
    if not NEEDED.here:
        yield
        return
    with _PASS:
        yield
    # Torch keeps the names of such floats, which are those of the next function's floats, too: these would all be
    # constants from then on.
    TensorifyState.clear()
