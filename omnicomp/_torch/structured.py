"""How torch traces and logs: its structured trace (`TORCH_TRACE`, which tlparse reads), stages, loggers, ranges."""

import contextlib
from typing import Any

import torch
import torch._C._profiler
import torch._guards
from torch._dynamo.utils import dynamo_timed
from torch._logging import trace_structured
from torch._logging._internal import log_registry, register_log, trace_log
from torch.cuda import nvtx

Place = torch._guards.TraceId
"""A compilation, and which attempt of it."""


def tracing() -> bool:
    """Whether somebody takes the structured trace."""
    return bool(trace_log.handlers)


def here() -> Place | None:
    """The compilation under way in this thread; None outside one."""
    return torch._guards.CompileContext.current_trace_id()


def artifact(name: str, encoding: str, payload: str, place: Place | None) -> None:
    """Write one artefact to the structured trace.

    Args:
        name: what tlparse calls it, without an extension.
        encoding: `json`, or `string` for plain text.
        payload: its content.
        place: the compilation that it belongs to, which may be over; None for no compilation.
    """
    with contextlib.nullcontext() if place is None or place == here() else _back_in(place):
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": encoding},
            payload_fn=lambda: payload,
            expect_trace_id=False,
        )


def _back_in(place: Place) -> contextlib.AbstractContextManager[Any]:
    # torch 2.11 takes the id of a compilation from its context alone.
    context = torch._guards.CompileContext(place.compile_id)
    context.attempt = place.attempt
    return torch._guards.compile_context(context)


def timed(name: str, **metadata: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside is a stage of the compilation, for torch's compile times, tlparse's time line and the profiler."""
    return dynamo_timed(name, metadata=metadata)


def register(name: str) -> None:
    """Make a logger known to torch by its name: to its help and to its Python interface."""
    if not log_registry.is_log(name):
        register_log(name, name)


Range = torch._C._profiler._RecordFunctionFast
"""A context manager for one range of `torch.profiler`, made from its name; it can be entered again and again."""


def nvtx_range(name: str) -> "nvtx.range":  # type: ignore[valid-type]
    """The same for Nsight; None of it is there without CUDA."""
    return nvtx.range(name)
