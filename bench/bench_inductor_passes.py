"""What `verify="inductor"` makes of Inductor's own passes, over models and operators of PyTorch's database.

    python bench/bench_inductor_passes.py [--operators 100] [--models bert llama ...] [--compile] [--json FILE]

Without `--compile` no code is generated: Inductor's passes run, and what they made runs in eager. A refuted change is
printed; so is what no verdict was found for.
"""

import argparse
import collections
import contextlib
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import omnicomp.lowerings.inductor as lowering
from omnicomp._torch import opinfo
from omnicomp._torch.fx import boxed
from omnicomp.testing.models import MODELS, build
from omnicomp.timeline import Certified, current


def _passes_alone(module: torch.fx.GraphModule, inputs: Any, *_: Any, **kwargs: Any) -> Any:
    """In place of a build: Inductor's passes, and eager."""
    compile_fx.view_to_reshape(module)
    mode = torch._guards.detect_fake_mode(inputs)
    FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*inputs)
    with V.set_fake_mode(mode), V.set_aot_compilation(False):
        compile_fx._recursive_post_grad_passes(module, is_inference=bool(kwargs.get("is_inference")))
    return boxed(module)


def _operators(count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Programs of one operator with something around it, in training where it has gradients."""
    names = random.Random(0).sample(opinfo.names(), count)
    for name in names:
        entry = opinfo.find(name)
        dtype = torch.float32 if torch.float32 in entry.dtypes else torch.int64
        samples = list(entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd))
        sample = samples[len(samples) // 2] if samples else None
        if sample is None:
            continue

        def function(first: Any, args: Any, kwargs: Any, entry: Any = entry) -> Any:
            first = (first * 1 + 0).reshape(first.shape) if isinstance(first, torch.Tensor) else first
            return entry.op(first, *args, **kwargs)

        def run(function: Any = function, sample: Any = sample) -> None:
            found = _compiled(function)(sample.input, sample.args, sample.kwargs)
            _backward(found)

        yield name, run


def _backward(found: Any) -> None:
    leaves = [v for v in torch.utils._pytree.tree_leaves(found) if isinstance(v, torch.Tensor) and v.requires_grad]
    if leaves:
        torch.autograd.backward([v.abs().sum() if v.is_complex() else v.sum() for v in leaves])


def _models(names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in names:

        def infer(name: str = name) -> None:
            case = build(name)
            with torch.no_grad():
                _compiled(lambda **inputs: case.output(case.model(**inputs)))(**case.inputs)

        def train(name: str = name) -> None:
            case = build(name)
            case.model.train()
            for each in case.model.modules():
                if isinstance(each, torch.nn.Dropout):
                    each.p = 0.1
            _backward(_compiled(lambda **inputs: case.output(case.model(**inputs)))(**case.inputs))

        yield f"{name}, inference", infer
        yield f"{name}, training", train


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="omni", options={"verify": "inductor", "summary": False})


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", type=int, default=100)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts: collections.Counter[str] = collections.Counter()
    passes: collections.Counter[str] = collections.Counter()
    checked = 0.0
    instead = (
        contextlib.nullcontext()
        if chosen.compile
        else mock.patch.object(lowering.compile_fx, "compile_part", _passes_alone)
    )
    lines: list[dict[str, Any]] = []
    with instead, torch.compiler.config.patch(force_disable_caches=True):
        for name, run in [*_models(chosen.models), *_operators(chosen.operators)]:
            torch.compiler.reset()
            seen, start = len(current().events()), time.perf_counter()
            try:
                run()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            found = [e for e in current().events()[seen:] if isinstance(e, Certified)]
            for event in found:
                verdicts[event.verdict] += 1
                passes[event.name] += 1
                checked += event.seconds
                line = {"program": name, "pass": event.name, "verdict": event.verdict, "sentence": event.sentence}
                lines.append({**line, "nodes": event.nodes, "reproducer": event.reproducer})
                if event.verdict in ("refuted", "assumed"):
                    print(f"{name}: {event.name} at {event.node}: {event.verdict}: {event.sentence[:200]}", flush=True)
                    print(f"    {event.reproducer}" if event.reproducer else "", flush=True)
            print(f"{name}: {len(found)} changes, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(dict(verdicts), dict(passes), f"{checked:.1f} s of checks", sep="\n")
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)


if __name__ == "__main__":
    main()
