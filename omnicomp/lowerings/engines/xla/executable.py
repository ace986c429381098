"""Calling an XLA program on torch's memory: arrays in and tensors out through DLPack, without a copy.

On CUDA the program runs on a stream of JAX's. DLPack makes that stream wait for torch's, on which the inputs were
computed, and torch's stream wait for the results. What is left is the memory of the results, which XLA would take for
something else as soon as torch lets go of it, while kernels that read it may still be waiting on torch's stream: it
is kept until those are done.
"""

import collections
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp.errors import EngineError
from omnicomp.forks import new_lock
from omnicomp.lowerings.engines.base import EngineExecutable, Session, aligned
from omnicomp.lowerings.engines.subgraph import Results
from omnicomp.lowerings.engines.xla.library import jax

__all__ = ["XlaExecutable", "imported", "loaded"]

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
