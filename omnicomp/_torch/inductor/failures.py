"""What kind of failure Inductor raised: of the graph, of the machine, or of the moment."""

import contextlib
import errno
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Literal

import torch
import torch._inductor.config
from torch._inductor import select_algorithm
from torch._inductor.exc import CppCompileError, LoweringException
from torch._inductor.select_algorithm import NoValidChoicesError

from omnicomp._torch.inductor.compile_fx import is_missing_tool

Kind = Literal["graph", "machine", "moment"]

_MACHINE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
_MOMENT: Final = (MemoryError, torch.OutOfMemoryError, TimeoutError, subprocess.TimeoutExpired, BrokenProcessPool)
# What g++ and clang say if the system ended them, which it does when memory runs out.
_KILLED: Final = ("Killed signal", "terminated by signal", "virtual memory exhausted", "out of memory")


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what Inductor wrapped in it, and what caused it, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        # Inductor wraps what a lowering raised `from None`, and keeps its text alone.
        hidden = current.__suppress_context__ and not isinstance(current, LoweringException)
        cause = current.__cause__ or (None if hidden else current.__context__)
        waiting += [cause, getattr(current, "inner_exception", None)]


def kind_of(error: BaseException) -> Kind:
    """Where a failure to build comes from.

    Returns:
        `machine`: whatever is built here fails, as there is no compiler, or its files can't be written. `moment`: it
        ran out of memory or time, which another attempt may not. `graph`: anything else, which will be the same again.
    """
    found: Kind = "graph"
    for each in chain(error):
        if is_missing_tool(each) or (isinstance(each, OSError) and each.errno in _MACHINE):
            return "machine"
        killed = isinstance(each, CppCompileError) and any(sign in each.output for sign in _KILLED)
        if killed or isinstance(each, _MOMENT):
            found = "moment"
    return found


_TUNING: Final = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "benchmark_fusion",
    "benchmark_combo_kernel",
)


def without_autotuning() -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor takes what it would take without measuring."""
    config = torch._inductor.config
    return config.patch({name: False for name in _TUNING if hasattr(config, name)})  # type: ignore[attr-defined]


def failure_of_autotuning(error: BaseException) -> BaseException | None:
    """What made a build fail, if no choice could be measured, or memory ran out while one was; None otherwise."""
    if not any(getattr(torch._inductor.config, name, False) for name in _TUNING):
        return None
    for each in chain(error):
        if isinstance(each, NoValidChoicesError):
            return each
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            frame = each.__traceback__
            while frame is not None:
                if frame.tb_frame.f_globals.get("__name__") == select_algorithm.__name__:
                    return each
                frame = frame.tb_next
    return None


def not_kept(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A part that AOTAutograd's cache does not store, as it is not what its key stands for.

    That cache stores what has a key. Torch 2.11 asks whether there is such an attribute, whatever its value.
    """

    def call(inputs: list[Any]) -> Any:
        return compiled(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
