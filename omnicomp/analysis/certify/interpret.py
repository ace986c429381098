"""Running a graph node by node on residues or on numbers, with attention and dropout by their definitions.

Kernels are for one device and one dtype; what is checked is what they stand for. Attention of any spelling is its
matrix products around a softmax, and the graphs that FlexAttention calls are run on tensors of indices. A random draw
is a function of how many were before it.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.sdpa import TRANSPARENT
from omnicomp._torch.fx import copy_module, fake_value
from omnicomp._torch.inductor.triton_ops import REFERENCES
from omnicomp.analysis.certify import values
from omnicomp.analysis.certify.structure import is_in_order
from omnicomp.analysis.certify.values import Residue, State, Unsupported

_aten: Final[Any] = torch.ops.aten
_ATTENDING: Final = (F.multi_head_attention_forward, torch._native_multi_head_attention)
# In names of operators that draw random numbers; whether one did is seen by torch's generator.
_DRAWING: Final = (
    "rand", "normal", "uniform", "bernoulli", "multinomial", "poisson", "exponential", "geometric", "cauchy", "rrelu",
    "gumbel", "dropout", "binomial",
)  # fmt: skip
Definition = Callable[..., Any]


def run(module: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The outputs of a graph.

    Args:
        module: a graph.
        inputs: one value for each placeholder.

    Raises:
        Unsupported: the graph can't be run so.
    """
    state = values.state()
    nodes: dict[Node, Any] = {}
    given = iter(inputs)
    last: dict[Node, int] = {}
    for position, node in enumerate(module.graph.nodes):
        for used in node.all_input_nodes:
            last[used] = position
    for position, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            nodes[node] = next(given)
            continue
        if node.op == "output":
            result = map_arg(node.args[0], nodes.__getitem__)
            return tuple(tree_leaves(result))
        if node.op == "get_attr":
            nodes[node] = _attribute(module, node.target, state.device)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), nodes.__getitem__)
        nodes[node] = result = _call(module, node, args, kwargs, state)
        if state.watch is not None:
            state.watch(node, args, kwargs, result)
        for used in node.all_input_nodes:
            if last[used] == position:
                nodes[used] = None
    raise Unsupported("the graph has no output")


_HALVES: Final = (torch.float16, torch.bfloat16)


def with_constants(module: GraphModule) -> GraphModule:
    """The graph with numbers for scalars of half precision that depend on no input.

    A run in float64 would not round them, as what folds them does.
    """
    known: dict[Node, Any] = {}
    for node in module.graph.nodes:
        value = fake_value(node)
        if not node.op.startswith("call_") or not isinstance(value, torch.Tensor) or value.ndim or is_in_order(node):
            continue
        last = not any(map(is_in_order, node.users)) and value.is_floating_point()
        if last and all(each in known for each in node.all_input_nodes) and "empty" not in str(node.target):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = _call(module, node, args, kwargs, State())
    names = {node.name: value for node, value in known.items() if value.dtype in _HALVES}
    if not names:
        return module
    found = copy_module(module, lazy=True)
    for node in found.graph.nodes:
        if node.name in names:
            node.op, node.target = "call_function", torch.tensor
            node.args, node.kwargs = (names[node.name].item(),), {"dtype": names[node.name].dtype}
    return found


def _attribute(module: GraphModule, path: Any, device: torch.device) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    return value


def _call(module: GraphModule, node: Node, args: Any, kwargs: Any, state: State) -> Any:
    target: Any = node.target
    if node.op == "call_module":
        return getattr(module, str(target))(*args, **kwargs)
    function, drawing = _meant(node.op, target)
    if function is _flex and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
        kwargs = {**kwargs, "alone": True}
    if _has_devices(node):
        args, kwargs = tree_map(lambda value: _moved(value, state.device), (args, kwargs))
    moved = torch.default_generator.get_state() if drawing else None
    # Attention inside of `multi_head_attention_forward` and its like: kernels are as exact as float32 is.
    with sdpa_kernel(SDPBackend.MATH) if function in _ATTENDING else contextlib.nullcontext():
        result = function(*args, **kwargs)
    if moved is not None and not torch.equal(moved, torch.default_generator.get_state()):
        values.drew(getattr(target, "__name__", str(target)), _elements(result))
    if (
        state.lift
        and isinstance(result, torch.Tensor)
        and not isinstance(result, Residue)
        and result.is_floating_point()
    ):
        return values.lifted(result)
    return result


@functools.lru_cache(maxsize=256)
def _meant(op: str, target: Any) -> tuple[Definition, bool]:
    """What a node calls, and whether that may draw random numbers: a graph is run many times."""
    if op == "call_method":
        function: Any = METHODS.get(target) or _method(target)
    else:
        function = DEFINITIONS.get(target) or _REGISTERED.get(str(target)) or REFERENCES.get(target)
        if function is None and target in TRANSPARENT:
            function = _by_definitions(TRANSPARENT[target])
        if function is None and isinstance(target, torch._ops.HigherOrderOperator):
            function = _higher_order(target)
    return function or target, any(word in str(target) for word in _DRAWING)


class _Defined(TorchFunctionMode):
    """Inside, functions that Python code calls are their definitions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        definition: Definition = DEFINITIONS.get(func) or func
        return definition(*args, **(kwargs or {}))


def _by_definitions(function: Definition) -> Definition:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Defined():
            return function(*args, **kwargs)

    return call


def _elements(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _method(name: str) -> Definition:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(first, name)(*args, **kwargs)

    return call


def _has_devices(node: Node) -> bool:
    return "device" in node.kwargs or any(isinstance(each, (torch.device, str)) for each in node.args)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device):
        return device
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "xpu", "mps", "npu"):
        return device
    return value


# ---- attention


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` by its definition."""
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]


def scores_of(query: Any, key: Any, attn_mask: Any, is_causal: bool, scale: Any) -> Any:
    """The scores that the softmax is taken of."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=values.state().device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            return scores.masked_fill(attn_mask.logical_not(), -math.inf)
        return scores + attn_mask
    return scores


def _grouped(query: Any, key: Any) -> Any:
    if key.ndim < 3 or key.shape[-3] == query.shape[-3]:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _attention(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any, gqa: bool
) -> tuple[Any, Any]:
    if gqa:
        key, value = _grouped(query, key), _grouped(query, value)
    dtype = query.dtype
    if not isinstance(query, Residue) and dtype in (torch.float16, torch.bfloat16):
        # Kernels sum in float32.
        query, key, value = query.float(), key.float(), value.float()
        out, scores = _attention(query, key, value, mask, dropout_p, is_causal, scale, False)
        return out.to(dtype), scores
    scores = scores_of(query, key, mask, is_causal, scale)
    weights = safe_softmax(scores)
    if dropout_p:
        weights = dropout(weights, dropout_p)
    return torch.matmul(weights, value), scores


def safe_softmax(scores: Any) -> Any:
    """A softmax over the last dimension in which rows of minus infinity are zero."""
    if isinstance(scores, Residue):
        return _aten._softmax.default(scores, -1, False)
    return _aten._safe_softmax.default(scores, -1)


def _flash_cpu(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    out, scores = _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, True)
    return out, torch.logsumexp(scores, -1)


def _flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, lse = _flash_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    return out, lse, None, None, query.shape[-2], key.shape[-2], None, None, None


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, lse = _flash_cpu(query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)
    return out, lse, None, None


def _cudnn(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> Any:
    out, lse = _flash_cpu(query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)
    return out, lse.unsqueeze(-1), None, None, query.shape[-2], key.shape[-2], None, None, None


def _flex(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any = None,
    kernel_options: Any = None,
    score_buffers: Any = (),
    mask_buffers: Any = (),
    *,
    alone: bool = False,
) -> Any:
    key, value = _grouped(query, key), _grouped(query, value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    sizes, device = scores.shape, values.state().device
    b, h, q, k = (
        torch.arange(size, dtype=torch.int32, device=device).view([-1 if dim == at else 1 for dim in range(4)])
        for at, size in enumerate(sizes)
    )
    if score_mod is not None:
        (scores,) = _graph(score_mod, (scores, b, h, q, k, *score_buffers))
    mask_mod = block_mask[-1]
    if mask_mod is not None:
        (seen,) = _graph(mask_mod, (b, h, q, k, *mask_buffers))
        if isinstance(seen, torch.Tensor):
            scores = scores.expand(sizes).masked_fill(~seen, -math.inf)
        elif not seen:
            scores = torch.full_like(scores, -math.inf)
    weights = safe_softmax(scores)
    # Scores are in float32 behind the function, as kernels have them, and so is the sum.
    out = torch.matmul(weights, value.to(weights.dtype)).to(value.dtype)
    if alone:  # nobody reads the others
        return (out,)
    return out, torch.logsumexp(scores, -1) / math.log(2), torch.amax(scores, -1)


def _graph(body: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(body, GraphModule):
        return run(body, args)
    result = body(*args)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout whose draw is that of the algebra, also for numbers."""
    if not training or p == 0:
        return x
    if isinstance(x, Residue):
        found = values.dropped(x, p)[0]
    else:
        keep = values.kept(tuple(x.shape), p, "dropout")
        found = (x / (1 - p) if p < 1 else x).masked_fill(~keep, 0.0)
    return x.copy_(found) if inplace else found


def _native_dropout(x: Any, p: float, train: Any) -> Any:
    if train is False or p == 0:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool)
    keep = values.kept(tuple(x.shape), p, "dropout")
    return (x / (1 - p)).masked_fill(~keep, 0.0), keep


# ---- random numbers: the n-th seed of a program, drawn by itself or by the operator that uses it, is n


def _seed(*_: Any) -> torch.Tensor:
    return torch.tensor(values.seed())


def _seeds(count: int, *_: Any) -> torch.Tensor:
    return torch.tensor([values.seed() for _ in range(count)])


def _random(size: Sequence[int], seed: Any, mode: str, **_: Any) -> torch.Tensor:
    return values.drawn(mode, tuple(size), int(seed))


def _integers(low: int, high: int, size: Sequence[int], seed: Any) -> torch.Tensor:
    return values.drawn("randint", tuple(size), int(seed), low, high)


def _number(mode: str) -> Definition:
    def draw(size: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        made = values.drawn(mode, tuple(getattr(size, "shape", size)), values.seed())
        return made.to(dtype or getattr(size, "dtype", None) or torch.get_default_dtype())

    return draw


def _integer(low: int, high: int, size: Sequence[int], *, dtype: Any = torch.int64, **_: Any) -> Any:
    return values.drawn("randint", tuple(size), values.seed(), low, high).to(dtype)


def _repeat_interleave(x: Any, repeats: Any, dim: Any = None, **_: Any) -> Any:
    if dim is None or isinstance(repeats, torch.Tensor):
        raise Unsupported("repeat_interleave of a tensor of numbers")
    dim = dim % x.ndim
    shape = list(x.shape)
    wide = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return wide.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


def _nothing(*_: Any, **__: Any) -> None:
    return None


_CALLING: Final = {
    "tag_activation_checkpoint": 0,
    "wrap_activation_checkpoint": 0,
    "wrap": 0,
    "wrap_with_set_grad_enabled": 1,
    "wrap_with_autocast": 4,
}
"""Higher-order operators that call a graph, and how many arguments come before it."""


def _higher_order(target: Any) -> Definition:
    name = target.name()
    if name == "flex_attention":
        return _flex
    if name == "invoke_subgraph":
        return lambda body, _, *args: _graph(body, args)
    if name in _CALLING:
        skip = _CALLING[name]
        return lambda *args, **_: _graph(args[skip], args[skip + 1 :])
    if name == "cond":
        return lambda pred, yes, no, args=(): _graph(yes if bool(pred) else no, args)
    if name.startswith("auto_functionalized"):
        return target
    raise Unsupported(f"the higher-order operator {name}")


DEFINITIONS: Final[dict[Any, Definition]] = {
    F.scaled_dot_product_attention: attention,
    _aten.scaled_dot_product_attention.default: attention,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_cpu,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    F.dropout: dropout,
    torch.dropout: lambda x, p, train: dropout(x, p, train),
    torch.dropout_: lambda x, p, train: dropout(x, p, train, True),
    _aten.dropout.default: lambda x, p, train: dropout(x, p, train),
    _aten.native_dropout.default: _native_dropout,
    _aten.rand.default: _number("rand"),
    _aten.randn.default: _number("randn"),
    _aten.rand_like.default: _number("rand"),
    _aten.randn_like.default: _number("randn"),
    _aten.randint.default: lambda high, size, **rest: _integer(0, high, size, **rest),
    _aten.randint.low: _integer,
    torch.rand_like: _number("rand"),
    torch.randn_like: _number("randn"),
    torch.repeat_interleave: _repeat_interleave,
    _aten.repeat_interleave.self_int: _repeat_interleave,
    torch._assert: _nothing,
    torch._check: _nothing,
    torch.amp.autocast_mode._enter_autocast: _nothing,
    torch.amp.autocast_mode._exit_autocast: _nothing,
}
"""What a target of a node computes, where that is not to be asked from the target."""

_REGISTERED: Final[dict[str, Definition]] = {
    "prims.fma.default": lambda a, b, c: a * b + c,
    "prims.inductor_seed.default": _seed,
    "prims.inductor_seeds.default": _seeds,
    "prims.inductor_random.default": _random,
    "prims.inductor_randint.default": _integers,
    "omnicomp.fast_tanh.default": torch.tanh,
}
"""The same for operators that Inductor or a pass registers when it is first used."""

METHODS: Final[dict[str, Definition]] = {
    "repeat_interleave": _repeat_interleave,
    "cuda": lambda x, *_, **__: x,
    "cpu": lambda x, *_, **__: x,
}
