"""Which operators of PyTorch's database that pass in eager fail when they are compiled?

    python bench/sweep_operators.py [--lowering eager|inductor] [--only PATTERN] [--json FILE]

Every operator runs in a process that may crash or hang without ending the sweep. With `--json`, a sweep that was
interrupted goes on where it stopped. `--backend` puts another backend in omni's place, for comparison.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from harness import markdown_table
from operator_sweep import FORMS, PASSING, check_operator

from omnicomp._torch import opinfo

OPTIONS: dict[str, dict[str, Any]] = {"eager": {"lowerings": ["eager"]}, "inductor": {}}


@dataclasses.dataclass
class Worker:
    """A process that checks one operator after the other."""

    process: Any
    pipe: Any
    operator: str = ""
    deadline: float = 0.0

    @classmethod
    def start(cls, settings: dict[str, Any]) -> "Worker":
        """Start a process; it imports torch first, which takes seconds."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, settings), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def give(self, operator: str, limit: float) -> None:
        """Have it check an operator."""
        self.operator, self.deadline = operator, time.monotonic() + limit
        self.pipe.send(operator)

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Any, settings: dict[str, Any]) -> None:
    """Answer names of operators by their outcomes; runs in a worker."""
    torch.set_num_threads(1)
    settings = {**settings, "dtype": getattr(torch, settings["dtype"])}
    if settings.pop("unbacked"):
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        torch._dynamo.config.capture_scalar_outputs = True
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        try:
            rows = [dataclasses.asdict(outcome) for outcome in check_operator(name, **settings)]
        except Exception as error:
            rows = [failure(name, "unusable", f"{type(error).__name__}: {error}"[:300])]
        pipe.send(rows)


def failure(name: str, verdict: str, detail: str) -> dict[str, Any]:
    """A row for an operator without outcomes."""
    return {"operator": name, "form": "", "sample": -1, "verdict": verdict, "detail": detail, "retreats": []}


def sweep(names: Iterable[str], settings: dict[str, Any], *, jobs: int, limit: float, record: Any) -> None:
    """Check all operators, some at a time; `record(name, rows)` is called as each is done."""
    waiting = collections.deque(names)
    workers: list[Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(Worker.start(settings))
            workers[-1].give(waiting.popleft(), limit + 60)  # the start is not the operator's
        multiprocessing.connection.wait([worker.pipe for worker in workers], timeout=1)
        for worker in list(workers):
            rows: list[dict[str, Any]] | None = None
            try:
                if worker.pipe.poll():
                    rows = worker.pipe.recv()
            except (EOFError, ConnectionError):
                worker.process.join()
                rows = [failure(worker.operator, "crashed", f"exit code {worker.process.exitcode}")]
                workers.remove(worker)
            if rows is None and time.monotonic() > worker.deadline:
                rows = [failure(worker.operator, "hung", f"no answer in {limit:g} s")]
                worker.stop()
                workers.remove(worker)
            if rows is None:
                continue
            record(worker.operator, rows)
            if worker in workers and waiting:
                worker.give(waiting.popleft(), limit)
            elif worker in workers:
                worker.stop()
                workers.remove(worker)


def load(path: Path | None, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by operator of an earlier sweep with the same settings."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["operator"]: line["rows"] for line in lines if line["settings"] == settings}


def report(done: dict[str, list[dict[str, Any]]], *, verbose: bool) -> None:
    """Print how many operators and samples have each verdict, and every failure."""
    by_verdict = collections.Counter(row["verdict"] for rows in done.values() for row in rows)
    operators = collections.Counter(worst(rows) for rows in done.values())
    table = [[verdict, str(operators[verdict]), str(by_verdict[verdict])] for verdict in {**operators, **by_verdict}]
    print(markdown_table(["verdict", "operators (worst sample)", "samples"], table))
    shown = [row for rows in done.values() for row in rows if row["verdict"] not in PASSING]
    if verbose:
        shown += [row for rows in done.values() for row in rows if row["verdict"] in PASSING[1:]]
    for row in shown:
        print(f"{row['verdict']:14} {row['operator']} {row['form']} {row['sample']}: {row['detail']}")
        for retreat in row["retreats"]:
            print(f"{'':14}   {retreat}")


def worst(rows: list[dict[str, Any]]) -> str:
    """The verdict of an operator: a failure if it has one."""
    verdicts = {row["verdict"] for row in rows}
    failing = sorted(verdicts.difference(PASSING))
    passing = [verdict for verdict in reversed(PASSING) if verdict in verdicts]
    return next(iter([*failing, *passing]), "dtype not supported")


def main() -> int:
    """Run the sweep; the exit code says whether something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lowering", choices=sorted(OPTIONS), default="eager")
    parser.add_argument("--backend", default="omni", help="of torch.compile; others than omni ignore --lowering")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first sample")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["function"])
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--unbacked", action="store_true", help="no graph breaks where sizes depend on data")
    parser.add_argument("--only", default="*", help="shell patterns of names, joined by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=120.0, help="for each operator")
    parser.add_argument("--json", type=Path, help="JSON lines to write, and to resume from")
    parser.add_argument("--verbose", action="store_true", help="show retreats and what fails in eager, too")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {
        "dtype": arguments.dtype,
        "device": arguments.device,
        "first": arguments.first,
        "samples": arguments.samples,
        "gradients": not arguments.no_gradients,
        "backend": arguments.backend,
        "options": OPTIONS[arguments.lowering] if arguments.backend == "omni" else None,
        "forms": arguments.forms,
        "unbacked": arguments.unbacked,
        "own_random": arguments.backend == "inductor" or arguments.lowering == "inductor",
    }
    done = load(arguments.json, settings)
    names = opinfo.names(arguments.only)
    done = {name: rows for name, rows in done.items() if name in names}
    left = [name for name in names if name not in done]
    start = time.perf_counter()

    def record(name: str, rows: list[dict[str, Any]]) -> None:
        done[name] = rows
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"settings": settings, "operator": name, "rows": rows}) + "\n")
        if len(done) % 50 == 0:
            print(f"{len(done)} of {len(names)} operators, {time.perf_counter() - start:.0f} s", flush=True)

    sweep(left, settings, jobs=arguments.jobs, limit=arguments.limit_s, record=record)
    report({name: done[name] for name in names}, verbose=arguments.verbose)
    print(f"({time.perf_counter() - start:.0f} s)")
    return int(any(row["verdict"] not in PASSING for rows in done.values() for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
