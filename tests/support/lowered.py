"""What the tests of the dtype policy share: a backend that runs the pass alone and records what ran in which dtype."""

import collections

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch._aot_autograd.autograd_cache import check_node_safe
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import read_attributes
from omnicomp.devices import resolve_device
from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.passes.dtype_policy import DtypePass
from omnicomp.timeline import Timeline

CAST = torch.ops.aten.to.dtype
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOUND = {"bf16": 2e-2, "fp16": 2e-3}


class Block(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        h = self.norm(x)
        a = F.scaled_dot_product_attention(self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h)))
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm(x))))


class Recorder(TorchDispatchMode):
    """The dtypes of the floating tensors that each ATen operator read."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.seen = collections.defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        dtypes = {a.dtype for a in leaves if isinstance(a, torch.Tensor) and a.is_floating_point()}
        self.seen[getattr(func, "overloadpacket", func).__name__] |= dtypes
        return func(*args, **(kwargs or {}))


class Backend:
    """Runs the pass alone on each graph and keeps what came of it."""

    def __init__(self, policy="bf16", training=False, device=None):
        self.item = DtypePass(policy=parse_dtype_policy(policy))
        self.context = PassContext(
            graph_id="g0",
            device=device or resolve_device("cpu"),
            timeline=Timeline(),
            training=training,
        )
        self.graphs = []
        self.guards = []
        self.seen = {}

    def __call__(self, module, inputs):
        read_attributes(module)
        known = {node.target for node in module.graph.nodes}
        self.guards.append(count_guards())
        self.modified = run_pipeline((self.item,), module, self.context, check=True)
        self.guards.append(count_guards())
        self.graphs.append(module)
        for node in module.graph.nodes:
            if node.target not in known:
                check_node_safe(node)  # AOTAutograd's cache takes whatever the pass inserts
        run = aot_eager(module, inputs) if self.context.training else module.forward

        def record(*args):
            with Recorder() as recorder:
                result = run(*args)
            self.seen = recorder.seen
            return result

        return record

    def of(self, kind):
        return [e for e in self.context.timeline.events() if isinstance(e, kind)]

    def casts(self, dtype=None):
        nodes = [n for g in self.graphs for n in g.graph.nodes if n.target is CAST]
        return [n for n in nodes if dtype is None or n.args[1] is dtype]


def count_guards():
    return len(torch._guards.TracingContext.get().fake_mode.shape_env.guards)


def compiled(function, policy="bf16", training=False, device=None, **kwargs):
    backend = Backend(policy, training, device)
    return torch.compile(function, backend=backend, fullgraph=True, **kwargs), backend


def check(function, *args, policy="bf16", device=None):
    """Run eager and lowered: same dtypes, shapes, and about the same values."""
    expected = function(*args)
    fn, backend = compiled(function, policy, device=device)
    with torch.no_grad():
        actual = fn(*args)
    for want, got in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert error(got, want) < 1.5 * BOUND.get(str(policy), BOUND["bf16"])
    return backend


def error(actual, reference):
    return ((actual.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-12)).item()


def rand(*shape):
    return torch.randn(*shape)
