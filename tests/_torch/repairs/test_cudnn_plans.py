from typing import Any

import pytest
import torch
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from omnicomp._torch.repairs.while_lowered import inductor_repaired


def _code(dropout: float, *, dense: bool) -> str:
    """Inductor's code for cuDNN's backward of a gradient that is computed in [B, H, Q, D], dense or not."""
    backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def function(gradient: Any, *rest: Any) -> Any:
        return backward(gradient.relu(), *rest, None, None, None, 16, 16, dropout, False, scale=0.1)

    mode = FakeTensorMode()
    with mode:
        q, k, v, out = (torch.empty(2, 16, 4, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        gradient = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16) if dense else torch.empty_like(out)
        seed, offset = (torch.empty((), dtype=torch.int64) for _ in range(2))
        inputs = (gradient, q, k, v, out, torch.empty(2, 4, 16, 1), seed, offset)
        lowering = GraphLowering(make_fx(function)(*inputs), example_inputs=inputs, is_backward=True)
    debug, graph, fake = V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(mode)
    with debug, graph, fake, inductor_repaired():
        lowering.run(*inputs)
        code: Any = lowering.codegen()[0]
    return str(getattr(code, "value", code))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dense", [False, True])
def test_gradients_have_one_layout_and_plans_of_their_own(dropout: float, *, dense: bool) -> None:
    code = _code(dropout, dense=dense)
    assert "(2, 4, 16, 8), (512, 8, 32, 1), torch.bfloat16)" in code
    assert "(2, 4, 16, 8), (512, 128, 8, 1), torch.bfloat16)" not in code
    (call,) = (line for line in code.splitlines() if "= torch.ops.aten._scaled_dot_product_cudnn" in line)
    assert f"{dropout or -0.0!r}, False" in call
