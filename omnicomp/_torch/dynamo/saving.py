"""What torch saves of a compiled graph: for `aot_compile`, and for cache bundles with Dynamo's code.

`aot_compile` asks the backend's result for its bytes. With `torch._dynamo.config.caching_precompile`, Dynamo's cache
stores what was recorded under the number that the graph has there. AOTAutograd would record its own artefact there,
without anything that surrounds it; inside of `wanted` it does not see the number.
"""

import contextlib
import copy
import dataclasses
import itertools
import random
import types
from collections.abc import Callable, Generator
from typing import Any, Final

import torch
import torch._dynamo.config
import torch._functorch.config
from torch._dynamo import bytecode_transformation
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from torch._dynamo.aot_compile_types import SerializableCallable as SerializableCallable
from torch._dynamo.precompile_context import BackendCacheArtifact as BackendCacheArtifact
from torch._dynamo.precompile_context import PrecompileContext
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.inductor.cache_entry import StitchedGraph
from omnicomp._torch.inductor.cache_entry import is_bundled as is_bundled

# AOTAutograd compiles the backward with the forward, and hands out what its cache would keep; what can't be kept is
# said when it is saved.
_PATCHES: Final = {
    "bundled_autograd_cache": True,
    "force_autograd_cache": True,
    "force_non_lazy_backward_lowering": True,
    "strict_autograd_cache": False,
}


@records.dataclass(frozen=True, kw_only=True)
class Wish:
    """How a compiled graph may be saved."""

    key: str  # under which Dynamo's cache looks for it; empty if `aot_compile` asks the result itself


@contextlib.contextmanager
def wanted(gm: GraphModule) -> Generator[Wish | None]:
    """Inside, a graph that torch may save is compiled in a way that can be saved.

    Yields:
        How it may be saved; None if it is not to be.
    """
    module: Any = gm
    key = getattr(module, "_backend_id", None)
    precompiled = torch._dynamo.config.caching_precompile and key is not None
    if not precompiled and not torch._functorch.config.bundled_autograd_cache:
        yield None
        return
    module._backend_id = None
    try:
        with bundled():
            yield Wish(key=str(key) if precompiled else "")
    finally:
        module._backend_id = key


@contextlib.contextmanager
def bundled(*, keyless: bool = False) -> Generator[None]:
    """Inside, AOTAutograd hands out what `bundle` makes bytes of.

    For a graph that its cache has no key for, torch draws one from Python's `random`, and looks it up: a program that
    seeds its generator would draw the key of another graph. Inside, the generator is seeded by the system.

    Args:
        keyless: whether it does so for such graphs as well, as with the program's own functions of autograd.
    """
    patches = {**_PATCHES, **({"bypass_autograd_cache_key": True} if keyless else {})}
    known = {name: value for name, value in patches.items() if hasattr(torch._functorch.config, name)}
    state = random.getstate()
    random.seed()
    try:
        with torch._functorch.config.patch(known):
            yield
    finally:
        random.setstate(state)


def bundle(compiled: Callable[..., Any]) -> bytes:
    """What AOTAutograd returned, with the code of its parts, as bytes.

    Raises:
        ValueError: a part can't be saved; the message says why.
        Exception: something can't be pickled.
    """
    serialize = getattr(compiled, "serialize", None)
    entry = None if serialize is None else serialize()
    if entry is None:
        raise ValueError(
            "AOTAutograd's cache refuses it, or is off; that is torch._functorch.config.enable_autograd_cache"
        )
    entry = copy.copy(entry)
    for name in ("compiled_fw", "compiled_bw"):
        part = getattr(entry, name)
        if part is not None:
            setattr(entry, name, dataclasses.replace(part, result=_prepared(part.result)))
    holder = BundledAOTAutogradSerializableCallable(types.SimpleNamespace(serialize=lambda: entry))
    return BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(holder)


def _prepared(graph: Any) -> Any:
    """A compiled graph as it is pickled; what the caches do not keep can still be saved, if its text is there."""
    graph = copy.copy(graph)
    why = getattr(graph, "unkept", "")
    if why and not getattr(graph, "text", ""):
        raise ValueError(why)
    if isinstance(graph, StitchedGraph):
        graph.unkept = ""
    if getattr(graph, "frozen_param_names", None):
        raise ValueError("its weights are constants of the code; compile it without freezing")
    graph.prepare_for_serialization()
    return graph


def unbundle(data: bytes) -> Callable[..., Any]:
    """The function of the graph's inputs that `bundle` made the bytes of."""
    return BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(data).compiled_fn


def fresh_names() -> None:
    """Have Dynamo number its global names from elsewhere on, once the names of another process are about to be loaded.

    With `caching_precompile` a function that was loaded brings global names along, which Dynamo numbers from 0 in each
    process: the next function that it traces in the same module raises "already exists in scope", whatever the backend.
    """
    bytecode_transformation._unique_id_counter = itertools.count(random.SystemRandom().getrandbits(48))


def record(artefact: BackendCacheArtifact[Any]) -> None:
    """Give Dynamo's cache what it stores of a graph."""
    PrecompileContext.record_artifact(artefact)
