"""Real models: eager, Inductor and omni, in inference and in a training step.

    python bench/bench_models.py [--quick] [--device cuda] [--dtype bfloat16]

Attention is written by hand in these models, as their source spells it. A speed is Inductor's time over omni's, so
more than 1 is faster than Inductor; the time is the median over interleaved rounds.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import add_common_arguments, interleave, machine, markdown_table, peak_memory

import omnicomp
from omnicomp.testing.models import MODELS, SIZES, Case, Size, build

BACKENDS = ("eager", "inductor", "omni")

# Sizes that fill a GPU: tokens enough for attention to matter, as users run these models.
GPU_SIZES = {
    "bert": Size(width=1024, heads=16, layers=12, batch=16, length=512, vocabulary=30522),
    "llama": Size(width=2048, heads=32, layers=8, batch=2, length=2048, vocabulary=32000),
    "vit": Size(width=1024, heads=16, layers=12, batch=16, length=576, vocabulary=0),
    "t5": Size(width=512, heads=8, layers=6, batch=4, length=1024, vocabulary=32128),
    "resnet": Size(width=1024, heads=1, layers=4, batch=64, length=0, vocabulary=0),
}


@dataclasses.dataclass
class Row:
    """What was measured of one model."""

    label: str
    cells: list[str]


def caller(case: Case, backend: str, *, training: bool) -> Callable[[], Any]:
    """A warmed-up function that runs one forward, or one forward and backward."""
    model: Any = case.model if backend == "eager" else torch.compile(case.model, backend=backend)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return case.output(model(**case.inputs))

    def step() -> torch.Tensor:
        case.model.zero_grad(set_to_none=True)
        loss = case.output(model(**case.inputs)).float().square().mean()
        loss.backward()
        return loss

    run = step if training else forward
    for _ in range(3):
        run()
    return run


def measure(case: Case, arguments: argparse.Namespace, *, training: bool) -> Row:
    """Time the three backends on one model, and say how far their results are from a float64 reference."""
    torch.compiler.reset()  # between models; the three backends of one model live side by side
    candidates = {}
    errors = {}
    seen: dict[str, int] = {}
    reference = None if training else _reference(case)
    for backend in BACKENDS:
        if backend == "omni":
            omnicomp.timeline.clear()
        candidates[backend] = caller(case, backend, training=training)
        if reference is not None:
            errors[backend] = float((candidates[backend]().double() - reference).norm() / reference.norm())
        if backend == "omni":
            sites = omnicomp.audit().sites
            seen = {"fused": len(sites.fused), "missed": len(sites.near_misses)}
    peaks = {name: peak_memory(function, arguments.device) or 0.0 for name, function in candidates.items()}
    rounds = arguments.rounds or (5 if arguments.quick else 11)
    times = interleave(
        candidates, rounds=rounds, seconds=0.2 if arguments.device == "cuda" else 1.0, device=arguments.device
    )
    inductor = times["inductor"]
    cells = [f"{times[b].median * 1e3:.2f}" for b in BACKENDS]
    cells.append(f"{1 / times['omni'].ratio_to(inductor):.2f}")
    cells.append(f"{1 / times['omni'].ratio_to(times['eager']):.2f}")
    cells.append(" / ".join(f"{peaks[b]:.2f}" for b in BACKENDS) if arguments.device == "cuda" else "")
    cells.append(" / ".join(f"{errors[b]:.1e}" for b in BACKENDS) if errors else "")
    cells.append(f"{seen['fused']} of {seen['fused'] + seen['missed']}")
    return Row(label=f"{case.name}, {'training step' if training else 'inference'}", cells=cells)


def _reference(case: Case) -> torch.Tensor:
    """What the model computes in float64; on the case's device."""
    import copy

    model = copy.deepcopy(case.model).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in case.inputs.items()}
    with torch.no_grad():
        return case.output(model(**inputs))


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--only", choices=["inference", "training"])
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    start = time.perf_counter()
    print(f"{machine(arguments.device)}, {dtype}")
    header = ["model", "eager ms", "Inductor ms", "omni ms", "Inductor / omni", "eager / omni"]
    header += ["GiB above weights (eager / Inductor / omni)" if arguments.device == "cuda" else ""]
    header += ["relative error to float64 (eager / Inductor / omni)", "attention sites fused"]
    rows: list[list[str]] = []
    for name in arguments.models:
        size = "tiny" if arguments.quick else "cpu"
        if arguments.device == "cuda":
            SIZES["gpu"] = GPU_SIZES[name]
            size = "gpu"
        for training in (False, True):
            if arguments.only and arguments.only != ("training" if training else "inference"):
                continue
            case = build(name, size).to(arguments.device, dtype)
            row = measure(case, arguments, training=training)
            rows.append([row.label, *row.cells])
            print(" | ".join(rows[-1]), flush=True)
    keep = [i for i, title in enumerate(header) if title]
    print(markdown_table([header[i] for i in keep], [[row[i] for i in keep] for row in rows]))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
