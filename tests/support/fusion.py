"""What the tests of the attention pass share: a backend that runs the pass alone, and a comparison with eager."""

import math

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch._dynamo.backends.debugging import aot_eager

from omnicomp.devices import get_device
from omnicomp.options import Policy
from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.timeline import NearMiss, Timeline

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Backend:
    """Runs the pass on Dynamo's graph, and then the graph in eager or, for gradients, through AOTAutograd."""

    def __init__(self, *, training=False, policy=None):
        self.training, self.policy = training, policy or Policy(verify=True)
        self.timeline, self.graphs = Timeline(), []

    def __call__(self, module, inputs):
        context = PassContext(
            graph_id=f"g{len(self.graphs)}",
            device=get_device("cpu"),
            policy=self.policy,
            timeline=self.timeline,
            training=self.training,
        )
        run_pipeline((AttentionFusion(),), module, context)
        self.graphs.append(module)
        return aot_eager(module, inputs) if self.training else module.forward

    def of(self, kind):
        return [event for event in self.timeline.events() if isinstance(event, kind)]

    def reasons(self):
        return [event.reason for event in self.of(NearMiss)]

    def attentions(self):
        modules = [m for g in self.graphs for m in g.modules() if isinstance(m, torch.fx.GraphModule)]
        target = F.scaled_dot_product_attention
        return [n for m in modules for n in m.graph.nodes if n.target is target]


def compiled(function, backend, **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def inputs(dtype=torch.float32, *, batch=2, heads=4, queries=6, keys=8, size=16):
    q = torch.randn(batch, heads, queries, size, dtype=dtype)
    k, v = (torch.randn(batch, heads, keys, size, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randn(batch, 1, queries, keys, dtype=dtype)


def fuse(function, *arguments, **options):
    """Compile, check the value against eager and float64, and return the backend."""
    backend = Backend()
    result = compiled(function, backend, **options)(*arguments)
    eager = function(*arguments)
    exact = function(*(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments))
    assert result.dtype == eager.dtype
    assert result.stride() == eager.stride()
    if eager.dtype == torch.float32:
        torch.testing.assert_close(result, eager)
    else:
        bound = max((eager.double() - exact).abs().max(), torch.finfo(eager.dtype).eps)
        assert (result.double() - exact).abs().max() <= bound
    return backend


def plain(q, k, v, m):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + m, -1) @ v
