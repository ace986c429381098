"""Calling an XLA program on torch's memory: arrays in and tensors out through DLPack, without a copy.

On CUDA the program runs on a stream of JAX's. DLPack makes that stream wait for torch's, on which the inputs were
computed, and torch's stream wait for the results. What is left is the memory of the results, which XLA would take for
something else as soon as torch lets go of it, while kernels that read it may still be waiting on torch's stream: it
is kept until those are done.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import sys
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.decompose import decomposed, decompositions_but
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session, aligned
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import missing_package
from omnicomp.lowerings.engines.subgraph import Results, Subgraph
from omnicomp.lowerings.engines.xla.forms import FORMS, computed
from omnicomp.lowerings.engines.xla.library import as_jax, jax
from omnicomp.safety.forks import new_lock

# The dtype as which an array's memory is handed over, by its size, where NumPy has none of that name.
_PLAIN: Final = {torch.bfloat16: torch.int16}


class XlaExecutable(EngineExecutable):
    """A compiled program with the arrays of its weights; threads share it."""

    def __init__(self, compiled: Any, constants: Sequence[Any], results: Results, device: torch.device) -> None:
        self._compiled = compiled
        self._constants = list(constants)
        self._results = results
        self._cuda = device.type == "cuda"

    def session(self) -> Session:
        """XLA's programs keep no state between calls."""
        return self._run

    def dumps(self) -> bytes | None:
        """What JAX serialises of it; the weights are not in it."""
        from jax.experimental import serialize_executable  # pyright: ignore[reportMissingImports]

        return serialize_executable.serialize(self._compiled)[0]

    @property
    def description(self) -> str:
        """Where it runs."""
        return "on cuda" if self._cuda else "on the CPU"

    def _run(self, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        if self._cuda:
            if torch.cuda.is_current_stream_capturing():
                raise EngineError("XLA runs on a stream of its own, which a CUDA graph of torch's can't record")
            _give_back()
        # Of the thread: a user who has left 64-bit dtypes off, or looks for NaNs, has them so outside of it.
        with jax.enable_x64(True), jax.debug_nans(False), jax.debug_infs(False):
            arrays = list(map(imported, inputs))
            made = self._compiled(*self._constants, *arrays)
            if not self._cuda:
                jax.block_until_ready(made)
            tensors = [torch.from_dlpack(array) for array in made]
        del arrays  # not before: torch's stream waits from here on, so that the memory of inputs may be used again
        return self._results.spread([_lent(tensor) for tensor in tensors] if self._cuda else tensors)


def imported(tensor: torch.Tensor) -> Any:
    """A tensor as an array of the same memory; of a copy where it is strided or isn't aligned."""
    return jax.dlpack.from_dlpack(aligned(tensor))


def loaded(data: bytes, inputs: int, outputs: int, device: Any) -> Any:
    """The inverse of `XlaExecutable.dumps`, for a number of inputs and outputs."""
    from jax.experimental import serialize_executable  # pyright: ignore[reportMissingImports]

    given = jax.tree.structure(((0,) * inputs, {}))
    made = jax.tree.structure((0,) * outputs)
    return serialize_executable.deserialize_and_load(data, given, made, execution_devices=[device])


class _Loan:
    """Memory of XLA's in the hands of torch. Torch holds this object as long as a tensor has the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        plain = tensor.view(_PLAIN.get(tensor.dtype, tensor.dtype))
        self.__cuda_array_interface__ = plain.__cuda_array_interface__

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        stream = torch.cuda.current_stream(self._tensor.device)
        _returned.append((stream.record_event(), self._tensor))


_returned: Final[collections.deque[tuple[Any, torch.Tensor]]] = collections.deque()
_giving: Final = new_lock()


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose end is noticed, whatever views of it there are."""
    if not tensor.numel():
        return tensor
    made = torch.as_tensor(_Loan(tensor), device=tensor.device)
    return made.view(tensor.dtype) if made.dtype != tensor.dtype else made


def _give_back() -> None:
    """Let XLA have the memory again that torch has let go of, and whose last readers are done."""
    if not _returned or not _giving.acquire(blocking=False):
        return
    try:
        for _ in range(len(_returned)):
            event, tensor = _returned.popleft()
            if not event.query():
                _returned.append((event, tensor))
    finally:
        _giving.release()


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
