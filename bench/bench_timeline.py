"""What does recording cost? Events in a compilation, with and without a file, and in calls of what was compiled.

    python bench/bench_timeline.py [--quick]

Targets: at most 0.02 of a compilation goes on recording, the file included; nothing measurable in a call.

A compilation's wall time varies by more than that, so the share is measured twice: as the ratio of whole compilations
that take turns, and by a clock around each event that is recorded. The graph caches are warm, so that the compilations
are as short as they get; eager alone is shorter still.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import add_common_arguments, interleave, machine, markdown_table

import omnicomp
from omnicomp.testing.models import build
from omnicomp.timeline import Timeline

LOWERINGS: dict[str, dict[str, Any]] = {"warm": {}, "eager": {"lowerings": ["eager"]}}
COMPILE_HEADER = [
    "compilation",
    "seconds",
    "events",
    "KiB",
    "recording, ms",
    "with a file, ms",
    "share with a file",
    "file / no file",
    "no file / no file",
]
CALL_HEADER = ["graph", "no file µs", "file / no file", "ranges / no file", "no file / no file"]


class Spent:
    """Seconds that went on `Timeline.append`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside."""
        original = Timeline.append

        def append(timeline: Timeline, event: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(timeline, event)
            finally:
                self.seconds += time.perf_counter() - start

        Timeline.append = append  # type: ignore[method-assign]
        try:
            yield
        finally:
            Timeline.append = original  # type: ignore[method-assign]


def compile_once(model: torch.nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a first call after a reset, and those of them that went on recording."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    spent = Spent()
    with spent.counting(), torch.no_grad():
        start = time.perf_counter()
        torch.compile(model, backend="omni", options=options)(**inputs)
        return time.perf_counter() - start, spent.seconds


def bench_compile(arguments: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Rows of the first table."""
    rows: list[list[str]] = []
    rounds = arguments.rounds or (3 if arguments.quick else 11)
    for name in arguments.models:
        case = build(name, "tiny").to(arguments.device, torch.float32)
        for kind, options in LOWERINGS.items():
            path = folder / f"{name}-{kind}.jsonl"
            candidates = {"none": options, "file": {**options, "timeline": str(path)}, "again": options}
            for warmed in candidates.values():
                compile_once(case.model, case.inputs, warmed)
            path.unlink()
            walls: dict[str, list[float]] = {key: [] for key in candidates}
            spent: dict[str, list[float]] = {key: [] for key in candidates}
            for number in range(rounds):
                for key in candidates if number % 2 == 0 else reversed(list(candidates)):
                    wall, recording = compile_once(case.model, case.inputs, candidates[key])
                    walls[key].append(wall)
                    spent[key].append(recording)
            lines = path.read_bytes().count(b"\n") / rounds
            shares = [recording / wall for recording, wall in zip(spent["file"], walls["file"], strict=True)]
            rows.append(
                [
                    f"{name}, {kind}",
                    f"{statistics.median(walls['none']):.2f}",
                    f"{lines:.0f}",
                    f"{path.stat().st_size / rounds / 1024:.0f}",
                    f"{statistics.median(spent['none']) * 1e3:.2f}",
                    f"{statistics.median(spent['file']) * 1e3:.2f}",
                    f"{statistics.median(shares):.4f}",
                    f"{ratio(walls['file'], walls['none']):.3f}",
                    f"{ratio(walls['again'], walls['none']):.3f}",
                ]
            )
    return rows


def ratio(times: list[float], base: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def bench_calls(arguments: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Rows of the second table: tiny graphs, in which a call is nearly all overhead."""
    rows: list[list[str]] = []
    x = torch.randn(8, 8, device=arguments.device)
    graphs: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "whole": (lambda a: (a.sin() + 1) * a, {"summary": False}),
        "cut": (
            lambda a: (a.exp() + 1).digamma().sin() * 2,
            {"lowerings": {"aten.digamma": ["eager"]}, "summary": False},
        ),
    }
    for name, (function, options) in graphs.items():
        variants = {
            "none": options,
            "file": {**options, "timeline": str(folder / f"{name}.jsonl")},
            "ranges": {**options, "ranges": True},
            "again": options,
        }
        candidates = {key: caller(function, x, each) for key, each in variants.items()}
        rounds, seconds = arguments.rounds or (5 if arguments.quick else 21), 0.05 if arguments.quick else 0.2
        times = interleave(candidates, rounds=rounds, seconds=seconds, device=arguments.device)
        base = times["none"]
        ratios = [f"{times[key].ratio_to(base):.3f}" for key in ("file", "ranges", "again")]
        rows.append([name, f"{base.median * 1e6:.1f}", *ratios])
    return rows


def caller(function: Callable[..., Any], x: torch.Tensor, options: dict[str, Any]) -> Callable[[], Any]:
    """A call of the function, compiled in a code object of its own and warmed up."""
    namespace: dict[str, Any] = {"function": function}
    exec("def own_frame(a):\n    return function(a)\n", namespace)
    compiled = torch.compile(namespace["own_frame"], backend="omni", options=options)

    def call() -> None:
        with torch.no_grad():
            compiled(x)

    for _ in range(3):
        call()
    return call


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--only", choices=["compile", "calls"])
    parser.add_argument("--models", nargs="+", default=["bert", "llama"], help="models of the compile times")
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(machine(arguments.device))
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only in (None, "compile"):
            print(markdown_table(COMPILE_HEADER, bench_compile(arguments, Path(folder))))
        if arguments.only in (None, "calls"):
            print(markdown_table(CALL_HEADER, bench_calls(arguments, Path(folder))))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
