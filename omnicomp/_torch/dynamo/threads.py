"""Threads that compile beside threads that call: torch keeps one flag for all of them."""

import functools
from typing import Final

import torch.fx._symbolic_trace
from torch._dynamo.convert_frame import compile_lock

__all__ = ["another_thread_compiles", "tell_threads_apart"]

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
