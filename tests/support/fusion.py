"""What the tests of the attention pass share: a backend that runs the pass alone, and a comparison with eager."""

import math

import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from torch._dynamo.backends.debugging import aot_eager

from omnicomp._torch.fx import read_attributes
from omnicomp.devices import resolve_device
from omnicomp.options.policy import Policy
from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.timeline import NearMiss, Rewrite, Timeline

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


class Backend:
    """Runs the pass on Dynamo's graph, and then the graph in eager or, for gradients, through AOTAutograd."""

    def __init__(self, *, training=False, policy=None, speculate=False):
        self.training, self.policy, self.speculate = training, policy or Policy(check_passes=True), speculate
        self.timeline, self.graphs, self.contexts = Timeline(), [], []

    def __call__(self, module, inputs):
        read_attributes(module)
        context = PassContext(
            graph_id=f"g{len(self.graphs)}",
            device=resolve_device("cpu"),
            timeline=self.timeline,
            training=self.training,
            speculate=self.speculate,
            inputs=inputs,
        )
        self.contexts.append(context)
        policy = self.policy
        fusion = AttentionFusion().of(policy)
        run_pipeline((fusion,), module, context, disabled=policy.disable_passes, check=policy.check_passes)
        self.graphs.append(module)
        return aot_eager(module, inputs) if self.training else module.forward

    def of(self, kind):
        return [event for event in self.timeline.events() if isinstance(event, kind)]

    def reasons(self):
        return [event.reason for event in self.of(NearMiss)]

    def rewrite(self):
        """The only site of the only graph, which was fused."""
        assert self.reasons() == []
        (rewrite,) = self.of(Rewrite)
        return rewrite

    def miss(self):
        """Why the only site of the only graph was left alone."""
        assert self.of(Rewrite) == []
        (reason,) = self.reasons()
        return reason

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
    if eager.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(result, eager)
    else:
        bound = max((eager.double() - exact).abs().max(), torch.finfo(eager.dtype).eps)
        assert (result.double() - exact).abs().max() <= bound
    return backend


def leaves(arguments):
    """Copies of the arguments; those of floating point require grad if the arguments do."""
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments]


def differentiate(function, *arguments, rtol=1e-4, atol=1e-5, keep=None, policy=None, speculate=False, **options):
    """Compile with gradients, compare the value and all gradients with eager's, and return the backend.

    Every argument of floating point requires grad. In half precision the errors against float64 are compared. `keep`
    is multiplied to the gradient of the output: which elements anything is learned from.
    """
    arguments = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    backend = Backend(training=True, policy=policy, speculate=speculate)
    eager = results(function, leaves(arguments), keep)
    found = results(compiled(function, backend, **options), leaves(arguments), keep)
    assert [f is None for f in found] == [e is None for e in eager], "who gets a gradient"
    half = any(isinstance(a, torch.Tensor) and a.dtype in (torch.half, torch.bfloat16) for a in arguments)
    wide = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in arguments] if half else []
    exact = results(function, wide, keep) if half else eager
    for got, want, true in zip(found, eager, exact, strict=True):
        if got is None:
            continue
        assert got.dtype == want.dtype
        assert torch.equal(got.isnan(), want.isnan())
        if not half:
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
        else:
            error, own = ((x.double() - true).abs().nan_to_num().max() for x in (got, want))
            roundings = 16 if got.dtype == torch.float32 else 2  # eager's own few may cancel
            assert error <= max(1.5 * own, roundings * torch.finfo(got.dtype).eps * true.abs().nan_to_num().max())
    assert found[0].stride() == eager[0].stride()
    return backend


def results(function, arguments, keep=None):
    """The value of a function, and the gradients of those arguments that require grad."""
    out = function(*arguments)
    needed = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.manual_seed(7)
    gradient = torch.randn(out.shape).to(out.dtype)
    gradient = gradient if keep is None else gradient * keep
    return [out.detach(), *torch.autograd.grad(out, needed, gradient, allow_unused=True)]


def plain(q, k, v, m):
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + m, -1) @ v
