"""Dynamo's internals: its compile lock, compile ids, the errors that steer it, and how a user error leaves it."""

import functools
from typing import Any, Final

import torch
import torch._guards
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    Unsupported,
)

__all__ = ["CONTROL_FLOW", "compile_id", "compile_lock", "disable", "user_error"]

CONTROL_FLOW: Final = (RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis, Unsupported)
"""Exceptions with which torch steers a compilation; catching one as a failure would break it."""


def compile_id() -> str:
    """Dynamo's id of the compilation under way, for example `0/1` (frame 0, first recompile); empty outside one."""
    found = torch._guards.CompileContext.current_compile_id()
    return str(found) if found is not None else ""


@functools.cache
def _shortened(cls: type[Exception]) -> type[Exception]:
    """A subclass of `cls` that Dynamo hands to the user as it is, instead of wrapping it in its own error."""

    def __init__(self: Any, *args: Any) -> None:
        Exception.__init__(self, *args)
        self.first_useful_frame = None

    def remove_dynamo_frames(self: Any) -> Any:
        return self.with_traceback(None)

    members = {
        "__init__": __init__,
        "remove_dynamo_frames": remove_dynamo_frames,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    bases: tuple[type, ...] = (cls, ShortenTraceback)
    return type(cls.__name__, bases, members)  # pyright: ignore[reportGeneralTypeIssues]


def user_error(error: Exception) -> Exception:
    """The same error in a form that leaves Dynamo without compiler frames; still an instance of its class."""
    return _shortened(type(error))(*error.args)


def disable(function: Any, reason: str) -> Any:
    """Keep Dynamo from tracing `function` when a compiled program calls it."""
    return torch._dynamo.disable(function, reason=reason)
