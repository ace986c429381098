"""Threads and processes that Inductor compiles in: they know for which build, and who waits for them when to stop.

Each function takes one of torch's and returns what takes its place while a build has a bound on its time
(`_torch/budget.py`).
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from torch._inductor import codecache

from omnicomp._torch.inductor.build_clock import Meter, Spent, active, carrying

__all__ = ["Executor", "as_completed", "pool_benchmark", "pool_target", "process_get", "submit", "submit_to_pool"]

# How often who waits looks at the clock.
_SLICE: Final = 0.1


def submit(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the hand-over of a task to one of Inductor's threads, which then works for this build."""

    @functools.wraps(original)
    def submit(cls: Any, task: Callable[..., Any]) -> Any:
        meter = active()
        if meter is None:
            return original(cls, task)
        # Who waits for a C++ kernel looks whether it is there and compiles it if not, in this build or a later one,
        # which must not meet this one's end.
        retried = getattr(task, "func", None) is codecache._worker_compile_cpp

        def carried() -> Any:
            with carrying(meter):
                try:
                    meter.check()
                    return task()
                except Spent:
                    if retried:
                        return None
                    raise

        return _bounded(original(cls, carried))

    return submit


def submit_to_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `submit` of Triton's worker processes: who waits for one waits as long as there is time."""

    @functools.wraps(original)
    def submit(self: Any, *args: Any, **kwargs: Any) -> Any:
        future = original(self, *args, **kwargs)
        return future if active() is None else _bounded(future)

    return submit


def _bounded(future: Any) -> Any:
    """The future itself; to wait for it takes no longer than the build that waits has time."""
    if isinstance(future, concurrent.futures.Future):
        future.result = functools.partial(_result, future)  # type: ignore[method-assign]
    return future


def _result(future: "concurrent.futures.Future[Any]", timeout: float | None = None) -> Any:
    meter = active()
    end = None if timeout is None else time.monotonic() + timeout
    while meter is not None and not future.done() and (end is None or time.monotonic() < end):
        meter.check()
        concurrent.futures.wait([future], _SLICE)
    try:
        rest = None if end is None else max(end - time.monotonic(), 0.0)
        return concurrent.futures.Future.result(future, rest)
    except Spent:
        if meter is not None:
            meter.check()
        raise RuntimeError("the build that had begun to compile this was given up") from None


class Executor(concurrent.futures.ThreadPoolExecutor):
    """Threads that work for the build that hands them a task."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Hand over a task."""
        meter = active()
        if meter is None:
            return super().submit(fn, *args, **kwargs)

        def carried() -> Any:
            with carrying(meter):
                meter.check()
                return fn(*args, **kwargs)

        return super().submit(carried)


def as_completed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the wait for the choices of autotuning that are compiled in threads."""

    @functools.wraps(original)
    def as_completed(fs: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
        meter = active()
        if meter is None:
            yield from original(fs, timeout)
            return
        end = None if timeout is None else time.monotonic() + timeout
        waiting = set(fs)
        while waiting:
            meter.check()
            done, waiting = concurrent.futures.wait(waiting, _SLICE, concurrent.futures.FIRST_COMPLETED)
            meter.check()
            if not done and end is not None and time.monotonic() > end:
                raise concurrent.futures.TimeoutError
            yield from done

    return as_completed


# The choices that a process of autotuning measures for a build, by their identity.
_choices: dict[int, Meter] = {}


def pool_benchmark(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the measurement of choices in other processes: notes for which build."""

    @functools.wraps(original)
    def benchmark(self: Any, choices: list[Any]) -> Any:
        meter = active()
        if meter is None:
            return original(self, choices)
        mine = {id(choice): meter for choice in choices}
        _choices.update(mine)
        try:
            return original(self, choices)
        finally:
            for key in mine:
                _choices.pop(key, None)

    return benchmark


def pool_target(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the threads that wait for these processes."""

    @functools.wraps(original)
    def target(self: Any, choice: Any) -> Any:
        meter = _choices.get(id(choice))
        if meter is None:
            return original(self, choice)
        with carrying(meter):
            meter.check()
            seconds = original(self, choice)
            meter.check()  # it answers infinity where it was ended, which must not be kept as a measurement
        return seconds

    return target


def process_get(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the wait for one measurement."""

    @functools.wraps(original)
    def get(self: Any, timeout: float = 120.0) -> Any:
        meter = active()
        return original(self, timeout if meter is None else min(timeout, max(meter.left, 0.0)))

    return get
