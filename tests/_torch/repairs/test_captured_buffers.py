"""What FlexAttention's graphs capture is computed first; that the kernel compiles then is a test on CUDA."""

from typing import Any

from torch._inductor import ir
from torch._inductor.kernel.flex import flex_attention

from omnicomp._torch.repairs.captured_buffers import captured_computed


class _Data:
    computed = False

    def realize(self) -> None:
        self.computed = True


def test_what_is_captured_is_computed_before_the_graph_is_built(monkeypatch: Any) -> None:
    seen: list[bool] = []
    data = _Data()
    monkeypatch.setattr(flex_attention, "build_subgraph_buffer", lambda args, graph: seen.append(data.computed))
    with captured_computed():
        flex_attention.build_subgraph_buffer([ir.TensorBox(data), 3], None)  # type: ignore[arg-type, list-item]
    flex_attention.build_subgraph_buffer([], None)  # type: ignore[arg-type]
    assert seen == [True, True]
