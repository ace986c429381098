"""FlexAttention's operator: its block mask tuple, its options, its fake outputs, and symbolic numbers as nodes."""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import sympy
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported
from torch._inductor.lowering import make_pointwise, register_lowering
from torch._inductor.virtualized import ops
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import Node
from torch.nn.attention import flex_attention as frontend
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv, Mod, PowByNatural, PythonMod
from torch.utils._triton import has_triton

FLEX: Final[Any] = torch.ops.higher_order.flex_attention
FLEX_BACKWARD: Final[Any] = torch.ops.higher_order.flex_attention_backward
BLOCK_SIZE: Final[int] = frontend._DEFAULT_SPARSE_BLOCK_SIZE
# The size of the one block of a mask that is none: larger than any sequence.
ONE_BLOCK: Final[int] = frontend._LARGE_SPARSE_BLOCK_SIZE

# Queries by keys of the forward; in the backward also keys by queries.
_TILE: Final = (128, 64)
_SQUARE: Final = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64}
# For heads wider than 128 in 16 bits, on Hopper: 0.74 of the time of torch's forward, and 0.79 of its backward.
_WIDE: Final = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 2} | {
    **dict.fromkeys(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), 64),
    **{"bwd_num_warps": 8, "bwd_num_stages": 2},
}
# Head sizes for which torch has tiles in float32.
_TUNED: Final = (64, 128, 256)
# Tiles for float32, by the largest head size and whether products are computed in TF32: queries, keys and warps of the
# forward, and of the backward. Measured on an H200: 1.1 to 1.9 times as fast as torch's forward, 1.6 to 3 its backward,
# whose tile is 16 by 16 for each head size.
_FLOAT32: Final = {
    (64, False): ((64, 64, 4), (32, 32, 4)),
    (128, False): ((32, 32, 4), (32, 32, 4)),
    (64, True): ((128, 128, 8), (32, 128, 8)),
    (128, True): ((128, 64, 8), (64, 128, 8)),
}

_ARITHMETIC: Final[dict[type, Callable[[Any, Any], Any]]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: operator.pow,
    PowByNatural: operator.pow,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}


def block_mask_tuple(lengths: tuple[Any, Any], blocks: Sequence[Node | None], size: int, mask_mod: Node) -> Any:
    """The operator's block mask argument, whose length differs between torch versions.

    Args:
        lengths: of queries and keys, numbers or nodes.
        blocks: nodes of `kv_num_blocks`, `kv_indices`, `full_kv_num_blocks`, `full_kv_indices` and the same four of
            `q`, as `BlockMask` names them; None for what is absent.
        size: of a block of queries, and of keys.
        mask_mod: the node of the graph that says which keys a query attends to.

    Returns:
        A tuple of numbers, nodes and None.
    """
    stands_for = [None if node is None else node.meta["example_value"] for node in blocks]
    mask = frontend.BlockMask(lengths, *stands_for, BLOCK_SIZE=(size, size), mask_mod=lambda b, h, q, k: mask_mod)  # type: ignore[arg-type]

    def node_of(entry: Any) -> Any:
        if isinstance(entry, torch.Tensor):
            return next(node for node, fake in zip(blocks, stands_for, strict=True) if fake is entry)
        return entry

    return (*(node_of(entry) for entry in mask.as_tuple()[:-1]), mask_mod)


def kernel_options(query: Any, key: Any, value: Any, *, return_lse: bool, training: bool) -> dict[str, Any]:
    """The options with which `flex_attention` itself would call the operator on these fake tensors."""
    with torch.set_grad_enabled(training):
        return dict(frontend._apply_kernel_options(query, key, value, return_lse, None))


def tile_options(query: Any, value: Any, element_bytes: int, *, reads: bool, tf32: bool) -> dict[str, int]:
    """Options that make the kernels' tiles fit a multiprocessor's memory and registers where torch's choice does not.

    torch has no tiles for float32 with head sizes other than powers of two, and takes some that need more than there
    is. Its other tiles leave room for queries, keys and values, but for nothing that is loaded for each score: the
    loads of a pipelined loop need as much again as there are stages. On Hopper, its tile of 128 by 128 for heads of 64
    leaves no registers for what a mask or a bias reads: with one of 64 by 64, an H200 took 0.30 to 0.37 times as long
    for documents and padding, and 0.92 for ALiBi. Those for float32 and for wide heads were found by trying.

    Args:
        query: [B, Hq, Q, D], fake.
        value: [B, Hkv, K, Dv], fake.
        element_bytes: loaded for each score.
        reads: whether scores or mask read anything.
        tf32: whether products in float32 are computed in TF32.

    Returns:
        Options; none where torch's defaults do.
    """
    if query.device.type != "cuda" or torch.version.hip is not None:
        return {}
    room = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin
    row = query.shape[-1] * query.dtype.itemsize
    width = max(query.shape[-1], value.shape[-1])
    if query.dtype == torch.float32 and width <= 128 and not (tf32 and element_bytes):
        return float32_tiles(room, width, tf32=tf32)
    hopper = torch.cuda.get_device_capability(query.device) == (9, 0)
    if not element_bytes:
        if hopper and query.dtype != torch.float32 and 128 < min(query.shape[-1], value.shape[-1]) <= width <= 256:
            return _WIDE
        if reads and query.shape[-1] == 64 and query.dtype != torch.float32:
            return _SQUARE if hopper else {}
        untuned = query.dtype == torch.float32 and query.shape[-1] not in _TUNED and query.shape[-1] < max(_TUNED)
        return fitting_tile(room, row, value.shape[-1] * value.dtype.itemsize) if untuned else {}
    long, short = _TILE
    tile = long * short * element_bytes
    forward = (room - long * row) // (tile + 2 * short * row)
    backward = (room - 2 * long * row) // (tile + 2 * short * row)
    wide = {} if query.shape[-1] > long else {"fwd_BLOCK_N": short}
    return wide | {"fwd_num_stages": min(max(forward, 1), 2), "bwd_num_stages": min(max(backward, 1), 2)}


def float32_tiles(room: int, width: int, *, tf32: bool) -> dict[str, int]:
    """Those of the tiles for float32 that fit.

    Args:
        room: bytes of memory of a multiprocessor.
        width: the larger head size, at most 128.
        tf32: whether products are computed in TF32.

    Returns:
        Options for the forward, the backward, both or neither.
    """
    size = 64 if width <= 64 else 128
    options = dict[str, int]()
    (queries, keys, warps), (rows, columns, more_warps) = _FLOAT32[size, tf32]
    if (queries + 2 * keys) * size * 4 <= room:
        options |= {"fwd_BLOCK_M": queries, "fwd_BLOCK_N": keys, "fwd_num_warps": warps, "fwd_num_stages": 1}
    if 2 * (rows + columns) * size * 4 <= room:
        options |= {"bwd_BLOCK_M1": rows, "bwd_BLOCK_N1": columns, "bwd_BLOCK_M2": columns, "bwd_BLOCK_N2": rows}
        options |= {"bwd_num_warps": more_warps, "bwd_num_stages": 1}
    return options


def fitting_tile(room: int, row: int, value_row: int) -> dict[str, int]:
    """The forward's tile of 64 queries with the most keys, and then the most stages, that fit.

    Args:
        room: bytes of memory of a multiprocessor.
        row: bytes of a query, and of a key.
        value_row: bytes of a value.

    Returns:
        Options; none if torch's own tile fits, which is 64 keys in three stages.
    """
    for keys in (64, 32, 16):
        stages = (room - 64 * row) // (keys * (row + value_row))
        if stages >= 1:
            return {} if (keys, min(stages, 3)) == (64, 3) else {"fwd_BLOCK_N": keys, "fwd_num_stages": min(stages, 3)}
    return {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}


def fake_outputs(mode: FakeTensorMode, arguments: tuple[Any, ...], *, requires_grad: bool) -> tuple[torch.Tensor, ...]:
    """What the operator returns for fake arguments: output, log-sum-exp to the base 2, and row maxima."""
    with mode, torch.no_grad():
        out, lse, top = FLEX(*arguments)
    if requires_grad:
        with mode, torch.enable_grad():
            # A result and no leaf: whoever evaluates the nodes behind it may write to it.
            out, lse = (value.requires_grad_().view_as(value) for value in (out, lse))
    return out, lse, top


def fake_constant(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    """The fake tensor of a constant, with numbers as sizes."""
    return mode.from_tensor(value, static_shapes=True)


@contextlib.contextmanager
def on_real_tensors() -> Generator[None]:
    """Compute, whatever modes are active while a graph is compiled."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


def backward_without_kernel(*arguments: Any) -> Any:
    """FlexAttention's backward as its operator computes it in eager, with gradients of all tensors that scores read.

    The operator asks a tensor's `requires_grad` whether there is to be a gradient, which says no inside a compiled
    graph, as autograd is off there.
    """
    *front, read, masked = arguments
    asked = [
        value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in read
    ]
    with torch.no_grad():
        return FLEX_BACKWARD(*front, tuple(asked), masked)


def tanh_of_scores(device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """The hyperbolic tangent for scores: NVIDIA's instruction for half precision, else the exact one.

    `tanh.approx.f32` has a relative error of up to 2**-11 (PTX ISA, "tanh"), as rounding to float16 has.
    """
    fast = device.type == "cuda" and torch.version.hip is None and dtype in (torch.float16, torch.bfloat16)
    if not fast or torch.cuda.get_device_capability(device) < (7, 5):
        return torch.tanh
    return fast_tanh()


@functools.cache
def fast_tanh() -> Callable[..., Any]:
    """An operator whose code for a GPU is the instruction; elsewhere it is `tanh`."""

    @torch.library.custom_op("omnicomp::fast_tanh", mutates_args=())
    def tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def batched(info: Any, dims: tuple[int | None], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        return made(x), dims[0]

    def save(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (output,) = ctx.saved_tensors
        return gradient * (1 - output * output)

    tanh.register_fake(fake)
    tanh.register_vmap(batched)
    tanh.register_autograd(backward, setup_context=save)
    made: Any = torch.ops.omnicomp.fast_tanh.default

    def instruction(x: Any) -> Any:
        return ops.inline_asm_elementwise(
            x, asm="tanh.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32, is_pure=True, pack=1
        )

    register_lowering(made)(make_pointwise(instruction))
    return made


def reads_by_index() -> contextlib.AbstractContextManager[Any]:
    """Inside, `tensor[i, j]` with tensors as indices reads one element, as in the graphs that the operator calls."""
    return TransformGetItemToIndex()


def missing_code_generator(device_type: str) -> str | None:
    """What the machine lacks for FlexAttention's kernels on a device, or None."""
    if device_type == "cuda":
        return None if has_triton() else "Triton"
    if device_type == "cpu":
        return None if check_cpu_supported() else f"AVX2 (on {sys.platform})"
    return f"a kernel for {device_type}"


def is_symbol(value: Any, symbol: sympy.Symbol) -> bool:
    """Whether a value is the symbolic size that is this symbol alone."""
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


def number_as_node(value: Any, find: Callable[[sympy.Symbol], Node], call: Callable[..., Any]) -> Any:
    """A symbolic integer as arithmetic on the nodes of its symbols.

    Args:
        value: a number, or an expression over sizes.
        find: the node that holds a symbol.
        call: `call(function, *arguments)` makes a node.

    Returns:
        A node, or an `int` where the expression is a number.

    Raises:
        NotImplementedError: a function of the expression has no counterpart here.
    """

    def build(expression: Any) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Symbol):
            return find(expression)
        function = _ARITHMETIC.get(type(expression))
        if function is None:
            raise NotImplementedError(f"{type(expression).__name__} in the size {value}")
        return functools.reduce(lambda left, right: call(function, left, right), map(build, expression.args))

    return build(value.node.expr) if isinstance(value, torch.SymInt) else value
