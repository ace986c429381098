"""How long until the first answer, and until full speed: cold, warm, from a file of artefacts, and in the background?

    python bench/bench_first_answer.py [--quick] [--json FILE] [--layers 2 8 32 80] [--candidates inductor omni]

Every number comes from the first call of a Llama in a process of its own. `cold` starts from an empty cache folder that
holds nothing but Inductor's precompiled headers, `warm` from the folder that the cold process left, and `loaded` from
an empty one and the file that the cold process saved with `omnicomp.save`. `package` loads what `omnicomp.package` made
for the same inputs, with the weights in a file beside it, which its bytes are without. Candidates take turns, and
ratios are medians over the rounds of the time over Inductor's in the same round, warm for the latter two; the last
column is the spread of the rounds. `CPU s` is what the first answer took of all processors, and says more than the
clock on a machine that does other work; what a worker in the background takes is not in it. What this version of
omnicomp has no option for is left out, and said.

`nested` marks each layer by `torch.compiler.nested_compile_region`, `layers` compiles each layer by itself. The stream
is one of 200 random lengths, each of which is answered as it comes; the caches are empty. There, `dynamo` is
`backend="eager"`: what each candidate waits for. Its columns `CPU` are of the calling thread alone, which says how long
a call works where other work has the processors; what it waits for, such as a lock, is in the clock's columns.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness import add_common_arguments, machine, markdown_table

CANDIDATES: Final = ("inductor", "nested", "layers", "omni", "background")
STATES: Final = ("cold", "warm", "loaded", "package")

PROGRAM = """
import dataclasses, json, random, resource, statistics, sys, threading, time
import torch
what = json.loads(sys.argv[1])
from omnicomp.testing.models import SIZES, build
SIZES["layers"] = dataclasses.replace(
    SIZES["tiny"], width=what["width"], heads=8, layers=what["layers"], length=what["length"]
)
torch.manual_seed(0)
case = build("llama", "layers").to(what["device"], torch.float32)
name, omni = what["candidate"], what["candidate"] in ("omni", "background")
import torch._inductor.compile_fx

def used():  # of all processors, with compilers that have ended
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

loading = spent = 0.0
if omni:
    import omnicomp, omnicomp.backend.pipeline
    if what["state"] == "loaded":
        start, before = time.perf_counter(), used()
        omnicomp.load(what["file"])
        loading, spent = time.perf_counter() - start, used() - before
    if what["state"] == "packing":
        omnicomp.package(case.model, (), what["file"], kwargs=case.inputs, weights="beside")
        print(json.dumps({}))
        sys.exit()
lists = [m for m in case.model.modules() if isinstance(m, torch.nn.ModuleList)]
layers = max(lists, key=len, default=())
call = case.model
if name == "nested":
    for kind in {type(layer) for layer in layers}:
        kind.forward = torch.compiler.nested_compile_region(kind.forward)
if name == "layers":
    torch._dynamo.config.recompile_limit = max(64, 2 * len(layers))
    for layer in layers:
        layer.compile(backend="inductor")
elif what["state"] == "package":
    start, before = time.perf_counter(), used()
    call = omnicomp.load_package(what["file"])
    loading, spent = time.perf_counter() - start, used() - before
elif name != "eager":
    options = {"background": True} if name == "background" else None
    backend = "omni" if omni else {"dynamo": "eager"}.get(name, "inductor")
    call = torch.compile(case.model, backend=backend, options=options)

def once(inputs=case.inputs, clocks=(time.perf_counter,)):
    start = [clock() for clock in clocks]
    with torch.no_grad():
        call(**inputs)
    if what["device"] == "cuda":
        torch.cuda.synchronize()
    took = [clock() - begun for clock, begun in zip(clocks, start)]
    return took if len(took) > 1 else took[0]

found = {}
if what["stream"]:
    draw = random.Random(0)
    low, high = what["length"] // 8, what["length"]
    times = []
    clocks = (time.perf_counter, time.thread_time)
    for _ in range(200):
        length = draw.randint(max(low, 2), high)
        inputs = {k: v[:, :length] if torch.is_tensor(v) and v.dim() == 2 else v for k, v in case.inputs.items()}
        times.append(once(inputs, clocks))
    for name, values in zip(("stream", "stream_cpu"), zip(*times)):
        ordered = sorted(values)
        found[name] = {"p50": ordered[100], "p99": ordered[197], "worst": ordered[-1], "whole": sum(values)}
else:
    begin, before = time.perf_counter() - loading, used()
    found["first"] = once() + loading
    found["first_cpu"] = used() - before + spent
    ends, times = [time.perf_counter() - begin], []
    if name == "background":
        done = threading.Event()
        threading.Thread(target=lambda: (omnicomp.wait(), done.set()), daemon=True).start()
        while not done.is_set():
            times.append(once())
            ends.append(time.perf_counter() - begin)
    for _ in range(what["calls"]):
        times.append(once())
        ends.append(time.perf_counter() - begin)
    steady = statistics.median(times[-what["calls"] :])
    slow = [i for i, seconds in enumerate(times[: -what["calls"]]) if seconds > 1.25 * steady]
    found["steady"], found["full_speed"] = steady, ends[slow[-1] + 1 if slow else 0]
if omni and what["state"] == "cold" and what["file"]:
    omnicomp.save(what["file"])
found["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(found))
"""


def run(candidate: str, state: str, layers: int, arguments: argparse.Namespace, folder: Path, file: str, **more: Any):
    """Run in a process of its own; what it measured."""
    what = {
        "candidate": candidate,
        "state": state,
        "layers": layers,
        "width": 64 if arguments.quick else 256,
        "length": 32 if arguments.quick else 128,
        "device": arguments.device,
        "calls": 5 if arguments.quick else 20,
        "file": file,
        "stream": False,
        **more,
    }
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).resolve().parents[1])]
        ),
    }
    environment.pop("OMNICOMP_CACHE_DIR", None)
    command = [sys.executable, "-c", PROGRAM, json.dumps(what)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        return {"failed": (result.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(result.stdout.splitlines()[-1])


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder, without Inductor's precompiled headers."""
    files = (path for path in folder.rglob("*") if path.is_file() and "precompiled_headers" not in path.parts)
    return sum(path.stat().st_size for path in files)


def fresh(folder: Path, headers: Path) -> Path:
    """An empty cache folder with nothing but precompiled headers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if (headers / "precompiled_headers").is_dir():
        shutil.copytree(headers / "precompiled_headers", folder / "precompiled_headers")
    return folder


def measured(arguments: argparse.Namespace, candidates: Sequence[str], root: Path) -> list[dict[str, Any]]:
    """A row for each candidate, state, number of layers and round."""
    rows: list[dict[str, Any]] = []
    headers = root / "headers"
    run("inductor", "cold", 1, arguments, headers, "")
    for layers in arguments.layers if arguments.only != "stream" else ():
        for number in range(arguments.rounds):
            order = candidates if number % 2 == 0 else candidates[::-1]
            for candidate in order:
                folder, file = fresh(root / candidate, headers), str(root / f"{candidate}.omni")
                omni = candidate in ("omni", "background")
                for state in STATES[: {"omni": 4, "background": 3}.get(candidate, 2)]:
                    if state in ("loaded", "package"):
                        fresh(folder, headers)
                    made: dict[str, Any] = {}
                    if state == "package":
                        file = str(root / f"{candidate}.pt2")
                        made = run(candidate, "packing", layers, arguments, folder, file)
                        fresh(folder, headers)
                    found = made or run(candidate, state, layers, arguments, folder, file if omni else "")
                    found["bytes"] = size_of(folder)
                    found["file"] = Path(file).stat().st_size if omni and Path(file).exists() else 0
                    rows.append({"layers": layers, "round": number, "candidate": candidate, "state": state, **found})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for number in range(arguments.rounds if arguments.only != "answers" else 0):
        for candidate in ("eager", "dynamo", *candidates):
            folder = fresh(root / candidate, headers)
            found = run(candidate, "stream", arguments.layers[0], arguments, folder, "", stream=True)
            rows.append(
                {"layers": arguments.layers[0], "round": number, "candidate": candidate, "state": "stream", **found}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the times to the first answer and to full speed, and ratios to Inductor in the same round."""
    lines: list[list[str]] = []
    for key in dict.fromkeys((r["layers"], r["state"], r["candidate"]) for r in rows if r["state"] != "stream"):
        layers, state, candidate = key
        own = [r for r in rows if (r["layers"], r["state"], r["candidate"]) == key]
        good = [r for r in own if "first" in r]
        if not good:
            lines.append([str(layers), state, candidate, own[0].get("failed", ""), *[""] * 8])
            continue
        like = "warm" if state in ("loaded", "package") else state
        other = {
            r["round"]: r
            for r in rows
            if (r["layers"], r["state"], r["candidate"]) == (layers, like, "inductor") and "first" in r
        }
        ratios = [r["first"] / other[r["round"]]["first"] for r in good if r["round"] in other]
        speed = [r["steady"] / other[r["round"]]["steady"] for r in good if r["round"] in other]
        memory = [r["rss"] / other[r["round"]]["rss"] for r in good if r["round"] in other]
        first = [r["first"] for r in good]
        lines.append(
            [
                str(layers),
                state,
                candidate,
                f"{statistics.median(first):.2f}",
                f"{statistics.median(r['first_cpu'] for r in good):.2f}",
                f"{statistics.median(r['full_speed'] for r in good):.2f}",
                f"{1e3 * statistics.median(r['steady'] for r in good):.2f}",
                f"{statistics.median(r['rss'] for r in good) / 2**20:.0f}",
                f"{statistics.median(r['file'] or r['bytes'] for r in good) / 2**20:.1f}",
                *(f"{statistics.median(values):.3f}" if values else "" for values in (ratios, speed, memory)),
                f"{100 * (max(first) - min(first)) / statistics.median(first):.0f} %",
            ]
        )
    header = [
        "layers",
        "caches",
        "candidate",
        "first answer s",
        "CPU s",
        "full speed s",
        "steady ms",
        "peak RSS MiB",
        "artefacts MiB",
        "first / Inductor",
        "steady / Inductor",
        "RSS / Inductor",
        "spread",
    ]
    return markdown_table(header, [line + [""] * (len(header) - len(line)) for line in lines])


def stream_table(rows: Sequence[dict[str, Any]]) -> str:
    """Percentiles of the answers of the stream in milliseconds, by the clock and in the calling thread."""
    lines: list[list[str]] = []
    names, measures = ("p50", "p99", "worst", "whole"), ("stream", "stream_cpu")
    for candidate in dict.fromkeys(r["candidate"] for r in rows if r["state"] == "stream"):
        own = [r for r in rows if r["state"] == "stream" and r["candidate"] == candidate]
        good = [r for r in own if "stream" in r]
        cells = [f"{1e3 * statistics.median(r[m][name] for r in good):.1f}" for m in measures for name in names if good]
        lines.append([candidate, *(cells or [own[0].get("failed", ""), *[""] * 7])])
    header = [f"{name} {unit}" for unit in ("ms", "CPU ms") for name in names]
    return markdown_table(["stream of 200 lengths", *header], lines)


def available() -> dict[str, str]:
    """The candidates that this version of omnicomp has nothing for, and why."""
    from omnicomp.options.policy import SPECS

    return {} if "background" in SPECS else {"background": "there is no option `background`"}


def main() -> None:
    """Print a row for each candidate, state and number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--only", choices=("answers", "stream"), help="one of the two tables")
    parser.add_argument("--json", metavar="FILE", help="write every measurement to a file")
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or ([2] if arguments.quick else [2, 8, 32, 80])
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    start = time.perf_counter()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{machine(arguments.device)}, {arguments.rounds} rounds{load}", flush=True)
    missing = available()
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    candidates = [name for name in arguments.candidates if name not in missing]
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(arguments, candidates, Path(folder))
    if arguments.only != "stream":
        print(table(rows))
    if arguments.only != "answers":
        print(stream_table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
