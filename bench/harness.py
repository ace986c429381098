"""Timing that holds on a noisy machine: candidates run in turn, and what is reported are medians of ratios."""

import argparse
import dataclasses
import functools
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch

# How `in_turn.py` and its benches speak: a folder for each, and a file from either side.
TURN: Final = "OMNICOMP_BENCH_TURN"
READY: Final = "ready"
GO: Final = "go"

# Calls in one turn by the device's clock: their launches have to fit into the device's queue behind the filler.
QUEUED_CALLS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds a call of one candidate in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds a call."""
        return statistics.median(self.rounds)

    def ratio_to(self, other: "Timing") -> float:
        """Median over the rounds of this candidate's time over the other's in the same round."""
        return statistics.median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))


def wait_for_turn(device: str) -> None:
    """Say that everything is compiled and warmed up, and wait until nothing else runs (`in_turn.py`).

    By itself, a bench goes on at once.
    """
    name = os.environ.get(TURN)
    if not name:
        return
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    Path(name, READY).touch()
    while not Path(name, GO).exists():
        time.sleep(0.1)


def kernel_seconds(call: Callable[[], Any]) -> float:
    """Seconds of the kernels of one call on CUDA, by torch's profiler, without what lies between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def wait_for_room(gibibytes: float, device: str) -> None:
    """Wait until so much of the device's memory is free; for five minutes at most."""
    deadline = time.monotonic() + 300
    while device == "cuda" and torch.cuda.mem_get_info()[0] < gibibytes * 2**30 and time.monotonic() < deadline:
        time.sleep(0.5)


def with_memory(function: Callable[[], Any], device: str) -> Any:
    """Call a function, and again where memory is short because other benches warm up beside; for five minutes at most.

    Raises:
        torch.OutOfMemoryError: there is too little, by itself at once.
    """
    deadline = time.monotonic() + 300
    while True:
        try:
            return function()
        except torch.OutOfMemoryError:
            if not os.environ.get(TURN) or device != "cuda" or time.monotonic() > deadline:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(5)


def leave() -> None:
    """End at once if another bench waits for its turn; what Python and the driver clean up takes seconds."""
    if os.environ.get(TURN):
        sys.stdout.flush()
        os._exit(0)


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float,
    device: str = "cpu",
    clock: Literal["wall", "device"] = "wall",
) -> dict[str, Timing]:
    """Time candidates in turn, so that a drift of the machine meets all of them.

    On a device that the host launches work for, each turn begins with a call that does not count: what ran before it,
    as the garbage collector between two rounds, leaves the host's caches cold.

    Args:
        candidates: functions without arguments, warmed up already.
        rounds: how often each candidate has its turn; the order is reversed every other round.
        seconds: how long a turn lasts, about.
        device: device type to wait for before the clock is read.
        clock: `wall` is what a user waits for. `device` is the time between two events on the device, whose queue was
            filled before, so that the host's launches are hidden as they are in a model; a candidate that waits for
            the device on its way empties the queue, and its host time is seen. On the CPU both are the same.
    """
    clocks = {name: _clock(function, device, clock) for name, function in candidates.items()}
    calls = {name: _calls_for(clocks[name], seconds, clock) for name in candidates}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    gc.disable()
    try:
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                if device != "cpu":
                    candidates[name]()
                times[name].append(clocks[name](calls[name]))
            gc.collect()
    finally:
        gc.enable()
    return {name: Timing(rounds=tuple(values)) for name, values in times.items()}


def _calls_for(timed: Callable[[int], float], seconds: float, clock: str) -> int:
    calls = max(1, int(seconds / max(timed(3), 1e-7)))
    return min(calls, QUEUED_CALLS) if clock == "device" else calls


def _clock(function: Callable[[], Any], device: str, clock: str) -> Callable[[int], float]:
    """A function that makes a number of calls and returns the seconds of one."""
    if clock == "device" and device == "cuda":
        return _DeviceClock(function)

    def wall(calls: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        _synchronize(device)
        return (time.perf_counter() - start) / calls

    return wall


class _DeviceClock:
    """Times calls between two events, behind work that keeps the device busy while the host launches them."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.host = 0.0  # seconds that the host needs for one call; measured by the first turn

    def __call__(self, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if not self.host:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(3):
                self.function()
            self.host = (time.perf_counter() - began) / 3
        filler, once = _filler()
        torch.cuda.synchronize()
        for _ in range(math.ceil(1.5 * self.host * calls / once) + 1):
            filler.zero_()
        start.record()
        for _ in range(calls):
            self.function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


@functools.cache
def _filler() -> tuple[torch.Tensor, float]:
    """A GiB to write zeros to, and the seconds that this takes."""
    buffer = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        buffer.zero_()
    torch.cuda.synchronize()
    return buffer, (time.perf_counter() - start) / 10


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(function: Callable[[], Any], device: str) -> float | None:
    """GiB that one call allocates at most, above what lives before it; None where the device does not count."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def relative_error(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm of the references, all tensors taken as one vector."""
    pairs = list(zip(values, references, strict=True))
    difference = sum(float((value.to(reference.dtype) - reference).norm()) ** 2 for value, reference in pairs)
    return math.sqrt(difference / sum(float(reference.norm()) ** 2 for _, reference in pairs))


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def machine(device: str) -> str:
    """One line about where the numbers come from."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"torch {torch.__version__}, {where}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that every bench takes."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=None, help="turns of each candidate")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
