"""Inductor's internals: its options, `compile_fx`, the compiled graph, and the tag in its cache keys."""

import contextlib
import functools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch._functorch.config
import torch._guards
import torch._inductor.config
import torch._inductor.debug
import torch.compiler.config
from torch._guards import detect_fake_mode
from torch._inductor import list_mode_options
from torch._inductor.codecache import get_path
from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.exc import InductorError as InductorError
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.exc import LoweringException as LoweringException
from torch._inductor.output_code import CompiledFxGraph as CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir as cache_dir
from torch._inductor.utils import BoxedBool

from omnicomp import records
from omnicomp._torch.autograd.mutations import separate_outputs
from omnicomp._torch.inductor.cache_lookups import Lookup, counts, graph_lookup
from omnicomp._torch.inductor.recordable import VISIBLE_KEY, Recordable, recordables, unrecorded, visible_outputs
from omnicomp._torch.repairs.while_lowered import inductor_repaired

_ARTEFACT_KEY: Final = "omnicomp"
_FALLBACK_KEY: Final = "omnicomp_fallback"


@records.dataclass(frozen=True, kw_only=True)
class Kept:
    """What `compile_part` stored in an artefact, and how it is used now."""

    part: str
    record: str | None
    fallback: bytes
    recorded: bool
    recordable: Recordable | None = None


@functools.cache
def config_keys() -> tuple[str, ...]:
    """The names of Inductor's config entries, as `torch.compile(options=...)` takes them."""
    return tuple(torch._inductor.config.get_config_copy())


@functools.cache
def modes() -> tuple[str, ...]:
    """The modes that `torch.compile` takes."""
    return tuple(list_mode_options())


def config_patches(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's config patches for a mode and options, made and checked by torch's own code.

    Raises:
        RuntimeError: a key or the type of a value is wrong.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


def freezing_requested(patches: Mapping[str, Any]) -> bool:
    """Whether freezing was asked for by option while the global config, which Dynamo reads, has it off."""
    return bool(patches.get("freezing")) and not torch._inductor.config.freezing


def freezing(patches: Mapping[str, Any]) -> bool:
    """Whether weights become constants of the compiled code."""
    return bool(patches.get("freezing", torch._inductor.config.freezing)) or torch._inductor.config.freezing


def records_cudagraphs(patches: Mapping[str, Any]) -> bool:
    """Whether CUDA graphs are recorded where that is possible."""
    return bool(patches.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def cudagraphs_configured() -> bool:
    """Whether Inductor's global configuration asks for CUDA graphs, or for a policy of them."""
    config: Any = torch._inductor.config
    return bool(config.triton.cudagraphs) or getattr(config, "cudagraph_policy", None) is not None


def fallback_random(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor must draw the random numbers that eager draws."""
    return bool(patches.get("fallback_random", torch._inductor.config.fallback_random))


_REORDERING: Final = (
    "reorder_for_compute_comm_overlap",
    "bucket_all_gathers_fx",
    "bucket_reduce_scatters_fx",
    "bucket_all_reduces_fx",
    "aten_distributed_optimizations.enable_overlap_scheduling",
)


def reorders_collectives(patches: Mapping[str, Any]) -> str:
    """The option by which Inductor orders collectives by what stands between them, or an empty string."""
    for name in _REORDERING:
        configured = functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), torch._inductor.config)
        if patches.get(name, configured) not in (None, False, "none"):
            return name
    return ""


@contextlib.contextmanager
def cache_tag(digest: str) -> Generator[None]:
    """Put `digest` into the keys of Inductor's and AOTAutograd's caches, beside a tag of the user's."""
    user = torch.compiler.config.cache_key_tag
    tag = user if digest in user else f"{user}|{digest}"
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


def autograd_cache(enabled: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, AOTAutograd's cache, the local and the remote one, is as configured, or off."""
    if enabled:
        return contextlib.nullcontext()
    return torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def reset_cudagraphs() -> None:
    """Forget recorded CUDA graphs, as `torch.compiler.reset` does for Inductor."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()
    own = sys.modules.get("omnicomp._torch.inductor.cuda_graphs")
    if own is not None:
        own.reset()


def compile_part(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    record: str,
    lookups: list[Lookup],
    fallback: bytes = b"",
    found: list[Recordable] | None = None,
    **kwargs: Any,
) -> Any:
    """Build one post-autograd graph with Inductor, with `record` and `fallback` travelling in the artefact.

    Both are kept in the compiled graph's `fx_kwargs`, which Inductor hashes into its cache key and pickles with the
    artefact: a warm start finds the decisions that made it, from the local cache, a remote one or a cache bundle.

    Args:
        module: the graph; Inductor changes it.
        inputs: fake tensors and symbolic sizes.
        record: what to keep, as text; the same for the same graph and decisions.
        lookups: gets what Inductor's graph cache was asked.
        fallback: what it takes to run the graph another way (`fallbacks.dumps`); bytes, of which torch copies only the
            beginning into the lines that it keeps of a key.
        found: if torch shall not record the graph, what can be recorded of it is put here.
        kwargs: what `compile_fx` passes to its inner compile.

    Returns:
        A `CompiledFxGraph`, or a boxed function for a graph without operators.

    Raises:
        InductorError: the graph can't be lowered or its code not compiled.
    """
    separate_outputs(module.graph)
    before = counts()
    if found is not None:
        kwargs[VISIBLE_KEY] = visible_outputs(part_name(kwargs))
    recording = contextlib.nullcontext() if found is None else recordables(found)
    with observer_paused(), inductor_repaired(), recording:
        compiled = compile_fx_inner(module, inputs, **{_ARTEFACT_KEY: record, _FALLBACK_KEY: fallback}, **kwargs)
    lookup = graph_lookup(compiled, before)
    if lookup is not None:
        lookups.append(lookup)
    return compiled


_paused = threading.local()


@contextlib.contextmanager
def observer_paused() -> Generator[None]:
    """Inside, what `on_artefact_loaded` would observe is not called back for: it is no part of its own."""
    before = getattr(_paused, "value", False)
    _paused.value = True
    try:
        yield
    finally:
        _paused.value = before


@contextlib.contextmanager
def on_artefact_loaded(callback: Callable[[CompiledFxGraph, Kept], None]) -> Generator[None]:
    """Call back for each compiled graph that AOTAutograd's cache restores inside the block.

    A hit of that cache never reaches our inner compile; the restored graph's `post_compile` is the one place that it
    passes through. The method is wrapped only inside the block, and Dynamo's compile lock, which is held there, keeps
    other compilations out of it.
    """
    original = CompiledFxGraph.post_compile

    def post_compile(
        self: CompiledFxGraph, example_inputs: Any, constants: Any, graph_kwargs: Mapping[str, Any]
    ) -> None:
        recordable = unrecorded(original, self, example_inputs, constants, graph_kwargs)
        if not getattr(_paused, "value", False):
            fx_kwargs: Mapping[str, Any] = self.fx_kwargs or {}
            kept = Kept(
                part=part_name(fx_kwargs),
                record=fx_kwargs.get(_ARTEFACT_KEY),
                fallback=fx_kwargs.get(_FALLBACK_KEY, b""),
                recorded=bool(graph_kwargs.get("cudagraphs")) and "cuda" in self.device_types and recordable is None,
                recordable=recordable,
            )
            callback(self, kept)

    with mock.patch.object(CompiledFxGraph, "post_compile", post_compile):
        yield


def part_name(kwargs: Mapping[str, Any]) -> str:
    """Which part `compile_fx` asked its inner compile for: `forward`, `backward` or `inference`."""
    return "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"


def artefact_key(compiled: Any) -> str:
    """The key of a compiled graph in Inductor's cache, or an empty string."""
    return str(getattr(compiled, "_fx_graph_cache_key", None) or "")


def artefact_path(compiled: Any) -> str:
    """Path of the generated Python module of a compiled graph, or an empty string."""
    key = getattr(compiled, "cache_key", None)
    return str(get_path(key, "py")[2]) if key else ""


def generated_python(compiled: Any) -> str:
    """Path of the Python module whose code a call of a compiled graph enters first; empty if it enters C++."""
    kwargs: Mapping[str, Any] = getattr(compiled, "fx_kwargs", None) or {}
    return "" if kwargs.get("cpp_wrapper") or kwargs.get("aot_mode") else artefact_path(compiled)


_EXTERNAL: Final = re.compile(r"\b(torch\.ops\.[\w.]+|extern_kernels\.\w+)\(")
_FROM_CPP: Final = re.compile(r'aoti_torch_call_dispatcher\("(\w+)::(\w+)", "(\w*)"')
_ALIAS: Final = re.compile(r"^(\w+) = (?:[\w.]+  # )?(torch\.ops\.[\w.]+)$", re.MULTILINE)
_NOT_KERNELS: Final = ("torch.ops.inductor._reinterpret_tensor", "torch.ops.inductor._alloc_from_pool")


def external_kernels(compiled: Any) -> dict[str, int]:
    """What the generated module calls that Inductor did not generate: operators and extern kernels, with counts."""
    source: str = getattr(compiled, "source_code", None) or ""
    counts = Counter(name for name in _EXTERNAL.findall(source) if name not in _NOT_KERNELS)
    for namespace, name, overload in _FROM_CPP.findall(source):
        counts[f"torch.ops.{namespace}.{name}.{overload or 'default'}"] += 1
    for alias, name in _ALIAS.findall(source):
        calls = len(re.findall(rf"(?<![\w.]){alias}\(", source))
        if calls and name not in _NOT_KERNELS:
            counts[name] += calls
    return dict(sorted(counts.items()))


def call_first(
    compiled: CompiledFxGraph, first: Callable[[list[Any]], Any], later: Callable[[], Callable[..., Any]]
) -> None:
    """Put what surrounds the callable of a compiled graph in its place; later calls pay nothing for the first."""

    def first_call(inputs: list[Any]) -> Any:
        outputs = first(inputs)
        compiled.current_callable = later()
        return outputs

    compiled.current_callable = first_call


def direct(compiled: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that calls what `compile_part` built, from the second call on without torch's bookkeeping.

    `CompiledFxGraph.__call__` ends what belongs to the compilation, which the first call does, and names the graph in
    profiles and in a record of executions; that takes longer than a small graph.
    """
    if not isinstance(compiled, CompiledFxGraph):
        return compiled
    begun = False

    def directly(inputs: list[Any]) -> Sequence[Any]:
        nonlocal begun
        observed = torch.autograd.profiler._is_profiler_enabled or torch._inductor.debug.RECORD_GRAPH_EXECUTION
        if begun and not observed:
            return compiled.current_callable(inputs)  # type: ignore[misc]
        outputs = compiled(inputs)
        begun = True
        return outputs

    return directly


_REUSE: Final = re.compile(r"= (\w+); del \1\b.*# reuse")


def overwritten_inputs(compiled: Any) -> frozenset[str]:
    """Names of what generated code may write to when it is through with it, inputs of a backward among them."""
    return frozenset(_REUSE.findall(getattr(compiled, "source_code", None) or ""))


def live_inputs(error: BaseException, names: Sequence[str]) -> dict[str, Any]:
    """The inputs of the generated code that raised, as far as it had not freed them.

    Generated code unpacks its list of inputs into variables of these names, empties the list, and deletes each variable
    after its last use.
    """
    found: dict[str, Any] = {}
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_name in ("call", "forward"):
            local = frame.tb_frame.f_locals
            found = {name: local[name] for name in names if local.get(name) is not None} or found
        frame = frame.tb_next
    return found


def failing_node(error: BaseException) -> torch.fx.Node | None:
    """The node that Inductor was lowering when it raised, read from the frames of its graph interpreter."""
    found: torch.fx.Node | None = None
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frame = current.__traceback__
        while frame is not None:
            local = frame.tb_frame.f_locals
            if frame.tb_frame.f_code.co_name == "run_node" and isinstance(local.get("n"), torch.fx.Node):
                found = local["n"]
            frame = frame.tb_next
        if found is not None:
            return found
        current = current.__cause__ or current.__context__
    return found


@contextlib.contextmanager
def subgraph_context(inputs: Sequence[Any]) -> Generator[None]:
    """A tracing context of its own for building one subgraph of a part.

    AOTAutograd's context describes the whole part: its output strides are reported once, and its donated buffers are
    numbered by the whole part's inputs. Both would be wrong for a subgraph.
    """
    mode = detect_fake_mode(list(inputs))
    outer = torch._guards.TracingContext.try_get()
    if mode is None and outer is not None:
        mode = outer.fake_mode
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        yield


def has_inductor(device_type: str) -> bool:
    """Whether Inductor has a code generator registered for that device type."""
    init_backend_registration()
    return get_scheduling_for_device(device_type) is not None


def cudagraphs_box(on: bool) -> Any:
    """The box that tells Inductor whether to record CUDA graphs for a graph."""
    return BoxedBool(on)


def no_cudagraphs() -> Any:
    """The same for none."""
    return cudagraphs_box(False)


def disable_cudagraphs(kwargs: Mapping[str, Any]) -> bool:
    """Switch CUDA graphs off for a part and the parts that follow it.

    Returns:
        Whether they were on.
    """
    box = kwargs.get("cudagraphs")
    was_on = bool(box)
    if box is not None:
        BoxedBool.disable(box)
    return was_on


def is_missing_tool(error: BaseException) -> bool:
    """Whether Inductor failed because this machine has no compiler, whatever the graph."""
    inner = getattr(error, "inner_exception", error)
    return isinstance(inner, InvalidCxxCompiler) or type(inner).__name__ == "TritonMissing"
