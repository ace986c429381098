"""A bound on the time that Inductor takes to build: where it looks at the clock, and what is ended when time is up.

Inductor has no such bound. While a build that has one goes on, and only then, some of its functions are wrapped: before
each node is lowered, pair of nodes fused, kernel generated, choice of autotuning compiled or measured, and compiler
started, the clock is read, and what the time goes on is noted. Who waits for a compiler in another thread or process
waits no longer than there is time. A C++ compiler that runs then is ended with all that it started, and what it had
written is removed. Triton's worker processes, which torch keeps for all builds, finish what they do: it is right, and
Triton's cache will have it for whoever asks next. What is wrapped does nothing in a thread whose build has no bound.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final

import torch._inductor.config
from torch._inductor import codecache, cpp_builder, select_algorithm
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.autotune_process import TuningProcess, TuningProcessPool
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.compile_worker.tracked_process_pool import TrackedProcessPoolExecutor
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import Scheduler
from torch._inductor.select_algorithm import AlgorithmSelectorCache, NoValidChoicesError

from omnicomp._torch.inductor.build_clock import AUTOTUNING, Meter, Spent, active, metered, own
from omnicomp._torch.inductor.compiler_process import run_compile_cmd
from omnicomp._torch.inductor.failures import chain
from omnicomp._torch.inductor.interruptible_waits import (
    Executor,
    as_completed,
    pool_benchmark,
    pool_target,
    process_get,
    submit,
    submit_to_pool,
)
from omnicomp.errors import BudgetSpentError

__all__ = [
    "Meter",
    "autotunes",
    "building",
    "failure_of_autotuning",
    "hooked",
    "not_kept",
    "without_autotuning",
]

_TUNING: Final = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "benchmark_fusion",
    "benchmark_combo_kernel",
)

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def building(meter: Meter) -> Generator[None]:
    """Build with Inductor inside, in the time that is left to a meter.

    Raises:
        BudgetSpentError: the time is used up; the build was given up.
    """
    _hooks.put()
    try:
        with metered(meter):
            meter.check()
            yield
    except Spent as spent:
        if spent.meter is not meter:
            raise
        raise _error(meter) from None
    except Exception as error:
        if meter.raised:  # a consequence: who was told that no time is left failed with an error of its own
            raise _error(meter) from error
        raise
    finally:
        _hooks.take()


def _error(meter: Meter) -> BudgetSpentError:
    return BudgetSpentError(f"building took {meter.used:.1f} s, and {meter.allowed:g} s are allowed")


def autotunes() -> bool:
    """Whether Inductor measures choices while it builds, under the settings now in force."""
    return any(getattr(torch._inductor.config, name, False) for name in _TUNING)


def without_autotuning() -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor takes what it would take without measuring."""
    config = torch._inductor.config
    return config.patch({name: False for name in _TUNING if hasattr(config, name)})  # type: ignore[attr-defined]


def failure_of_autotuning(error: BaseException) -> BaseException | None:
    """What made a build fail, if no choice could be measured, or memory ran out while one was; None otherwise."""
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


# ---- what the wrapped functions do


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        meter = active()
        if meter is not None:
            meter.check()
        return original(*args, **kwargs)

    return call


def _phase(name: str) -> Wrapper:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            meter = active()
            if meter is None:
                return original(*args, **kwargs)
            meter.check()
            if own() is None:
                return original(*args, **kwargs)
            if name.endswith("compile"):
                meter.compiler = name
            with meter.phase(name):
                return original(*args, **kwargs)

        return call

    return wrap


def _run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_node(self: Any, n: torch.fx.Node) -> Any:
        meter = own()
        if meter is None:
            return original(self, n)
        meter.check()
        with meter.timed(n):
            return original(self, n)

    return run_node


def _benchmark_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def benchmark_choice(cls: Any, choice: Any, *args: Any, **kwargs: Any) -> Any:
        meter = active()
        if meter is None:
            return original(cls, choice, *args, **kwargs)
        meter.check()
        meter.under_way = f"the choice {getattr(choice, 'name', choice)} of autotuning"
        with contextlib.nullcontext() if own() is None else meter.phase(AUTOTUNING):
            return original(cls, choice, *args, **kwargs)

    return benchmark_choice


def _do_autotuning(original: Callable[..., Any]) -> Callable[..., Any]:
    phased = _phase(AUTOTUNING)(original)

    @functools.wraps(original)
    def do_autotuning(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return phased(self, *args, **kwargs)
        except Spent:
            # It would hand the unfinished compilations of these choices to the next build.
            self.precompile_cache.clear()
            raise
        finally:
            meter = active()
            if meter is not None:
                meter.under_way = ""

    return do_autotuning


def _define_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def define_kernel(self: Any, src_code: Any, nodes: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        name = original(self, src_code, nodes, *args, **kwargs)
        meter = own()
        if meter is not None:
            meter.origins[str(name)] = meter.origins.get(str(name), frozenset()) | _origins(nodes)
        return name

    return define_kernel


def _origins(nodes: Iterable[Any]) -> frozenset[str]:
    """Names of the graph's nodes that a kernel computes."""
    found: set[str] = set()
    for each in nodes:
        for node in each.get_nodes() if hasattr(each, "get_nodes") else ():
            if node.node is not None:
                found |= {origin.name for origin in node.node.get_origins()}
    return frozenset(found)


def _wait_futures(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_futures(self: Any, scope: Mapping[str, Any]) -> Any:
        meter = own()
        if meter is None:
            return original(self, scope)
        waiting = {name: value for name, value in scope.items() if isinstance(value, codecache.CodeCacheFuture)}
        meter.names.update((id(value), name) for name, value in waiting.items())
        with meter.phase(meter.compiler):
            return original(self, scope)

    return wait_futures


def _future_result(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter = own()
        if meter is None:
            return original(self, *args, **kwargs)
        name = meter.names.get(id(self), "")
        meter.check()
        if not name:
            return original(self, *args, **kwargs)
        with meter.timed(name):
            return original(self, *args, **kwargs)

    return result


# ---- putting them there


_WRAPPED: Final[tuple[tuple[Any, str, Wrapper], ...]] = (
    (GraphLowering, "run", _phase("lowering")),
    (GraphLowering, "run_node", _run_node),
    (GraphLowering, "codegen", _phase("code generation")),
    (Scheduler, "__init__", _phase("scheduling")),
    (Scheduler, "fuse_nodes_once", _checked),
    (Scheduler, "can_fuse", _checked),
    (Scheduler, "enter_context", _checked),
    (Scheduler, "compile_kernel", _phase(AUTOTUNING)),
    (Scheduler, "benchmark_codegened_module", _phase(AUTOTUNING)),
    (CppScheduling, "define_kernel", _define_kernel),
    (TritonScheduling, "define_kernel", _define_kernel),
    (AlgorithmSelectorCache, "make_precompile_fn", _phase(AUTOTUNING)),
    (AlgorithmSelectorCache, "do_autotuning", _do_autotuning),
    (AlgorithmSelectorCache, "benchmark_choice", _benchmark_choice),
    (select_algorithm, "ThreadPoolExecutor", lambda _: Executor),
    (select_algorithm, "as_completed", as_completed),
    (TuningProcessPool, "benchmark", pool_benchmark),
    (TuningProcessPool, "target", pool_target),
    (TuningProcess, "get", process_get),
    (AsyncCompile, "submit", submit),
    (AsyncCompile, "cpp_pybinding", _phase("C++ compile")),
    (AsyncCompile, "cpp", _phase("C++ compile")),
    (AsyncCompile, "triton", _phase("Triton compile")),
    (AsyncCompile, "_wait_futures", _wait_futures),
    (SubprocPool, "submit", submit_to_pool),
    (TrackedProcessPoolExecutor, "submit", submit_to_pool),
    (codecache.LambdaFuture, "result", _future_result),
    (CachingAutotuner, "_precompile_config", _checked),
    (cpp_builder, "_run_compile_cmd", run_compile_cmd),
)


class _Hooks:
    """The wrapped functions, there as long as some thread builds with a bound."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._builds = 0
        self._there: list[tuple[Any, str, Any, Any]] = []

    def put(self) -> None:
        """One more build has a bound."""
        with self._lock:
            self._builds += 1
            if self._builds == 1:
                for owner, name, wrap in _WRAPPED:
                    before = owner.__dict__.get(name)
                    if before is None:
                        continue  # another release of torch has no such step, and the clock is read at the others
                    wrapped: Any = wrap(before.__func__ if isinstance(before, classmethod) else before)
                    now = classmethod(wrapped) if isinstance(before, classmethod) else wrapped
                    setattr(owner, name, now)
                    self._there.append((owner, name, before, now))

    def take(self) -> None:
        """One build less."""
        with self._lock:
            self._builds -= 1
            if not self._builds:
                for owner, name, before, now in reversed(self._there):
                    if owner.__dict__[name] is now:  # else somebody wrapped it meanwhile, and ours does nothing in it
                        setattr(owner, name, before)
                self._there.clear()

    def forked(self) -> None:
        """In a process that was forked, where no other thread builds."""
        self._lock = threading.Lock()
        if self._builds and active() is None:
            self._builds = 1
            self.take()


_hooks: Final = _Hooks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hooks.forked)


def hooked() -> list[str]:
    """Names of what is wrapped at the moment."""
    return [f"{owner.__name__}.{name}" for owner, name, _, _ in _hooks._there]
