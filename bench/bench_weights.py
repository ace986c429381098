"""Weights cast once: inference of float32 models in bfloat16 at batches of 1, 8 and 64.

    python bench/bench_weights.py [--quick] [--device cuda] [--mode reduce-overhead]

`once` is omni with copies of the weights that are kept, `call` is omni with casts in each call, and `autocast` is
Inductor under `torch.autocast`. A ratio is the other's time over that of `once`, so more than 1 is faster; times are
medians over interleaved rounds. The last line is what a call pays for looking whether 200 copies still hold.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_models import GPU_SIZES
from harness import (
    add_common_arguments,
    geometric_mean,
    interleave,
    machine,
    markdown_table,
    peak_memory,
    wait_for_turn,
)

from omnicomp import weights
from omnicomp._torch.inductor.compile_fx import config_patches
from omnicomp.testing.models import MODELS, SIZES, Case, build
from omnicomp.weights.cast_copies import Form

HEADER = ["model, batch", "autocast ms", "call ms", "once ms", "autocast / once", "call / once"]
HEADER += ["MiB of copies", "GiB above weights (autocast / call / once)", "relative error to float64 (same)"]


def caller(case: Case, name: str, arguments: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """A warmed-up forward of one candidate."""
    # torch.compile takes a mode or options; a mode is a set of Inductor's options.
    options = config_patches(arguments.mode or "default", {})
    if name != "autocast":
        options["dtype_policy"] = {"preset": "bf16", "weights": name}
    model: Any = torch.compile(case.model, backend="inductor" if name == "autocast" else "omni", options=options)

    def forward() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(arguments.device, torch.bfloat16, enabled=name == "autocast"):
            return case.output(model(**case.inputs))

    for _ in range(3):
        forward()
    return forward


def measure(case: Case, label: str, arguments: argparse.Namespace) -> tuple[list[str], tuple[float, float]]:
    """Time the candidates on one model."""
    torch.compiler.reset()
    double = build_double(case)
    candidates: dict[str, Callable[[], torch.Tensor]] = {}
    errors: list[str] = []
    for name in ("autocast", "call", "once"):
        candidates[name] = caller(case, name, arguments)
        errors.append(f"{float((candidates[name]().double() - double).norm() / double.norm()):.1e}")
    held = weights.bytes() / 2**20
    wait_for_turn(arguments.device)
    peaks = [peak_memory(function, arguments.device) or 0.0 for function in candidates.values()]
    times = interleave(
        candidates,
        rounds=arguments.rounds or (3 if arguments.quick else 11),
        seconds=0.05 if arguments.quick else 0.2,
        device=arguments.device,
    )
    once = times["once"]
    ratios = (1 / once.ratio_to(times["autocast"]), 1 / once.ratio_to(times["call"]))
    cells = [label, *(f"{times[name].median * 1e3:.3f}" for name in candidates), *(f"{ratio:.2f}" for ratio in ratios)]
    cells += [f"{held:.1f}", " / ".join(f"{peak:.3f}" for peak in peaks), " / ".join(errors)]
    return cells, ratios


def build_double(case: Case) -> torch.Tensor:
    """What the model computes in float64; the model is float32 again afterwards."""
    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in case.inputs.items()}
    with torch.no_grad():
        result = case.output(case.model.double()(**inputs))
    case.model.float().load_state_dict(state)
    return result


def check(rounds: int) -> str:
    """What a call pays for the check of 200 weights."""
    values = tuple(torch.nn.Parameter(torch.randn(8, 8)) for _ in range(200))
    copies = weights.Copies([Form(torch.bfloat16)] * 200, [torch.device("cpu")] * 200)
    copies(values)
    times = interleave({"check": lambda: copies(values)}, rounds=rounds, seconds=0.05)
    return f"check of 200 copies: {times['check'].median * 1e6:.1f} µs a call"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", default=None, choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--mode", default=None, choices=["reduce-overhead", "max-autotune"])
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(machine(arguments.device))
    rows: list[list[str]] = []
    ratios: list[tuple[float, float]] = []
    for name in arguments.models or (["bert"] if arguments.quick else list(MODELS)):
        for batch in arguments.batches or ([1] if arguments.quick else [1, 8, 64]):
            size = GPU_SIZES[name] if arguments.device == "cuda" else SIZES["tiny" if arguments.quick else "cpu"]
            length = min(size.length, arguments.length) if name != "vit" else size.length
            SIZES["bench"] = dataclasses.replace(size, batch=batch, length=length)
            case = build(name, "bench").to(arguments.device, torch.float32)
            cells, ratio = measure(case, f"{name}, {batch}", arguments)
            rows.append(cells)
            ratios.append(ratio)
            print(" | ".join(cells), flush=True)
    print(markdown_table(HEADER, rows))
    means = [geometric_mean([pair[i] for pair in ratios]) for i in range(2)]
    print(f"geometric mean: {means[0]:.2f} of autocast's speed, {means[1]:.2f} of call's")
    print(check(arguments.rounds or 5))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
