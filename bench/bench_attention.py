"""Attention: models and single layers under eager, Inductor, transformers' fused settings, omni and the best kernels.

    python bench/bench_attention.py --json results.jsonl --budget 560     # on a GPU: rows in the file are left out
    python bench/bench_attention.py --report results.jsonl --into docs/benchmarks.md     # needs no GPU
    python bench/bench_attention.py --quick --part forms --only 'causal/*'          # small, also on the CPU
    python bench/bench_attention.py --check                                        # do the forms' kernels agree?

A row is a model or a single layer, in inference or with the backward; `--list` prints their names. Models are timed as
a user waits for them: compiled callables, called back to back, by the wall clock. Single layers are timed on the
device, behind work that hides the host's launches, as the other layers of a model do. Candidates take turns; a ratio is
the median over the rounds. Kernels picked by hand get masks ready made, and so do not pay for making them.
`in_turn.py` compiles many rows beside each other.
"""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import attention_models
import torch
from attention_forms import FORMS, Form, Layer, covering, cross_product, make_tensors, naive, upcast, work
from attention_kernels import kernels
from attention_report import charts, insert, report
from attention_run import OURS, Call, DeviceLost, Plan, Settings, compare, release
from harness import add_common_arguments, machine
from torch import Tensor

Row = Layer | attention_models.Row

QUICK_LENGTH = 128  # of a layer with --quick


def layer_plan(layer: Layer, settings: Settings) -> tuple[Plan, dict[str, Any]]:
    """A layer's candidates, and what is to be known of it."""
    tensors = make_tensors(layer, settings.device, settings.dtype)
    form = FORMS[layer.form](layer, tensors)

    def call(function: Any, tensors: dict[str, Tensor], form: Form) -> Call:
        leaves = [tensors["query"], tensors["key"], tensors["value"], *form.learned]

        def forward() -> Sequence[Tensor]:
            with torch.no_grad():
                return [function()]

        def step() -> Sequence[Tensor]:
            output = function()
            return [output, *torch.autograd.grad(output, leaves, tensors["upstream"])]

        return step if layer.training else forward

    def reference() -> Sequence[Tensor]:
        higher = upcast(tensors, torch.float32 if settings.device == "cuda" else torch.float64)
        higher_form = FORMS[layer.form](layer, higher)
        return call(lambda: naive(higher, higher_form), higher, higher_form)()

    def program() -> Tensor:
        return naive(tensors, form)

    calls = {
        "eager": lambda: call(program, tensors, form),
        "inductor": lambda: call(settings.compiled(program, "inductor"), tensors, form),
        OURS: lambda: call(settings.compiled(program, "omni"), tensors, form),
    }
    if settings.task == "check":
        del calls["inductor"], calls[OURS]
    picked = kernels(layer, tensors, form, lambda function: settings.compiled(function, "inductor"))
    for name, make in picked.items():
        calls[name] = lambda make=make: call(make(), tensors, form)
    facts = {**dataclasses.asdict(layer), "work": work(layer, form)}
    return Plan(calls=calls, reference=reference, clock="device", whole=False, picked=frozenset(picked)), facts


def rows(arguments: argparse.Namespace) -> list[Row]:
    """The rows asked for, in the order in which to measure them."""
    found: list[Row] = []
    if arguments.part in (None, "models"):
        found += attention_models.ROWS
    if arguments.part in (None, "forms"):
        layers = cross_product() if arguments.full else covering()
        if arguments.quick:
            layers = [small(layer) for layer in layers]
        found += {layer.key: layer for layer in layers}.values()
    return [row for row in found if any(fnmatch(row.key, pattern) for pattern in arguments.only or ["*"])]


def small(layer: Layer) -> Layer:
    """The layer in a size that a CPU computes at once."""
    kv_heads = layer.kv_heads * 4 // layer.heads
    return dataclasses.replace(layer, heads=4, kv_heads=kv_heads, batch=2, length=QUICK_LENGTH, width=16)


def measure(row: Row, settings: Settings, *, quick: bool) -> dict[str, Any]:
    """One line of the results."""
    torch.compiler.reset()
    if isinstance(row, Layer):
        part, (plan, facts) = "forms", layer_plan(row, settings)
    else:
        part, (plan, facts) = "models", attention_models.plan(row, settings, quick=quick)
    record = {
        "part": part,
        "key": row.key,
        "machine": machine(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "cudagraphs": settings.cudagraphs,
        **facts,
        **compare(plan, settings),
    }
    if part == "models":
        record["transformers"] = attention_models.transformers_version()
    return record


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what was asked for and is not in the results yet, as long as there is time."""
    start = time.perf_counter()
    budget = arguments.budget or float("inf")
    known = read([arguments.json]) if arguments.json and Path(arguments.json).exists() else []
    done = {record["key"] for record in known}
    todo = [row for row in rows(arguments) if row.key not in done]
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32"))
    settings = Settings(
        device=arguments.device,
        dtype=dtype,
        rounds=arguments.rounds or (3 if arguments.quick else 7),
        seconds=0.02 if arguments.quick else 0.1,
        candidates=tuple(arguments.candidates),
        cudagraphs=arguments.cudagraphs,
        task=arguments.task,
    )
    print(f"{machine(arguments.device)}, {dtype}, {len(todo)} rows", flush=True)
    records: list[dict[str, Any]] = []
    slowest = 0.0
    for number, row in enumerate(todo):
        began = time.perf_counter()
        if began - start + slowest > budget:
            print(f"out of time, not measured: {' '.join(row.key for row in todo[number:])}")
            break
        try:
            records.append(measure(row, settings, quick=arguments.quick))
            release(arguments.device)
        except DeviceLost as error:
            note(arguments, {"part": "lost", "key": row.key, "failures": {"the device": str(error)}})
            raise SystemExit(f"{row.key}: {error}; start again to go on with the next row") from error
        took = time.perf_counter() - began
        slowest = max(slowest, took)
        note(arguments, records[-1])
        print(f"[{time.perf_counter() - start:.0f} s, {took:.0f} s] {brief(records[-1])}", flush=True)
    return [*known, *records]


def note(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """Append a row to the results, if a file for them was named."""
    if arguments.json and arguments.task == "measure":
        with open(arguments.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def brief(record: dict[str, Any]) -> str:
    """One line on a row while the bench runs."""
    times = {name: sorted(rounds)[len(rounds) // 2] * 1e3 for name, rounds in record["rounds"].items()}
    cells = [f"{name} {value:.3f} ms" for name, value in times.items()]
    if not times:
        cells = [f"{name} error {error:.1e}" for name, error in record["errors"].items()]
    cells += [f"{name} FAILED ({why})" for name, why in record["failures"].items()]
    return f"{record['key']}: {'; '.join(cells)}"


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The results in files; of a row that is there twice, the last."""
    lines = [line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    records: dict[str, dict[str, Any]] = {record["key"]: record for record in map(json.loads, lines)}
    return list(records.values())


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--part", choices=["models", "forms"], help="only one of the two parts")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows; shell patterns such as 'causal/*/training'")
    parser.add_argument("--full", action="store_true", help="the forms' whole cross product")
    parser.add_argument("--candidates", nargs="+", default=["*"], metavar="NAME", help="shell patterns")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cudagraphs", action="store_true", help="compile with mode='reduce-overhead'")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no row that may end later")
    parser.add_argument("--json", metavar="FILE", help="append each row's result; rows in it are not measured again")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument(
        "--check", dest="task", action="store_const", const="check", default="measure", help="compare, compile nothing"
    )
    parser.add_argument("--report", nargs="+", metavar="FILE", help="make the tables of results; measures nothing")
    parser.add_argument("--into", metavar="FILE.md", help="put the tables between its markers, and the plots beside it")
    return parser.parse_args()


def main() -> None:
    """Measure, or report."""
    arguments = parse()
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    if arguments.list:
        print("\n".join(row.key for row in rows(arguments)))
        return
    records = read(arguments.report) if arguments.report else run(arguments)
    if arguments.task != "measure":
        return
    if not arguments.into:
        print(report(records))
        return
    page = Path(arguments.into)
    plots = charts(records)
    for name, drawing in plots.items():
        page.with_name(name).write_text(drawing, encoding="utf-8")
    page.write_text(insert(page.read_text(encoding="utf-8"), report(records, plots)), encoding="utf-8")


if __name__ == "__main__":
    main()
