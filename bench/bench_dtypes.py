"""Models with float32 weights: the presets of `dtype_policy` against `torch.autocast` and Inductor.

    python bench/bench_dtypes.py [--quick] [--device cuda] [--models bert llama] [--batches 1 8 64]

Attention is written by hand in these models. A speed is the time of autocast with Inductor over the candidate's, so
more than 1 is faster; the time is the median over interleaved rounds. An error is relative to the model in float64, of
the result in inference and of all gradients together in training.
"""

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import add_common_arguments, geometric_mean, interleave, machine, markdown_table, peak_memory

from omnicomp.testing.models import MODELS, SIZES, Case, Size, build

# As users run these models on a large GPU; the batch is a choice of the command line.
GPU_SIZES = {
    "bert": Size(width=1024, heads=16, layers=12, batch=8, length=512, vocabulary=30522),
    "llama": Size(width=2048, heads=32, layers=8, batch=8, length=1024, vocabulary=32000),
    "vit": Size(width=1024, heads=16, layers=12, batch=8, length=576, vocabulary=0),
    "t5": Size(width=512, heads=8, layers=6, batch=8, length=512, vocabulary=32128),
    "resnet": Size(width=1024, heads=1, layers=4, batch=64, length=0, vocabulary=0),
}
# name -> backend, dtype policy, whether the model is called under autocast to bfloat16
CANDIDATES: dict[str, tuple[str, str, bool]] = {
    "Inductor": ("inductor", "", False),
    "autocast": ("inductor", "", True),
    "keep": ("omni", "keep", False),
    "tf32": ("omni", "tf32", False),
    "bf16": ("omni", "bf16", False),
}


@dataclasses.dataclass
class Measured:
    """One candidate on one model."""

    milliseconds: float
    speed: float
    error: float
    gibibytes: float


def caller(case: Case, name: str, device: str, *, training: bool) -> Callable[[], torch.Tensor]:
    """A warmed-up function that runs a forward, or a forward and backward; it returns what its error is taken of."""
    backend, preset, autocast = CANDIDATES[name]
    options = {"dtype_policy": preset} if preset else None
    model: Any = torch.compile(case.model, backend=backend, options=options)
    cast = torch.autocast(device, dtype=torch.bfloat16, enabled=autocast)

    def forward() -> torch.Tensor:
        with torch.no_grad(), cast:
            return case.output(model(**case.inputs))

    def step() -> torch.Tensor:
        case.model.zero_grad(set_to_none=True)
        with cast:
            loss = case.output(model(**case.inputs)).float().square().mean()
        loss.backward()
        return loss.detach()

    run = step if training else forward
    for _ in range(3):
        run()
    return run


def result(case: Case, run: Callable[[], torch.Tensor], *, training: bool) -> torch.Tensor:
    """What errors are taken of: the result, or all gradients in one vector."""
    value = run()
    if not training:
        return value.double()
    grads = [p.grad for p in case.model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in grads])


def reference(case: Case, *, training: bool) -> torch.Tensor:
    """The same in float64."""
    wide = dataclasses.replace(
        case,
        model=copy.deepcopy(case.model).double(),
        inputs={k: v.double() if v.is_floating_point() else v for k, v in case.inputs.items()},
    )

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return wide.output(wide.model(**wide.inputs))

    def step() -> torch.Tensor:
        loss = wide.output(wide.model(**wide.inputs)).square().mean()
        loss.backward()
        return loss.detach()

    return result(wide, step if training else forward, training=training)


def measure(case: Case, arguments: argparse.Namespace, *, training: bool) -> dict[str, Measured]:
    """Time the candidates on one model."""
    torch.compiler.reset()
    true = reference(case, training=training)
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    errors: dict[str, float] = {}
    for name in CANDIDATES:
        runs[name] = caller(case, name, arguments.device, training=training)
        errors[name] = float((result(case, runs[name], training=training) - true).norm() / true.norm())
    del true
    case.model.zero_grad(set_to_none=True)
    peaks = {name: peak_memory(run, arguments.device) or 0.0 for name, run in runs.items()}
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    times = interleave(runs, rounds=rounds, seconds=0.1 if arguments.device == "cuda" else 0.5, device=arguments.device)
    return {
        name: Measured(times[name].median * 1e3, 1 / times[name].ratio_to(times["autocast"]), errors[name], peaks[name])
        for name in runs
    }


def main() -> None:
    """Print one table, and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--only", choices=["inference", "training"])
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(f"{machine(arguments.device)}, float32 weights")
    header = ["model", "batch", *(f"{name} ms" for name in CANDIDATES)]
    header += [f"autocast / {name}" for name in ("tf32", "bf16")] + ["Inductor / bf16"]
    header += ["error (" + " / ".join(CANDIDATES) + ")", "GiB (autocast / bf16)"]
    rows: list[list[str]] = []
    speeds: dict[str, list[float]] = {"inference": [], "training": []}
    for name in arguments.models:
        size = GPU_SIZES[name] if arguments.device == "cuda" else SIZES["tiny" if arguments.quick else "cpu"]
        for batch in arguments.batches or [size.batch]:
            SIZES["bench"] = dataclasses.replace(size, batch=batch)
            for kind in ("inference", "training"):
                if arguments.only not in (None, kind):
                    continue
                case = build(name, "bench").to(arguments.device, torch.float32)
                found = measure(case, arguments, training=kind == "training")
                speeds[kind].append(found["bf16"].speed)
                cells = [f"{name}, {kind}", str(batch), *(f"{m.milliseconds:.2f}" for m in found.values())]
                cells += [f"{found[c].speed:.2f}" for c in ("tf32", "bf16")]
                cells.append(f"{found['Inductor'].milliseconds / found['bf16'].milliseconds:.2f}")
                cells.append(" / ".join(f"{m.error:.1e}" for m in found.values()))
                cells.append(f"{found['autocast'].gibibytes:.2f} / {found['bf16'].gibibytes:.2f}")
                rows.append(cells)
                print(" | ".join(cells), flush=True)
    print(markdown_table(header, rows))
    for kind, values in speeds.items():
        if values:
            print(f"{kind}: bf16 is {geometric_mean(values):.2f} times as fast as autocast in the geometric mean")
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
