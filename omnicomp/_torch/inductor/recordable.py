"""What of a compiled graph can be recorded as CUDA graphs: the whole, or the partitions that Inductor made of it.

Inductor finds out while it compiles what can't be recorded, and where to cut around it, if `triton.cudagraphs` is on
then. Its `post_compile` would record the graph at once and for good; here it surrounds a graph as if CUDA graphs were
off, and what it knew of them is kept for `omnicomp.runtime.recording`.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.cudagraph_utils import CudagraphMetadata, get_partition_cudagraph_metadata
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool
from torch.utils._ordered_set import OrderedSet

Boxed = Callable[[list[Any]], Sequence[Any]]

# A call of attention with a probability of dropout among its positional arguments; `scale` goes by its name.
_DROPS: Final = re.compile(r"_attention(?:_forward|_backward)?\b[.\w]*\([^\n]*?(?<![\w.=])0\.\d*[1-9]")

# In generated code, a call of a kernel that Inductor generated, and of any other one.
_LAUNCH: Final = re.compile(r"^\s*\w+\.run\(", re.MULTILINE)
_CALL: Final = re.compile(r"^\s*(?![\s#]).*?\b(?:extern_kernels|torch\.ops|aten)\.[\w.]+\(", re.MULTILINE)

VISIBLE_KEY: Final = "omnicomp_visible"
"""Among a graph's `fx_kwargs`: how many of its outputs the program may see; -1 are all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One function that can be recorded, as torch's trees describe it."""

    part: str
    static: tuple[int, ...]
    mutated: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    placeholders: tuple[Any, ...]
    whole: bool = False  # whether it is all of its graph


@dataclasses.dataclass(eq=False, kw_only=True)
class Recordable:
    """A compiled graph on CUDA whose calls can be recorded."""

    part: str  # `forward`, `backward` or `inference`
    device: int  # index of its device
    static: tuple[int, ...] = ()  # indices of the inputs whose addresses stay: parameters, and what a forward saved
    visible: int = -1  # how many of the outputs the program may see; autograd alone sees those behind them
    pieces: Sequence[Piece] = ()  # what is recorded, in the order of the calls
    reason: str = ""  # why nothing is recorded; empty if it can be
    launches: int | None = None  # of kernels that Inductor generated, if it calls no others
    _compiled: CompiledFxGraph | None
    _partitioned: bool = False

    def surround(self, wrap: Callable[[int, Boxed], Boxed], around: Callable[[Boxed], Boxed]) -> None:
        """Put a function around each piece, and another around the whole graph, which is not held any longer."""
        compiled, self._compiled = self._compiled, None
        assert compiled is not None
        if self._partitioned:
            count = range(len(self.pieces))
            compiled.recursively_apply_fns([lambda plain, at=index: wrap(at, plain) for index in count])  # type: ignore[misc]
        else:
            compiled.current_callable = wrap(0, compiled.current_callable)  # type: ignore[arg-type]
        compiled.current_callable = around(compiled.current_callable)  # type: ignore[arg-type]


def visible_outputs(part: str) -> int:
    """How many outputs of the graph that is being compiled are the program's; the others are saved for its backward."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None and part == "forward" else None
    return -1 if metadata is None else int(metadata.num_forward)


def unrecorded(
    post_compile: Callable[..., None],
    compiled: CompiledFxGraph,
    example_inputs: Any,
    constants: Any,
    graph_kwargs: Mapping[str, Any],
) -> Recordable | None:
    """Call `post_compile`, but have a graph that has `VISIBLE_KEY` not recorded by torch; what could be is returned."""
    visible = (compiled.fx_kwargs or {}).get(VISIBLE_KEY)
    if visible is None or "cuda" not in compiled.device_types:
        post_compile(compiled, example_inputs, constants, graph_kwargs)
        return None
    post_compile(compiled, example_inputs, constants, {**graph_kwargs, "cudagraphs": BoxedBool(False)})
    return _recordable(compiled, int(visible), constants.unwrap(compiled))


def marked_inputs(module: torch.fx.GraphModule) -> str:
    """Which inputs of a Dynamo graph have addresses that stay, for the keys of caches.

    The key of AOTAutograd's cache has them from torch 2.13 on. Before, a graph whose cache was marked by
    `mark_static_address` got the artefact of one whose cache may move, which is not recorded.
    """
    places = module.graph.find_nodes(op="placeholder")
    marked = [i for i, node in enumerate(places) if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")]
    return f"-static{hashlib.sha256(repr(marked).encode()).hexdigest()[:16]}" if marked else ""


@contextlib.contextmanager
def recordables(found: list[Recordable]) -> Generator[None]:
    """Inside, torch records no compiled graph that has `VISIBLE_KEY`; `found` gets what could be recorded."""
    original = CompiledFxGraph.post_compile

    def post_compile(self: CompiledFxGraph, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        recordable = unrecorded(original, self, example_inputs, constants, graph_kwargs)
        if recordable is not None:
            found.append(recordable)

    with mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
        yield


def _recordable(compiled: CompiledFxGraph, visible: int, constants: Mapping[str, Any]) -> Recordable:
    kwargs: Mapping[str, Any] = compiled.fx_kwargs
    part = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
    device, info = next(iter(compiled.device_idxs), 0), compiled.cudagraph_info
    reason = _reason(compiled, part, visible)
    if reason or info is None:
        reason = reason or "it was compiled without CUDA graphs"
        return Recordable(part=part, device=device, reason=reason, _compiled=compiled)
    tensors = {name: value for name, value in constants.items() if isinstance(value, torch.Tensor)}
    static = tuple(kwargs.get("static_input_idxs") or ())
    whole = CudagraphMetadata(
        info.placeholders, OrderedSet(static), compiled.mutated_input_idxs, info.stack_traces, tensors
    )
    maps = compiled.partition_maps if config.graph_partition else None
    metadata = [whole] if maps is None else [get_partition_cudagraph_metadata(each, whole) for each in maps]
    pieces = [
        Piece(
            part=part,
            static=tuple(each.static_input_idxs),
            mutated=tuple(each.mutated_input_idxs),
            constants=tuple(value for value in each.constants.values() if value.is_cuda),
            placeholders=tuple(each.placeholders),
            whole=len(metadata) == 1,
        )
        for each in metadata
    ]
    return Recordable(
        part=part,
        device=device,
        static=static,
        visible=visible,
        launches=_launches(compiled.source_code),
        pieces=pieces,
        reason="" if pieces else "no part of it can be recorded",
        _compiled=compiled,
        _partitioned=maps is not None,
    )


def _launches(source: str) -> int | None:
    """How many kernels generated code launches; None if it calls others, or is not Python."""
    found = len(_LAUNCH.findall(source))
    return None if not found or _CALL.search(source) else found


def _reason(compiled: CompiledFxGraph, part: str, visible: int) -> str:
    """Why a compiled graph is not recorded, as far as its compilation tells."""
    info = compiled.cudagraph_info
    if compiled.disabled_cudagraphs_reason:
        return compiled.disabled_cudagraphs_reason.partition("\n")[0].removeprefix("skipping cudagraphs due to ")
    if info is not None and info.cudagraph_fail_reasons:
        return ", ".join(info.cudagraph_fail_reasons)
    if len(compiled.device_idxs) > 1:
        return "it runs on several devices"
    if part == "forward" and visible < 0:
        return "which of its outputs are saved for the backward is not known"
    if re.search(r"torch\.ops\.\w*c10d", compiled.source_code):
        return "it takes part in collectives"
    if part != "inference" and _DROPS.search(compiled.source_code):
        return (
            "its attention leaves the seeds of dropout on the host in a plain call, and on the device in a recorded one"
        )
    static = frozenset(compiled.fx_kwargs.get("static_input_idxs") or ())
    if not static.issuperset(compiled.mutated_input_idxs):
        return "it writes to an input whose address may change"
    return ""
