"""What does omni cost? Time a call and compile time, cold and warm, of omni over Inductor on the same graphs.

    python bench/bench_overhead.py [--quick]

Targets: a call at most 1.01, a compilation at most 1.10; a graph with one eager node in the middle at most 5 µs more
than its two Inductor halves; verification at most 0.15 of a first call.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from harness import add_common_arguments, interleave, machine, markdown_table
from overhead_cuts import HEADER, bench_cuts
from torch import nn
from verification import HEADER as VERIFY_HEADER
from verification import bench_verify

BACKENDS = ("inductor", "omni")


def tiny_graphs(device: str) -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Graphs in which a call is nearly all overhead."""
    x = torch.randn(8, 8, device=device)
    mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(device)
    return {
        "pointwise 8x8": (lambda a: (a.sin() + 1) * a, (x,)),
        "two inputs": (lambda a, b: (a + b).relu().sum(), (x, x)),
        "mlp 16": (mlp, (torch.randn(4, 16, device=device),)),
    }


def bench_calls(arguments: argparse.Namespace) -> list[list[str]]:
    """Ratio of the time a call, without and with gradients."""
    rows: list[list[str]] = []
    rounds = arguments.rounds or (7 if arguments.quick else 21)
    for name, (function, inputs) in tiny_graphs(arguments.device).items():
        for training in (False, True):
            if training and not isinstance(function, nn.Module):
                continue
            candidates = {b: _caller(function, inputs, b, training=training) for b in BACKENDS}
            # Inductor against itself says how much of a difference is noise.
            candidates["again"] = _caller(function, inputs, "inductor", training=training)
            times = interleave(
                candidates, rounds=rounds, seconds=0.05 if arguments.quick else 0.2, device=arguments.device
            )
            base = times["inductor"]
            label = f"{name}{', training step' if training else ''}"
            rows.append(
                [
                    label,
                    f"{base.median * 1e6:.1f}",
                    f"{times['omni'].median * 1e6:.1f}",
                    f"{times['omni'].ratio_to(base):.3f}",
                    f"{times['again'].ratio_to(base):.3f}",
                ]
            )
    return rows


def _caller(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], backend: str, *, training: bool
) -> Callable[[], Any]:
    compiled = torch.compile(_own_frame(function), backend=backend)

    def step() -> None:
        compiled(*inputs).sum().backward()

    def call() -> None:
        with torch.no_grad():
            compiled(*inputs)

    run = step if training else call
    for _ in range(3):
        run()
    return run


def _own_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo keeps its cache by code object, for all backends together."""
    namespace: dict[str, Any] = {"function": function}
    exec("def own_frame(*args):\n    return function(*args)\n", namespace)
    return namespace["own_frame"]


COMPILE = """
import gc, json, sys, time, torch
sys.path[:0] = [{folder!r}]
from omnicomp.testing.models import build
case = build({model!r}, "tiny").to({device!r}, torch.float32)
# Inductor's own start-up (headers, worker pool) and omnicomp's import are paid before the clock starts.
torch.compile(torch.sin, backend={backend!r})(torch.ones(3, device={device!r}))
# A collection of all that torch's import made takes 0.3 s, and falls into one run or the other by chance.
gc.collect()
gc.freeze()
start = time.perf_counter()
with torch.no_grad():
    torch.compile(case.model, backend={backend!r}{options})(**case.inputs)
print(json.dumps(time.perf_counter() - start))
"""


def bench_compile(arguments: argparse.Namespace) -> list[list[str]]:
    """Ratio of the time of the first call in a process of its own, with cold caches and then with warm ones."""
    rows: list[list[str]] = []
    rounds = arguments.rounds or (2 if arguments.quick else 3)
    # Without its passes omni compiles the graph that Inductor compiles: that is the cost of the machinery. With them
    # it compiles another graph, which is what a user sees.
    variants: dict[str, dict[str, Any]] = {"omni, passes off": {"disable_passes": ["attention_fusion"]}, "omni": {}}
    for model in arguments.models:
        seconds: dict[tuple[str, str], list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for number in range(rounds + 1):
                for name in ("inductor", *variants):
                    # A tag of its own makes the graph caches cold; a folder of its own would make Inductor compile its
                    # headers again, too.
                    tag = uuid.uuid4().hex
                    program = _program(arguments, model, name, variants)
                    for state in ("cold", "warm"):
                        measured = _process(program, folder, tag)
                        if number > 0:  # the first round fills the cache of C++ objects, which tags do not part
                            seconds.setdefault((state, name), []).append(measured)
        for state in ("cold", "warm"):
            base = seconds[state, "inductor"]
            for name in variants:
                times = seconds[state, name]
                ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
                cells = [f"{statistics.median(values):.2f}" for values in (base, times)]
                rows.append([f"{model}, {state}, {name}", *cells, f"{ratio:.3f}"])
    return rows


def _program(arguments: argparse.Namespace, model: str, name: str, variants: dict[str, dict[str, Any]]) -> str:
    options = f", options={variants[name]!r}" if variants.get(name) else ""
    return COMPILE.format(
        folder=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        model=model,
        device=arguments.device,
        backend=name.split(",")[0],
        options=options,
    )


def _process(program: str, folder: str, tag: str) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCH_COMPILE_CACHE_KEY_TAG": tag}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return float(json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--only", choices=["calls", "cuts", "compile", "verify"])
    parser.add_argument("--models", nargs="+", default=["bert"], help="models of the compile times")
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(machine(arguments.device))
    if arguments.only in (None, "calls"):
        header = ["graph", "Inductor µs", "omni µs", "omni / Inductor", "Inductor / Inductor"]
        print(markdown_table(header, bench_calls(arguments)))
    if arguments.only in (None, "cuts"):
        print(markdown_table(HEADER, bench_cuts(arguments)))
    if arguments.only in (None, "compile"):
        header = ["compilation", "Inductor s", "omni s", "omni / Inductor"]
        print(markdown_table(header, bench_compile(arguments)))
    if arguments.only in (None, "verify"):
        print(markdown_table(VERIFY_HEADER, bench_verify(arguments)))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
