"""A part that was cut, as an entry of Inductor's graph cache, which AOTAutograd's cache finds by its key.

AOTAutograd's cache keeps what has a `_fx_graph_cache_key`, and looks that key up in Inductor's cache at a start. So the
entry is what is kept there, a `CompiledFxGraph`, with our text in place of generated code, and the keys of its Inductor
subgraphs, which have entries of their own. A subgraph that is gone makes it a miss.
"""

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from typing import Any, Final
from unittest import mock

import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    should_bundle_autograd_cache,
    should_use_local_autograd_cache,
    should_use_remote_autograd_cache,
)
from torch._inductor.codecache import FxGraphCache
from torch._inductor.metrics import CachedMetricsDeltas
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants, OutputCode
from torch._inductor.utils import should_use_remote_fx_graph_cache
from torch.utils._ordered_set import OrderedSet

from omnicomp._torch.inductor.compile_fx import disable_cudagraphs, no_cudagraphs, observer_paused, subgraph_context
from omnicomp.errors import SaveError

_NAME: Final = "<omnicomp: a part that was cut>"
_FAILURES: Final = {
    "fxgraph_cache_pickle_error": "it can't be pickled; torch's log has the error",
    "fxgraph_cache_write_error": "it can't be written; torch's log has the error",
}


class StitchedGraph(CompiledFxGraph):
    """What is kept of a part that was cut."""

    text: str  # everything but the generated code of its subgraphs, as text
    # By index of the subgraph, the key and the guards of its entry in Inductor's cache; nothing for those that Inductor
    # did not build, and for all if AOTAutograd's cache holds the code itself.
    references: dict[int, tuple[str, str | None]]
    graphs: dict[int, CompiledFxGraph]  # these subgraphs, once they are loaded
    unkept: str  # why it can't be kept, if it can't

    def __init__(self, text: str = "", graphs: Mapping[int, CompiledFxGraph] | None = None, unkept: str = "") -> None:
        for field in dataclasses.fields(CompiledFxGraph):  # torch's own constructor takes a graph that was lowered
            setattr(self, field.name, None)
        self.text, self.graphs, self.unkept = text, dict(graphs or {}), unkept
        keyed = ((index, graph._fx_graph_cache_key, graph.guards_expr) for index, graph in self.graphs.items())
        self.references = {index: (key, guards) for index, key, guards in keyed if key and not is_bundled()}
        self.cache_key = self.source_code = self.runnable_graph_str = self.inductor_post_grad_graph_str = ""
        self.device_types, self.device_idxs, self.inputs_to_check = OrderedSet(), OrderedSet(), ()
        self.mutated_inputs, self.mutated_input_idxs = OrderedSet(), OrderedSet()
        self.constants, self.frozen_param_names, self.fx_kwargs = {}, {}, {}
        self.torchbind_constants, self.opaque_value_type_classes = {}, {}
        self.metrics_deltas = CachedMetricsDeltas(**{f.name: 0 for f in dataclasses.fields(CachedMetricsDeltas)})
        self.counter_deltas = Counter()
        self._boxed_call, self._wrap_compiled_regions, self._defers_input_alignment = True, False, False

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Call the straight-line code."""
        return self.current_callable(inputs)  # type: ignore[misc]

    def prepare_for_serialization(self) -> None:
        """Leave out what can't be pickled, and the subgraphs that are found by their keys again.

        Raises:
            BypassAOTAutogradCache: it can't be kept.
        """
        if self.unkept:
            raise BypassAOTAutogradCache(self.unkept)
        self.current_callable = None
        self.graphs = {index: copy(graph) for index, graph in self.graphs.items() if index not in self.references}
        for graph in self.graphs.values():
            graph.prepare_for_serialization()

    def after_deserialization(self, constants: CompiledFxGraphConstants) -> str:
        """Load the subgraphs.

        Raises:
            OSError: one of them is gone, which torch takes for a miss.
        """
        remote = FxGraphCache.get_remote_cache() if should_use_remote_fx_graph_cache() else None
        for index, (key, guards) in self.references.items():
            graph, _ = FxGraphCache.load_with_key(
                key,
                [],
                (),
                local=True,
                remote_cache=remote,
                is_backward=False,
                constants=constants,
                evaluate_guards=lambda found, _, wanted=guards: found == wanted,
            )
            if graph is None:
                raise FileNotFoundError(f"Inductor's cache does not hold subgraph {index} any more: {key}")
            self.graphs[index] = graph
        for index, graph in self.graphs.items():
            if index not in self.references and FxGraphCache.cache_hit_post_compile(graph, {}, constants)[0] is None:
                raise FileNotFoundError(f"the code of subgraph {index} can't be written")
        return _NAME

    def post_compile(
        self, example_inputs: Sequence[Any], constants: CompiledFxGraphConstants, graph_kwargs: Mapping[str, Any]
    ) -> None:
        """Make the subgraphs callable, as they were when they were built: without CUDA graphs, in a context each."""
        for graph in self.graphs.values():
            kwargs: Any = {**graph_kwargs, "cudagraphs": no_cudagraphs()}
            with subgraph_context(()), observer_paused():
                graph.post_compile((), constants, kwargs)
        self.current_callable = _nobody_asked


def _nobody_asked(inputs: Sequence[Any]) -> Any:
    raise SaveError(
        "a part that an earlier omnicomp cut was loaded by torch alone: compile and save the function again"
    )


@contextlib.contextmanager
def on_stitched_loaded(callback: Callable[[StitchedGraph, bool], Callable[..., Any]]) -> Generator[None]:
    """Ask what to call for each part that was cut and that AOTAutograd's cache restores inside the block.

    Args:
        callback: gets the part with its subgraphs, and whether CUDA graphs were on for it, as they are off now; returns
            its boxed callable.
    """
    original = StitchedGraph.post_compile

    def post_compile(self: StitchedGraph, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        original(self, example_inputs, constants, graph_kwargs)
        self.current_callable = callback(self, disable_cudagraphs(graph_kwargs))

    with mock.patch.object(StitchedGraph, "post_compile", post_compile):
        yield


def is_asked_for() -> bool:
    """Whether AOTAutograd's cache is on."""
    return bool(should_use_local_autograd_cache() or should_use_remote_autograd_cache() or is_bundled())


def is_bundled() -> bool:
    """Whether AOTAutograd's cache holds the artefacts themselves, and not their keys in Inductor's cache."""
    return should_bundle_autograd_cache()


def unkept(graph: Any) -> str:
    """Why a subgraph that Inductor built can't be kept, or an empty text."""
    if not isinstance(graph, CompiledFxGraph):
        return "Inductor returned no graph of its own for it"
    if graph.frozen_param_names:
        return "its weights are constants of the code"
    return "" if graph._fx_graph_cache_key or is_bundled() else "Inductor's cache does not keep it"


def save(graph: StitchedGraph, inputs: Sequence[Any], tag: str, seconds: float) -> str:
    """Keep a part in Inductor's cache, local and remote, where it is named by a hash of its content.

    Args:
        graph: the part; gets its key, and its guards on symbolic sizes.
        inputs: fake tensors and symbolic sizes.
        tag: goes into the key.
        seconds: how long it took to build.

    Returns:
        Why it was not kept, or an empty text.
    """
    config = torch._inductor.config
    if config.force_disable_caches or not (config.fx_graph_cache or should_use_remote_fx_graph_cache()):
        return "Inductor's cache is off"
    content = repr((tag, graph.text, sorted(graph.references.items())))
    key = f"f{hashlib.sha256(content.encode()).hexdigest()}"
    remote = FxGraphCache.get_remote_cache() if should_use_remote_fx_graph_cache() else None
    before = {name: counters["inductor"][name] for name in _FAILURES}
    graph._fx_graph_cache_key, graph._fx_graph_cache_debug_lines = key, []
    graph._time_taken_ns = int(seconds * 1e9)
    FxGraphCache._save_graph(key, graph, inputs, config.fx_graph_cache, remote)
    failed = [why for name, why in _FAILURES.items() if counters["inductor"][name] > before[name]]
    return "; ".join(failed)


def is_marked(call: Callable[..., Any]) -> bool:
    """Whether AOTAutograd's cache knows what to keep of a part."""
    return isinstance(getattr(call, "__wrapped__", call), OutputCode)


def mark(call: Callable[..., Any], graph: StitchedGraph) -> None:
    """Tell AOTAutograd's cache what to keep of a part: its key, or itself."""
    function: Any = call
    if is_bundled():
        function.__wrapped__ = graph
        return
    function._fx_graph_cache_key = graph._fx_graph_cache_key
    function._fx_graph_cache_debug_lines = graph._fx_graph_cache_debug_lines
    function.guards_expr = graph.guards_expr
