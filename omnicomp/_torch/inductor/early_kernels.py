"""Kernels that are ready earlier: those in C++ are submitted sooner, those in Triton are compiled by more processes.

Inductor compiles all kernels of a graph when it runs the module that it generated. Here a C++ kernel is submitted as
soon as it is defined, by the line that defines it in that module: the module finds it among those that are under way.

A Triton kernel is compiled by one process, one configuration after another: six for a kernel of two dimensions, each of
which takes most of a second where it computes `sin` and `cos`. Once there are fewer kernels than processes, those that
have nothing to do compile the configurations of the others into Triton's cache, where the first process finds them.
"""

import contextvars
import functools
import inspect
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import LambdaFuture, _load_triton_kernel_from_source
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.runtime.compile_tasks import _worker_compile_triton

from omnicomp.errors import first_line
from omnicomp.safety.privacy import logger

log = logger("omnicomp.early_kernels")

_DEFINES: Final = "async_compile.cpp_pybinding("
# Seconds. A kernel that takes less is compiled before another process could help.
_SLOW: Final = 0.4
_MOST_HELPERS: Final = 8  # processes for one kernel


def watch() -> None:
    """Have kernels submitted when they are defined; once a process."""
    if not hasattr(_submitting, "before"):
        _submitting.before = PythonWrapperCodegen.define_kernel  # type: ignore[attr-defined]
        PythonWrapperCodegen.define_kernel = _submitting  # type: ignore[method-assign]
        _helping.before = AsyncCompile._wait_futures  # type: ignore[attr-defined]
        AsyncCompile._wait_futures = _helping  # type: ignore[method-assign]


def _submitting(self: PythonWrapperCodegen, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
    _submitting.before(self, kernel_name, kernel_body, *args, **kwargs)  # type: ignore[attr-defined]
    if kernel_body.startswith(_DEFINES) and get_compile_threads() > 1:
        try:
            eval(kernel_body, {"async_compile": AsyncCompile()})  # the line of the generated module
        except Exception as error:  # noqa: BLE001 - the generated module meets the same
            log.debug("omni: the kernel %s was not compiled early: %s", kernel_name, first_line(error))


def _helping(self: AsyncCompile, scope: dict[str, Any]) -> None:
    futures = [each for each in scope.values() if isinstance(each, LambdaFuture)]
    kernels = {each.future: each for each in futures if each.future is not None and not each.future.done()}
    if kernels:
        try:
            # In a thread, as this one loads the kernels that are there while it waits for the others.
            args = (_help, kernels, get_compile_threads())
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=args, name="omnicomp-early-kernels", daemon=True).start()
        except RuntimeError as error:  # no more threads
            log.debug("omni: no other process helped to compile kernels: %s", first_line(error))
    _helping.before(self, scope)  # type: ignore[attr-defined]


def _help(kernels: dict[Future[Any], LambdaFuture], processes: int) -> None:
    try:
        left = wait(kernels, timeout=_SLOW).not_done
        while 2 * len(left) > processes:
            left = wait(left, return_when=FIRST_COMPLETED).not_done
        _share({task: kernels[task] for task in kernels if task in left}, processes)
    except Exception as error:  # noqa: BLE001 - the kernels are compiled all the same
        log.debug("omni: no other process helped to compile kernels: %s", first_line(error))


def _share(kernels: dict[Future[Any], LambdaFuture], processes: int) -> None:
    """Have the configurations of kernels compiled by the processes that have nothing to do."""
    for future in kernels.values():
        # What `AsyncCompile.triton` submitted, which holds its name and source for the error that it may raise.
        kernel = inspect.getclosurevars(future.result_fn).nonlocals
        if {"kernel_name", "source_code", "reload_kernel_in_parent"} <= kernel.keys():
            helpers = min(_MOST_HELPERS, processes // len(kernels) - 1)
            _compile_configurations(kernel["kernel_name"], kernel["source_code"], helpers)


def _compile_configurations(name: str, source: str, helpers: int) -> None:
    """Have them compiled by so many processes; from the last one down, as the process of the kernel goes upwards."""
    env = {
        v: os.environ[v]
        for v in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH")
        if v in os.environ
    }
    for helper in range(helpers):
        # Behind the kernel, so that its lines, which are in Triton's key, have their numbers.
        some = f"{source}\n{name}.configs = {name}.configs[:0:-1][{helper}::{helpers}] or {name}.configs[:1]\n"
        load = functools.partial(_load_triton_kernel_from_source, name, some)
        AsyncCompile.process_pool().submit(_worker_compile_triton, load, env, {})
