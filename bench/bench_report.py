"""What does reading a long timeline cost? CPU time and memory of the report of up to a million events, and of a diff.

    python bench/bench_report.py [--quick]

A file holds the events of 300 graphs of 20 subgraphs, every second of them on eager, and then only what repeats:
samples of memory, times of calls, subgraphs that ran again. Each length is read by a process of its own (Linux). The
memory must not grow with the length: 10 times the events may take at most 1.5 times the memory.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import machine, markdown_table

GRAPHS, SUBGRAPHS = 300, 20
HEADER = ["events", "file MB", "subgraphs", "read s (CPU)", "peak MiB", "as JSON MB", "diff s (CPU)"]

READER = """
import json, sys, time
import omnicomp
from omnicomp.audit import diff
start = time.process_time()
found = omnicomp.audit(sys.argv[1])
read = time.process_time() - start
# The peak of getrusage is inherited from the process that this one was forked from.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
start = time.process_time()
assert not diff(found, found).changes
compared = time.process_time() - start
print(json.dumps([found.events, len(found.subgraphs), read, peak, len(found.to_json()) / 1e6, compared]))
"""


def plans() -> Iterator[dict[str, Any]]:
    """The events of the compilations."""
    for number in range(GRAPHS):
        graph = {"graph": f"g{number}"}
        yield {"type": "capture", **graph, "nodes": 400, "module": "model", "fingerprint": f"{number:012x}-00000000"}
        for index in range(8):
            yield {"type": "pass_run", **graph, "name": f"pass{index}", "seconds": 0.01}
        why = [{"code": "unsupported_op", "by": "inductor", "sentence": "Inductor has no lowering for it"}]
        declined = [
            {"node": f"topk_{index}", "op": "aten.topk.default", "lowering": "eager", "chain": why}
            for index in range(1, SUBGRAPHS, 2)
        ]
        yield {"type": "placement", **graph, "part": "inference", "nodes": {"inductor": 400}, "declined": declined}
        for index in range(SUBGRAPHS):
            yield {
                "type": "subgraph",
                **place(number, index),
                "nodes": 20,
                "ops": {"aten.mm.default": 5, "aten.add.Tensor": 15},
                "flops_hint": 100,
                "module": f"layers.{index}",
                "fingerprint": f"{index:012x}-00000000",
                "refused": [f"topk_{index}"] if index % 2 else [],
            }
            yield {"type": "attempt", **place(number, index), "ok": True, "selected": True, "seconds": 0.1}
            yield ran(number, index)


def repeated(generator: random.Random) -> Iterator[dict[str, Any]]:
    """The events of a run that goes on and on."""
    call = 0
    while True:
        number, index = generator.randrange(GRAPHS), generator.randrange(SUBGRAPHS)
        where = {name: value for name, value in place(number, index).items() if name != "lowering"}
        call += 1
        if call % 10 == 0:
            yield ran(number, index)
        elif call % 10 == 5:
            yield {"type": "timing", **where, "device": "cpu", "calls": call, "seconds": 0.5, "fastest": 0.01}
        else:
            sizes = {"before_bytes": call, "after_bytes": call + 1, "peak_bytes": call + 2}
            yield {"type": "memory", **where, "device": "cpu", "call": call, **sizes}


def place(number: int, index: int) -> dict[str, Any]:
    """Where an event of a subgraph belongs."""
    lowering = "eager" if index % 2 else "inductor"
    return {
        "graph": f"g{number}",
        "part": "inference",
        "subgraph": f"g{number}.inference.{index}",
        "lowering": lowering,
    }


def ran(number: int, index: int) -> dict[str, Any]:
    """That a subgraph ran."""
    return {
        "type": "ran",
        **place(number, index),
        "evidence": "/tmp/torchinductor_me/ab/cabcdefghijklmnopqrs.py (key f)",
    }


def write(path: Path, events: int) -> None:
    """Write a timeline of that many events."""
    own = {"pid": 1, "rank": 0, "thread": "MainThread"}
    plan, more = list(plans()), repeated(random.Random(0))
    with path.open("w") as stream:
        for seq in range(events):
            event = plan[seq] if seq < len(plan) else next(more)
            stream.write(json.dumps({"schema": 1, "time": 1e9 + seq / 1000, "seq": seq, **own, **event}) + "\n")


def main() -> None:
    """Print a row for each length, and fail if the memory grows with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no more than 100 000 events")
    lengths = (30_000, 100_000) if parser.parse_args().quick else (100_000, 1_000_000)
    rows: list[list[str]] = []
    peaks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            path = Path(folder) / f"{length}.jsonl"
            write(path, length)
            done = subprocess.run([sys.executable, "-c", READER, path], capture_output=True, text=True, check=True)
            events, subgraphs, read, peak, size, compared = json.loads(done.stdout)
            peaks.append(peak)
            megabytes = path.stat().st_size / 1e6
            cells = (f"{events:,}", f"{megabytes:.0f}", str(subgraphs), f"{read:.1f}", f"{peak:.0f}")
            rows.append([*cells, f"{size:.1f}", f"{compared:.2f}"])
    print(machine("cpu"))
    print(markdown_table(HEADER, rows))
    if peaks[-1] > 1.5 * peaks[0]:
        sys.exit(f"the memory grows with the length of the timeline: {peaks[0]:.0f} and {peaks[-1]:.0f} MiB")


if __name__ == "__main__":
    main()
