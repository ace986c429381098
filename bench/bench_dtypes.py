"""Models with float32 weights: the presets of `dtype_policy` against `torch.autocast` and Inductor.

    python bench/bench_dtypes.py [--quick] [--device cuda] [--models bert llama] [--batches 1 8 64]

Attention is written by hand in these models. A speed is the time of autocast with Inductor over the candidate's, so
more than 1 is faster; the time is the median over interleaved rounds. An error is relative to the model in float64, of
the result in inference and of all gradients together in training. Memory is what one call allocates at most, above the
float32 weights and the inputs: with gradients in training, and in inference with the copies of weights that are kept.

`bench/in_turn.py` runs many of these at once, and lets them measure in turn.
"""

import argparse
import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import cast_kernels
import torch
from harness import (
    add_common_arguments,
    geometric_mean,
    interleave,
    leave,
    machine,
    markdown_table,
    peak_memory,
    wait_for_room,
    wait_for_turn,
    with_memory,
)

import omnicomp
from omnicomp import weights
from omnicomp._torch.inductor.compile_fx import config_patches
from omnicomp.testing.models import MODELS, SIZES, Case, Size, build
from omnicomp.timeline import NearMiss, Retreat, Rewrite

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
    "fp8": ("omni", "fp8", False),
}
DEFAULT = [name for name in CANDIDATES if name != "fp8"]


@dataclasses.dataclass
class Measured:
    """One candidate on one model."""

    milliseconds: float
    speed: float
    error: float
    gibibytes: float
    kernels: cast_kernels.Kernels


def caller(case: Case, name: str, arguments: argparse.Namespace, *, training: bool) -> Callable[[], torch.Tensor]:
    """A warmed-up function that runs a forward, or a forward and backward; it returns what its error is taken of."""
    backend, preset, autocast = CANDIDATES[name]
    # torch.compile takes a mode or options; a mode is a set of Inductor's options.
    options = config_patches(arguments.mode or "default", {}) | ({"dtype_policy": preset} if preset else {})
    model: Any = torch.compile(case.model, backend=backend, options=options or None)
    cast = torch.autocast(arguments.device, dtype=torch.bfloat16, enabled=autocast)

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
    """The same in float64, of a few rows of the batch at a time: in training, of one, as attention is large there.

    The models are in evaluation mode, so that no row depends on another one.
    """
    model = copy.deepcopy(case.model).double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in case.inputs.items()}
    (batch,) = {len(value) for value in inputs.values()}
    parts: list[torch.Tensor] = []
    elements = 0
    for first in range(0, batch, 1 if training else 8):
        some = {k: v[first : first + (1 if training else 8)] for k, v in inputs.items()}
        with torch.set_grad_enabled(training):
            output = case.output(model(**some))
        elements += output.numel()
        if training:
            output.square().sum().backward()
        else:
            parts.append(output)
    if not training:
        return torch.cat(parts)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.flatten() for grad in grads]) / elements


def notes() -> list[str]:
    """What became of attention, what was left as it is, and what did not run as it was compiled, since last asked."""
    found: collections.Counter[str] = collections.Counter()
    for event in omnicomp.timeline.events():
        if isinstance(event, Rewrite) and event.kind == "attention":
            found[f"{event.target}, {event.detail}"] += 1
        elif isinstance(event, NearMiss):
            found[f"left alone: {event.reason.sentence} ({event.reason.observed})"] += 1
        elif isinstance(event, Retreat):
            found[f"retreat {event.source_lowering} -> {event.target_lowering}: {event.reason}"] += 1
    omnicomp.timeline.clear()
    return [f"{times} x {text}" for text, times in found.items()]


def measure(case: Case, arguments: argparse.Namespace, *, training: bool) -> dict[str, Measured]:
    """Time the candidates on one model."""
    torch.compiler.reset()
    true = with_memory(functools.partial(reference, case, training=training), arguments.device)
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    errors: dict[str, float] = {}
    kernels: dict[str, cast_kernels.Kernels] = {}
    kept: dict[str, float] = {}
    for name in arguments.candidates:
        before = weights.bytes()
        wait_for_room(arguments.room, arguments.device)
        with cast_kernels.generated_code() as codes:
            warm = functools.partial(caller, case, name, arguments, training=training)
            runs[name] = with_memory(warm, arguments.device)
        kernels[name] = cast_kernels.count(codes)
        kept[name] = (weights.bytes() - before) / 2**30
        errors[name] = float((result(case, runs[name], training=training) - true).norm() / true.norm())
        for line in notes():
            print(f"{case.name}, {name}: {line}", flush=True)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()  # for others in turn
    del true
    case.model.zero_grad(set_to_none=True)
    wait_for_turn(arguments.device)
    peaks: dict[str, float] = {}
    for name, run in runs.items():
        case.model.zero_grad(set_to_none=True)  # those of the candidate before
        peaks[name] = (peak_memory(run, arguments.device) or 0.0) + kept[name]
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    times = interleave(runs, rounds=rounds, seconds=0.1 if arguments.device == "cuda" else 0.5, device=arguments.device)
    base = times["autocast"] if "autocast" in times else times[arguments.candidates[0]]
    return {
        name: Measured(
            milliseconds=times[name].median * 1e3,
            speed=1 / times[name].ratio_to(base),
            error=errors[name],
            gibibytes=peaks[name],
            kernels=kernels[name],
        )
        for name in runs
    }


def main() -> None:
    """Print one table, and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--length", type=int, default=None, help="tokens a sequence, at most")
    parser.add_argument("--width", type=int, default=None, help="of the models, with heads of 64")
    parser.add_argument("--room", type=float, default=0, help="GiB of the GPU to wait for, beside others in turn")
    parser.add_argument("--only", choices=["inference", "training"])
    parser.add_argument("--candidates", nargs="+", default=DEFAULT, choices=list(CANDIDATES))
    parser.add_argument("--mode", default=None, choices=["reduce-overhead", "max-autotune"])
    arguments = parser.parse_args()
    start = time.perf_counter()
    print(f"{machine(arguments.device)}, float32 weights{', ' + arguments.mode if arguments.mode else ''}")
    names: list[str] = arguments.candidates
    header = ["model", "batch", *(f"{name} ms" for name in names)]
    header += [f"autocast / {name}" for name in names if name != "autocast"]
    header += [
        f"{what} ({' / '.join(names)})" for what in ("error", "GiB", "kernels, casts of inputs + outputs + others")
    ]
    rows: list[list[str]] = []
    speeds: dict[tuple[str, str], list[float]] = {}
    for name in arguments.models:
        size = GPU_SIZES[name] if arguments.device == "cuda" else SIZES["tiny" if arguments.quick else "cpu"]
        if arguments.width:
            size = dataclasses.replace(size, width=arguments.width, heads=max(1, arguments.width // 64))
        if arguments.length and name != "vit":
            size = dataclasses.replace(size, length=min(size.length, arguments.length))
        for batch in arguments.batches or [size.batch]:
            SIZES["bench"] = dataclasses.replace(size, batch=batch)
            for kind in ("inference", "training"):
                if arguments.only not in (None, kind):
                    continue
                move = functools.partial(build(name, "bench").to, arguments.device, torch.float32)
                case: Case = with_memory(move, arguments.device)
                found = measure(case, arguments, training=kind == "training")
                for candidate in names:
                    speeds.setdefault((kind, candidate), []).append(found[candidate].speed)
                cells = [f"{name}, {kind}", str(batch), *(f"{m.milliseconds:.2f}" for m in found.values())]
                cells += [f"{found[c].speed:.2f}" for c in names if c != "autocast"]
                cells.append(" / ".join(f"{m.error:.1e}" for m in found.values()))
                cells.append(" / ".join(f"{m.gibibytes:.2f}" for m in found.values()))
                cells.append(" / ".join(str(m.kernels) for m in found.values()))
                rows.append(cells)
    print(markdown_table(header, rows))
    for (kind, candidate), values in speeds.items():
        if candidate != "autocast":
            print(f"{kind}: {candidate} is {geometric_mean(values):.2f} times as fast in the geometric mean")
    print(f"({time.perf_counter() - start:.0f} s)")
    leave()


if __name__ == "__main__":
    main()
