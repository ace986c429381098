"""What kind of failure Inductor raised: of the graph, of the machine, or of the moment."""

import errno
import subprocess
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Final, Literal

import torch
from torch._inductor.exc import CppCompileError, LoweringException

from omnicomp._torch.inductor.compile_fx import is_missing_tool

__all__ = ["Kind", "chain", "kind_of"]

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
