"""A process that is killed at any moment: the report tells what has no end, and the gate fails exactly then."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from processes import python

from omnicomp.audit import load
from omnicomp.cli.check import UNFINISHED, run_check

PROGRAM = """
import atexit, os, signal, sys
moment, number = sys.argv[1], int(sys.argv[2])
def die(): os.kill(os.getpid(), signal.SIGKILL)
if moment == "after the end": atexit.register(die)
import torch
from omnicomp.timeline.sinks.jsonl import JsonLinesSink
if moment == "at exit": atexit.register(die)
put, count = JsonLinesSink._put, 0
def killed(self, record):
    global count
    count += 1
    if count != number or moment not in ("before", "torn", "written"): return put(self, record)
    if moment == "torn": self._file.write(b'{"schema":1,"type":"' + record["type"].encode())
    if moment == "written": put(self, record)
    die()
JsonLinesSink._put = killed
w = torch.randn(8, 8, requires_grad=True)
def f(x):
    x = (x @ w).sin()
    torch._dynamo.graph_break()
    return x.cumsum(-1).sum()
f = torch.compile(f, backend="omni", options={"lowerings": ["eager"]})
for call in range(9):
    if moment == "between calls" and call == number: die()
    f(torch.randn(4 + call // 5, 8)).backward()
"""
EVENTS = 70  # about what the program records

Moment = tuple[str, int]


def moments(count: int) -> list[Moment]:
    """Moments that the seed of the run draws: the first ones are of each kind."""
    draw = random.Random(f"{os.environ['OMNICOMP_TEST_SEED']} killed")
    kinds = ["written", "torn", "between calls", "at exit", "before", "at any time", "after the end"]
    return [(kind, _number(kind, draw)) for kind in (kinds * count)[:count]]


def _number(kind: str, draw: random.Random) -> int:
    if kind == "at any time":
        return draw.randrange(300, 4000)  # milliseconds
    return draw.randrange(9) if kind == "between calls" else draw.randrange(1, EVENTS)


def run(folder: Path, moment: Moment) -> list[dict[str, str]]:
    """Run the program, and return the whole lines of its timeline."""
    kind, number = moment
    path = folder / "t.jsonl"
    at_any_time = kind == "at any time"
    try:
        environment = {"OMNICOMP_TIMELINE": str(path)}
        python("-c", PROGRAM, kind, number, environment=environment, timeout=number / 1000 if at_any_time else 600)
    except subprocess.TimeoutExpired:
        assert at_any_time
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def check(folder: Path, moment: Moment) -> None:
    written = run(folder, moment)
    path = folder / "t.jsonl"
    if not path.exists():
        return  # nothing was captured
    audit = load(path)
    ended = any(line["type"] == "process" and line["state"] == "ended" for line in written)
    assert ended or moment[0] != "after the end"
    captured = {line["graph"] for line in written if line["type"] == "capture"}
    over = {line["graph"]: line["state"] for line in written if line["type"] == "outcome" and not line["subgraph"]}
    called = {line["graph"] for line in written if line["type"] == "ran" and line["part"] != "backward"}
    expected = {("graph", graph) for graph in captured - set(over)}
    expected |= {("part", graph) for graph in set(over) - called if over[graph] == "built"}
    expected |= set() if ended else {("process", "")}
    found = {(each.what, "" if each.what == "process" else each.id.partition(".")[0]) for each in audit.unfinished}
    assert found == expected
    assert ("UNFINISHED" in audit.summary()) == bool(expected)
    assert run_check(path, output=folder / "verdict.txt") == (UNFINISHED if expected else 0)
    assert run_check(path, output=folder / "verdict.txt", allow_unfinished=True) == 0


@pytest.mark.parametrize("number", range(4))
def test_a_process_that_is_killed(tmp_path: Path, number: int) -> None:
    check(tmp_path, moments(4)[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(7), *(pytest.param(n, marks=pytest.mark.long) for n in range(7, 20))])
def test_a_process_that_is_killed_at_random_moments(tmp_path: Path, number: int) -> None:
    check(tmp_path, moments(20)[number])
