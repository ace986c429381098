"""The engine: a subgraph becomes one XLA program for its sizes, which runs on the memory of torch's tensors."""

import contextlib
import dataclasses
import functools
import importlib.metadata
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.decompose import decomposed
from omnicomp._torch.autograd.decompositions import decompositions_but
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.base import Engine, EngineExecutable
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.subgraph import Results, Subgraph
from omnicomp.lowerings.engines.versions import missing_package
from omnicomp.lowerings.engines.xla.executable import XlaExecutable, imported, loaded
from omnicomp.lowerings.engines.xla.forms import FORMS, computed
from omnicomp.lowerings.engines.xla.library import as_jax, jax

__all__ = ["XlaEngine"]

_PACKAGES: Final = {"jax": (0, 10)}
_INSTALL: Final = 'pip install "omnicomp[xla]"'
_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class XlaEngine(Engine):
    """Compiles through `jax.jit`. Weights are copied once, and not part of the program.

    JAX's own settings stay as the user has them: 64-bit dtypes and the rest of what a program depends on are set for
    the thread, and for as long as it compiles or calls. XLA has threads of its own on the CPU, one a core, whatever
    `torch.set_num_threads` says. What an index that is out of range gives is
    undefined, and nothing is raised.
    """

    name = "xla"
    clustering = Clustering(devices=("cpu", "cuda"), dtypes=(*_FLOATS, *_INTEGERS), training=True)
    copies = True

    def missing(self) -> str:
        """JAX, or a newer one."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """JAX's and its library's versions, the processors, and how float32 is multiplied."""
        from omnicomp._torch.devices.precision import tf32_settings

        parts = [
            f"jax {importlib.metadata.version('jax')}",
            torch.backends.cpu.get_cpu_capability(),
            *map(str, tf32_settings()),
        ]
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_device_name())
        return " ".join(parts)

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """As its table says; on a device that JAX sees."""
        refused = super().supports(node, context)
        if refused is None and not _devices(context.device.type):
            sentence = f"this JAX sees no {context.device.type} device: install jax with support for it"
            return self._reason("engine_missing", sentence, lever='pip install "jax[cuda13]"')
        return refused

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Trace the subgraph with JAX, and compile it.

        Raises:
            EngineError: it needs more memory than it may use.
            Exception: what JAX raises.
        """
        if subgraph.dynamic:
            raise EngineError("it is built for fixed sizes; take dynamic='classes' among its options")
        order = _order(subgraph)
        fakes = [fake_value(node) for node in subgraph.placeholders]
        module = decomposed(subgraph.module, fakes, decompositions_but(FORMS))
        results = Results(dataclasses.replace(subgraph, module=module))
        placeholders = list(module.graph.find_nodes(op="placeholder"))

        def run(*arrays: Any) -> tuple[Any, ...]:
            values = computed(module, {placeholders[i]: array for i, array in zip(order, arrays, strict=True)})
            return tuple(values[node] for node in results.nodes)

        device = _device(subgraph.device)
        with own_settings():
            sharding = jax.sharding.SingleDeviceSharding(device)
            given = [fakes[index] for index in order]
            shapes = [jax.ShapeDtypeStruct(tuple(f.shape), as_jax(f.dtype), sharding=sharding) for f in given]
            compiled = jax.jit(run).lower(*shapes).compile()
        _within(compiled, subgraph.options.workspace_bytes)
        return XlaExecutable(compiled, _constants(subgraph), results, subgraph.device)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """From what JAX serialised."""
        results = Results(subgraph)
        with own_settings():
            compiled = loaded(data, len(_order(subgraph)), len(results.nodes), _device(subgraph.device))
        return XlaExecutable(compiled, _constants(subgraph), results, subgraph.device)


@contextlib.contextmanager
def own_settings() -> Generator[None]:
    """What a program of ours depends on, whatever the user has set for JAX; for this thread alone."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        yield


def _order(subgraph: Subgraph) -> list[int]:
    """Which placeholders the program takes: constants first, then the inputs of a call."""
    called = set(subgraph.inputs)
    return [
        *subgraph.constants,
        *(index for index, node in enumerate(subgraph.placeholders) if node in called),
    ]


def _constants(subgraph: Subgraph) -> Sequence[Any]:
    """Copies: an executable is shared by subgraphs whose weights have the same contents, and one's may change."""
    with own_settings():
        return [imported(value.detach().contiguous().clone()) for value in subgraph.constants.values()]


def _within(compiled: Any, allowed: int | None) -> None:
    facts = compiled.memory_analysis() if allowed is not None else None
    needed = getattr(facts, "temp_size_in_bytes", 0)
    if allowed is not None and needed > allowed:
        raise EngineError(f"its XLA program needs {needed} bytes beside inputs and outputs, and may use {allowed}")


def _device(device: torch.device) -> Any:
    devices = _devices(device.type)
    index: Any = device.index  # None for the current one
    wanted = torch.cuda.current_device() if device.type == "cuda" and index is None else index
    found = [each for each in devices if each.local_hardware_id == wanted] if device.type == "cuda" else devices[:1]
    if not found:
        raise EngineError(f"JAX does not see {device}")
    return found[0]


@functools.cache
def _devices(kind: str) -> tuple[Any, ...]:
    try:
        return tuple(jax.local_devices(backend=kind))
    except RuntimeError:  # JAX has no such backend here, which the caller says
        return ()
