"""Is `numerics="eager"` eager's in every bit: outputs, gradients and random numbers of models, and at what speed?

    python bench/bench_numerics.py [--models llama vit] [--modes inference] [--device cuda] [--options JSON]
        [--deterministic] [--rounds N] [--json FILE]

The models are those of `bench_regions.py` that are installed, shrunk, with random weights; `LAYERS=1` in the
environment makes them smaller, `WIDTH=1024 TOKENS=512` larger. Each is run in evaluation without gradients and in a
training step with its dropout, three times with other inputs and seeds, beside eager with the same; the third call is
one that omnicomp does not compare itself. `operators` counts them by their lowering, and `eager` says that the
comparison found a difference, so that a graph or a piece of it ran eager. Where a call differs, `as captured` says
whether it is that of `backend="eager"`, which runs what Dynamo captured, and `captured repeats` whether that gives its
own bits again; with `--deterministic` torch takes kernels that do, where it has some. With `--modes rows`, parts of a
batch are compared with the whole of it under `numerics="batch-invariant"`, and by eager's own kernels.
"""

import argparse
import copy
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_regions import MODELS
from harness import interleave
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import omnicomp


def generator() -> torch.Generator:
    """The generator of the device that models and inputs are made on."""
    device = torch.get_default_device()
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


def step(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any], seed: int, *, training: bool) -> list[Any]:
    """Outputs, gradients, buffers and the state of the generator behind one call."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        found = [value for value in tree_leaves(call(**inputs)) if isinstance(value, Tensor)]
    if training:
        sum(value.square().mean() for value in found if value.requires_grad).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*found, *gradients, *model.buffers(), generator().get_state()]


def same(found: Any, expected: Any) -> bool:
    """Whether two tensors are equal in every bit."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(
        found.detach().contiguous().flatten().view(torch.uint8),
        expected.detach().contiguous().flatten().view(torch.uint8),
    )


def measure(name: str, arguments: argparse.Namespace, *, training: bool) -> dict[str, Any]:
    """Compare one model, in inference or training."""
    torch.manual_seed(0)
    model = MODELS[name].make().train(training)
    other = copy.deepcopy(model)
    torch.compiler.reset()
    call = torch.compile(other, backend="omni", options={"numerics": "eager", **json.loads(arguments.options)})
    row: dict[str, Any] = {"model": name, "training": training, "calls": []}
    start = time.perf_counter()
    for seed in range(3):
        torch.manual_seed(100 + seed)
        inputs = MODELS[name].inputs()
        expected = step(model, model, inputs, seed, training=training)
        twins = [copy.deepcopy(other) for _ in range(2)]
        found = step(other, call, inputs, seed, training=training)
        alike = len(found) == len(expected) and all(map(same, found, expected))
        row["calls"].append(alike)
        if not alike:
            # A program that asks whether it is compiled may do something else then, by any backend.
            path, again = (
                step(twin, torch.compile(twin, backend="eager"), inputs, seed, training=training) for twin in twins
            )
            row.setdefault("as captured", []).append(all(map(same, found, path)))
            row.setdefault("captured repeats", []).append(all(map(same, again, path)))
            row["differ"] = [i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if not same(a, b)][:8]
    report = omnicomp.audit()
    placed = [part.placement for graph in report.graphs for part in graph.parts]
    row["operators"] = dict(sum(map(Counter, placed), Counter()))
    row["eager"] = [str(retreat.reason) for retreat in report.retreats]
    row["seconds"] = time.perf_counter() - start
    inputs = MODELS[name].inputs()
    if arguments.rounds:
        sides = {
            "eager": lambda: step(model, model, inputs, 0, training=training),
            "omni": lambda: step(other, call, inputs, 0, training=training),
        }
        times = interleave(sides, rounds=arguments.rounds, seconds=0.3)
        row["speed"] = times["eager"].ratio_to(times["omni"])
    return row


@torch.no_grad()
def measure_rows(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare rows alone, and parts of a batch, with the whole batch under `numerics="batch-invariant"`."""
    torch.manual_seed(0)
    model = MODELS[name].make().eval()
    torch.compiler.reset()
    options = {"numerics": "batch-invariant", **json.loads(arguments.options)}
    call = torch.compile(model, backend="omni", options=options)
    made = [MODELS[name].inputs() for _ in range(8)]
    batch = {k: torch.cat([each[k] for each in made]) if isinstance(v, Tensor) else v for k, v in made[0].items()}
    size = max(len(value) for value in batch.values() if isinstance(value, Tensor))

    def leaves(function: Callable[..., Any], start: int, count: int) -> list[Tensor]:
        part = {k: v[start : start + count] if isinstance(v, Tensor) else v for k, v in batch.items()}
        return [value for value in tree_leaves(function(**part)) if isinstance(value, Tensor)]

    row: dict[str, Any] = {"model": name, "calls": [], "eager's": []}
    for key, function in (("calls", call), ("eager's", model)):
        whole = leaves(function, 0, size)
        for count in (1, 2, 3, 5, size - 1):
            start = int(torch.randint(size - count + 1, ()))
            parts = [value[start : start + count] for value in whole]
            row[key].append(all(map(same, leaves(function, start, count), parts)))
    if arguments.rounds:
        sides = {"eager": lambda: leaves(model, 0, size), "omni": lambda: leaves(call, 0, size)}
        times = interleave(sides, rounds=arguments.rounds, seconds=0.3)
        row["speed"] = times["eager"].ratio_to(times["omni"])
    return row


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=["inference", "training"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--deterministic", action="store_true", help="by `torch.use_deterministic_algorithms`")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    torch.use_deterministic_algorithms(arguments.deterministic, warn_only=True)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        for mode in arguments.modes:
            training = mode == "training"
            try:
                found = measure_rows(name, arguments) if mode == "rows" else measure(name, arguments, training=training)
                rows.append(found)
            except ImportError as error:
                print(name, "is left out:", error, flush=True)
                break
            except Exception as error:
                rows.append({"model": name, "mode": mode, "calls": [], "error": repr(error)[:300]})
            print(
                name,
                mode,
                {k: v for k, v in rows[-1].items() if k != "report"},
                flush=True,
            )
    called = [row for row in rows if row["calls"]]
    equal = sum(all(row["calls"]) for row in called)
    captured = sum(not all(row["calls"]) and all(row["as captured"]) for row in called)
    unsteady = sum(not all(row.get("as captured", [True])) and not all(row["captured repeats"]) for row in called)
    print(f"bit-equal: {equal} of {len(rows)}; as captured: {captured}; not repeated by what is captured: {unsteady}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, default=str))


if __name__ == "__main__":
    main()
