"""Timing that holds on a noisy machine: candidates run in turn, and what is reported are medians of ratios."""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Timing", "add_common_arguments", "interleave", "machine", "markdown_table"]


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


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    seconds: float,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time candidates in turn, so that a drift of the machine meets all of them.

    Args:
        candidates: functions without arguments, warmed up already.
        rounds: how often each candidate has its turn; the order is reversed every other round.
        seconds: how long a turn lasts, about.
        device: device type to wait for before the clock is read.
    """
    calls = {name: _calls_for(function, seconds, device) for name, function in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    gc.disable()
    try:
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                times[name].append(_time(candidates[name], calls[name], device))
            gc.collect()
    finally:
        gc.enable()
    return {name: Timing(rounds=tuple(values)) for name, values in times.items()}


def _calls_for(function: Callable[[], Any], seconds: float, device: str) -> int:
    once = max(_time(function, 3, device), 1e-7)
    return max(1, int(seconds / once))


def _time(function: Callable[[], Any], calls: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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
