"""An attention timed on its device: each kernel of `scaled_dot_product_attention`, and the same unfused.

Operands are random, in the shapes and strides of the attention; both directions where gradients are wanted.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import BoxedBool
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from omnicomp._torch.autograd.attention import SCORES_BYTES, SDPA, kernel_first
from omnicomp._torch.devices.precision import allow_tf32
from omnicomp._torch.devices.timer import DeviceTimer

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor."""

# In float32 an H200's training takes 1.37 times as long fused, with scores of 2 GiB and a head size of 128.
_SCORES_BYTES_FLOAT32: Final = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """An attention, by all that its time depends on."""

    device: torch.device  # where it runs
    dtype: torch.dtype  # of its operands
    query: Layout  # [B, H, Q, D]
    key: Layout  # [B, Hkv, K, D]
    value: Layout  # [B, Hkv, K, Dv]
    mask: Layout | None = None  # what is added to the scores, in 4 dimensions; None if nothing is
    is_causal: bool = False  # whether keys after the query are hidden
    grouped: bool = False  # whether several query heads share one head of keys and values
    dropout: float = 0.0  # with what probability weights are dropped
    training: bool = False  # whether there is a backward
    mask_grad: bool = False  # whether the mask has a gradient, too
    tf32: bool = False  # whether products in float32 are computed in TF32
    # What it is without a fused kernel: the program's `operators`; a `call` that torch decomposes, which it does in
    # float32; or empty, as torch takes a fused kernel for the call in any case.
    unfused: str = "operators"

    @property
    def text(self) -> str:
        """All but the number of the device, for the key of a store."""
        return repr(dataclasses.replace(self, device=torch.device(self.device.type)))


class Bench(DeviceTimer):
    """The candidates for one attention, timed one after the other; a context manager, which holds the operands."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.device, grad=problem.training)
        self.problem = problem
        self.spared = 0.0
        self._operands: list[torch.Tensor] = []
        self._mask: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def __enter__(self) -> "Bench":
        """Make the operands.

        Raises:
            RuntimeError: the device has no room for them.
        """
        super().__enter__()
        problem = self.problem
        if problem.tf32 and (restore := allow_tf32()) is not None:
            self._stack.callback(restore)
        try:
            if self._needed() > self.free():
                raise RuntimeError("the device has no room for a second attention")
            generator = torch.Generator(problem.device).manual_seed(0)
            made = [
                self._random(layout, generator, grad=problem.training)
                for layout in (problem.query, problem.key, problem.value)
            ]
            self._operands = made
            if problem.mask is not None:
                self._mask = self._random(problem.mask, generator, grad=problem.training and problem.mask_grad)
            if problem.training:
                # Laid out as an output projection leaves it.
                batch, heads, queries, _ = problem.query[0]
                shape = (batch, queries, heads, problem.value[0][-1])
                gradient = torch.randn(shape, generator=generator, device=problem.device, dtype=problem.dtype)
                self._gradient = gradient.transpose(1, 2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._operands, self._mask, self._gradient = [], None, None
        super().__exit__(*error)

    @property
    def has_room_for_scores(self) -> bool:
        """Whether the attention is small enough to be tried unfused."""
        (batch, heads, queries, _), keys = self.problem.query[0], self.problem.key[0][2]
        itemsize = 4 if self.problem.unfused == "call" else self.problem.dtype.itemsize
        size = batch * heads * queries * keys * itemsize
        most = _SCORES_BYTES_FLOAT32 if self.problem.dtype is torch.float32 else SCORES_BYTES
        return size <= most and 6 * size <= self.free()

    def kernel(self, name: str) -> float:
        """Milliseconds of a kernel of torch.

        Raises:
            RuntimeError: it does not take the attention.
        """
        with kernel_first(name, alone=True):
            return self.timed(lambda: self._run(self._call))

    def _call(self, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        problem = self.problem
        return SDPA(
            query, key, value, mask, dropout_p=problem.dropout, is_causal=problem.is_causal, enable_gqa=problem.grouped
        )

    def _decomposed(self, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self._call(query, key, value, mask)

    def unfused(self) -> float:
        """Milliseconds of the two products and a softmax by eager's operators; only a mask with a gradient is added.

        Generated code saves some passes over the scores of what eager takes; it took 0.6 to 1.3 times as long as this
        on an H200. A call is timed as torch decomposes it, with its mask.
        """
        problem = self.problem
        if problem.unfused == "call":
            return self.timed(lambda: self._run(self._decomposed))

        def attention(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
            batch, heads, queries, _ = query.shape
            together = query.reshape(batch, key.shape[1], -1, query.shape[-1])
            scores = torch.matmul(together, key.transpose(-2, -1))
            if mask is not None and problem.mask_grad:
                scores = (scores.view(batch, heads, queries, -1) + mask).view_as(scores)
            weights = torch.softmax(scores, -1)
            weights = F.dropout(weights, problem.dropout) if problem.dropout else weights
            return torch.matmul(weights, value).reshape(batch, heads, queries, -1)

        return self.timed(lambda: self._run(attention))

    def generated(self) -> float:
        """Milliseconds of the attention as Inductor's code, unfused.

        It is compiled in a thread of its own, which knows nothing of the compilation that this is a part of.

        Raises:
            RuntimeError: it can't be compiled.
        """
        inputs = [tensor.detach() for tensor in self._tensors()]
        outcome: list[Any] = []

        def compile_it() -> None:
            try:
                with torch.cuda.device(self.problem.device):
                    self.spared += _first_build(self.problem.device)
                    outcome.append(_compiled(self._unfused_step(), inputs))
            except Exception as error:  # noqa: BLE001 - raised below, in the thread that asked
                outcome.append(error)

        thread = threading.Thread(target=compile_it, name="omnicomp attention")
        thread.start()
        thread.join()
        (compiled,) = outcome
        if isinstance(compiled, Exception):
            raise RuntimeError(f"unfused code can't be compiled: {compiled}") from compiled
        with torch.no_grad():
            return self.timed(lambda: compiled(list(inputs)))

    def _unfused_step(self) -> Callable[..., Any]:
        problem = self.problem
        scale = 1 / math.sqrt(problem.query[0][-1])

        def attention(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
            groups = query.shape[1] // key.shape[1]
            if groups > 1:
                key, value = (_repeated(tensor, groups) for tensor in (key, value))
            scores = torch.matmul(query, key.transpose(-2, -1)) * scale
            if problem.is_causal:
                rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
                scores = scores.masked_fill(columns > rows[:, None], -math.inf)
            scores = scores if mask is None else scores + mask
            return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), value)

        if problem.unfused == "call":
            attention = self._decomposed

        def step(*tensors: torch.Tensor) -> Any:
            gradient = tensors[-1] if problem.training else None
            leaves = list(tensors[:-1] if problem.training else tensors)
            if gradient is None:
                return attention(*leaves, *([] if problem.mask is not None else [None]))
            wanted = leaves if problem.mask_grad else leaves[:3]
            wanted = [leaf.detach().requires_grad_() for leaf in wanted]
            given = [*wanted, *leaves[len(wanted) :]]
            out = attention(*given, *([] if problem.mask is not None else [None]))
            return (out, *torch.autograd.grad(out, wanted, gradient))

        return step

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._operands, *(t for t in (self._mask, self._gradient) if t is not None)]

    def _run(self, attention: Callable[..., torch.Tensor]) -> Any:
        out = attention(*self._operands, self._mask)
        if self._gradient is None:
            return out
        wanted = [tensor for tensor in (*self._operands, self._mask) if tensor is not None and tensor.requires_grad]
        # In this thread: each thread has plans of cuDNN, and torch would use those of this gradient's layout for the
        # program's gradients, whatever their layout (repairs/cudnn_plans.py).
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(out, wanted, self._gradient)

    def _random(self, layout: Layout, generator: torch.Generator, *, grad: bool) -> torch.Tensor:
        shape, strides = layout
        made = torch.empty_strided(shape, strides, device=self.problem.device, dtype=self.problem.dtype)
        with torch.no_grad():
            whole = made.as_strided((_extent(layout),), (1,))
            whole.normal_(generator=generator)
        return made.requires_grad_(grad)

    def _needed(self) -> int:
        layouts = [self.problem.query, self.problem.key, self.problem.value]
        layouts += [] if self.problem.mask is None else [self.problem.mask]
        size = sum(map(_extent, layouts)) * self.problem.dtype.itemsize
        return (8 if self.problem.training else 4) * size


def _extent(layout: Layout) -> int:
    """How many elements of memory a tensor spans."""
    shape, strides = layout
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _repeated(tensor: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, *rest = tensor.shape
    return tensor[:, :, None].expand(batch, heads, times, *rest).reshape(batch, heads * times, *rest)


_built: Final[set[str]] = set()


def _first_build(device: torch.device) -> float:
    """Seconds of the first kernel that a process generates for a kind of device; zero for the others.

    Triton is imported for it, and compiles what launches kernels; the program would wait for both later.
    """
    if device.type in _built:
        return 0.0
    _built.add(device.type)
    start, x = time.perf_counter(), torch.zeros(8, device=device)
    _compiled(lambda x: x + 1, [x])([x])
    return time.perf_counter() - start


def _compiled(step: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], Any]:
    """One graph of both directions as Inductor's code, without anything that joins graphs or records them."""
    traced = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    if not isinstance(outputs := traced.graph.output_node().args[0], tuple | list):
        traced.graph.output_node().args = ((outputs,),)
        traced.recompile()
    fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    compiled: Any = compile_fx_inner(traced, fakes, cudagraphs=BoxedBool(False), is_inference=True)
    return compiled
