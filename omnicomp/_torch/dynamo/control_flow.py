"""Dynamo's internals: its lock; ids, starts and limits of compilations; errors that steer it, and the user's own."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

import torch
import torch._guards
import torch.fx._symbolic_trace
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch._dynamo import callback_handler, convert_frame
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    Unsupported,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing, get_metrics_context
from torch.autograd import forward_ad

CONTROL_FLOW: Final = (RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis, Unsupported)
"""Exceptions with which torch steers a compilation; catching one as a failure would break it."""


GRAPH_BREAKS: Final = tuple(exceptions_allowed_to_be_fallback)
"""Exceptions of a backend for which Dynamo breaks the graph and compiles the pieces, as for an unknown output shape."""


def compile_id() -> str:
    """Dynamo's id of the compilation under way, for example `0/1` (frame 0, first recompile); empty outside one."""
    found = torch._guards.CompileContext.current_compile_id()
    return str(found) if found is not None else ""


def seconds_of_tracing() -> float | None:
    """Wall time since Dynamo began with the frame under way; None outside of a compilation."""
    context = get_metrics_context()
    return max(time.time() - context._start_time_ns / 1e9, 0.0) if context.in_progress() else None


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


def undisabled(function: Any) -> Any:
    """What `disable` was put around, for a caller that Dynamo does not trace either."""
    return innermost_fn(function)


def unseen_by_hooks() -> contextlib.AbstractContextManager[None]:
    """Inside, the program's hooks for saved tensors are not called: what is saved there is fake, or none of theirs.

    Activation checkpointing counts what is saved in its region, and finds another number when the region runs again.
    """
    return _disable_saved_tensors_hooks_during_tracing()


@contextlib.contextmanager
def leave_transforms_on_error() -> Generator[None]:
    """Leave the transforms of torch.func that a traced graph entered, if the tracing ends with an exception.

    The graph enters and leaves them by calls of its own; one that is cut short would leave them on for what follows.
    """
    depth = get_dynamic_layer_stack_depth()
    dual, enabled = forward_ad._current_level >= 0, torch._C._is_fwd_grad_enabled()
    try:
        yield
    except BaseException:
        # torch 2.11 has left the layers itself by now, and does not take popping none of them.
        if get_dynamic_layer_stack_depth() > depth:
            with contextlib.suppress(RuntimeError):
                pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch._C._set_fwd_grad_enabled(enabled)
        if not dual:
            with contextlib.suppress(RuntimeError):  # no forward-mode level was entered
                torch._C._exit_dual_level(level=0)
        raise


def end_of(gm: Any) -> tuple[str, str] | None:
    """Dynamo's text on why it broke off before the function was over, and the `file:line` where; None if it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return str(reason.reason), place


_MARK: Final = "_omnicomp"


def another_thread_compiles() -> bool:
    """Whether Dynamo's compile lock is held, and not by this thread."""
    if compile_lock._is_owned():  # type: ignore[attr-defined]
        return False
    if compile_lock.acquire(blocking=False):
        compile_lock.release()
        return False
    return True


def tell_threads_apart() -> None:
    """Let a compiled function be called while another thread compiles.

    The function that `torch.compile` returns refuses to be called under FX's symbolic tracing. It learns of that by a
    flag of the process, which every compilation sets for a while; so a call in one thread would raise because another
    thread compiles. With this the flag counts only where no other thread can have set it by compiling.
    """
    module = torch.fx._symbolic_trace
    original = module.is_fx_symbolic_tracing
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def is_fx_symbolic_tracing() -> bool:
        return original() and not another_thread_compiles()

    setattr(is_fx_symbolic_tracing, _MARK, True)
    module.is_fx_symbolic_tracing = is_fx_symbolic_tracing


def watch_starts(backend: Callable[..., Any], begin: Callable[[str | None, Mapping[str, Any] | None], None]) -> None:
    """Have a function called whenever Dynamo begins to trace for a backend, which is called when the trace is over.

    Args:
        backend: what `torch.compile` was given, or what that names.
        begin: gets `torch.compile`'s mode and options. It must not raise.
    """

    def started(_: Any) -> None:
        asked = _compiled_for()
        if isinstance(asked, torch._TorchCompileWrapper) and asked.compiler_fn is backend:
            begin(asked.kwargs.get("mode"), asked.kwargs.get("options"))

    callback_handler.register_start_callback(started)


def _compiled_for() -> Any:
    """What a frame is being compiled for, which callbacks are not told; None outside of a compilation."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not convert_frame._compile.__code__:
        frame = frame.f_back
    found: Any = frame.f_locals.get("compiler_fn") if frame is not None else None
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return found


def watch_recompile_limits(reached: Callable[[str, str, str, str, str], None]) -> None:
    """Have `reached` called where Dynamo compiles a function no more, and runs it eager, as it did so too often.

    Dynamo says so in a warning alone. `reached` gets the compile id, the config key of the limit, the function's name
    and `file:line`, and the guard that failed last. With `fullgraph=True` Dynamo raises an error instead.
    """
    original = convert_frame.exceeds_recompile_limit
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def exceeds_recompile_limit(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        exceeded, limit = original(cache_size, compile_id)
        caller = sys._getframe(1).f_locals
        if exceeded and not (caller["one_graph"] or torch._dynamo.config.fail_on_recompile_limit_hit):
            code = caller["code"]
            source = f"{code.co_filename}:{code.co_firstlineno}"
            reached(str(compile_id), limit, code.co_name, source, caller["recompile_reason"] or "")
        return exceeded, limit

    setattr(exceeds_recompile_limit, _MARK, True)
    convert_frame.exceeds_recompile_limit = exceeds_recompile_limit
