"""What part of the compile time does the attention pass take, and how do it and the rest grow with a model's layers?

    python bench/bench_pass_time.py [--quick] [--lowering eager] [--layers 1 4 16 64 128] [--training] [--warm] [--rss]

Each number comes from the first call of a Llama in a process of its own, with cold graph caches; the seconds of a pass
are those of its `pass_run` events. Target: at most 5 % of the compile time at 32 layers, and an exponent of about 1.
Placement, the report that is folded and printed, and the number of events should grow like the operators. `CPU s`, of
all processors, and the times of placement and of the report, of one, say more than the clock on a machine that does
other work; at 64 layers and more a round takes minutes there. `--warm` has
a second process do it again with the caches that the first one left; `--rss` compares peaks of resident memory with
Inductor's, target 1.05.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import add_common_arguments, machine, markdown_table

PROGRAM = """
import dataclasses, json, resource, sys, time
import torch
import omnicomp
from omnicomp.builder import part
from omnicomp.testing.models import SIZES, build
what = json.loads(sys.argv[1])
SIZES["layers"] = dataclasses.replace(SIZES["tiny"], width=what["width"], heads=8, layers=what["layers"], length=128)
case = build("llama", "layers").to(what["device"], torch.float32)
backend = what["backend"]
options = {"lowerings": ["eager"]} if what["lowering"] == "eager" and backend == "omni" else {}
# Inductor's own start-up and omnicomp's import are paid before the clock starts.
torch.compile(torch.sin, backend=backend, options=options)(torch.ones(3, device=what["device"]))
omnicomp.timeline.clear()
placement = 0.0
place = part.place
def timed(*args, **kwargs):
    global placement
    start = time.thread_time()
    try:
        return place(*args, **kwargs)
    finally:
        placement += time.thread_time() - start
part.place = timed
compiled = torch.compile(case.model, backend=backend, options=options)
def used():  # of all processors, with compilers that have ended
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
start, before = time.perf_counter(), used()
if what["training"]:
    case.output(compiled(**case.inputs)).square().mean().backward()
else:
    with torch.no_grad():
        compiled(**case.inputs)
seconds, cpu = time.perf_counter() - start, used() - before
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
passes = {}
for event in omnicomp.timeline.events():
    if isinstance(event, omnicomp.timeline.PassRun):
        passes[event.name] = passes.get(event.name, 0.0) + event.seconds
start = time.thread_time()
report = omnicomp.audit()
report.to_text()
told = time.thread_time() - start
sites = report.sites
events = len(omnicomp.timeline.events())
nodes = sum(event.nodes for event in omnicomp.timeline.events() if isinstance(event, omnicomp.timeline.Capture))
grown = {"cpu": cpu, "rss": peak, "placement": placement, "audit": told, "events": events}
counts = {**grown, "nodes": nodes, "fused": len(sites.fused), "total": sites.total}
print(json.dumps({"seconds": seconds, "passes": passes, **counts}))
"""


def compile_once(
    layers: int, arguments: argparse.Namespace, folder: str, tag: str = "", backend: str = "omni"
) -> dict[str, Any]:
    """Compile in a process of its own; what it measured. Processes of one tag share caches."""
    tag = tag or uuid.uuid4().hex
    what = {
        "layers": layers,
        "width": 64 if arguments.quick else 256,
        "device": arguments.device,
        "lowering": arguments.lowering,
        "training": arguments.training,
        "backend": backend,
    }
    # A tag of its own makes the graph caches cold; the folder keeps Inductor's precompiled headers.
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TORCH_COMPILE_CACHE_KEY_TAG": tag,
        "OMNICOMP_CACHE_DIR": str(Path(folder, tag)),
        "PYTHONPATH": os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).resolve().parents[1])]
        ),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(what)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def rerun(layers: int, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Compile once, or with warm caches what was compiled before."""
    tag = uuid.uuid4().hex
    if arguments.warm:
        compile_once(layers, arguments, folder, tag)
    return compile_once(layers, arguments, folder, tag)


def median_of(runs: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Medians over the runs: of the compile time, and of the pass."""
    names = ("cpu", "placement", "audit", "events", "rss")
    return {
        **{each: statistics.median(run[each] for run in runs) for each in names},
        "seconds": statistics.median(run["seconds"] for run in runs),
        "pass": statistics.median(run["passes"].get(name, 0.0) for run in runs),
    }


def exponent(layers: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) over log(layers), by least squares: 1 is linear, 2 quadratic."""
    fit = statistics.linear_regression(torch.tensor(layers).log().tolist(), torch.tensor(seconds).log().tolist())
    return fit.slope


def line(layers: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Slope and intercept of the least-squares line, and the largest deviation from it as a share of the value."""
    slope, intercept = statistics.linear_regression(layers, seconds)
    off = max(abs(intercept + slope * n - s) / s for n, s in zip(layers, seconds, strict=True))
    return slope, intercept, off


def main() -> None:
    """Print a row for each number of layers, and the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="inductor", help="eager: passes only")
    parser.add_argument("--training", action="store_true", help="with the backward")
    parser.add_argument("--warm", action="store_true", help="with the caches of an earlier process")
    parser.add_argument("--rss", action="store_true", help="compare the peak of resident memory with Inductor's")
    parser.add_argument("--pass", dest="name", default="attention_fusion", help="name of the pass")
    arguments = parser.parse_args()
    layers = arguments.layers or ([2, 4, 8] if arguments.quick else [4, 8, 16, 32])
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    start = time.perf_counter()
    mode = "training" if arguments.training else "inference"
    print(f"{machine(arguments.device)}, lowering {arguments.lowering}, {mode}, {rounds} rounds", flush=True)
    medians: list[dict[str, float]] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        compile_once(1, arguments, folder)  # fills the folder
        for count in layers:
            runs = [rerun(count, arguments, folder) for _ in range(rounds)]
            if any(arguments.name not in run["passes"] for run in runs):
                raise SystemExit(f"no pass named {arguments.name!r} ran; there were {sorted(runs[0]['passes'])}")
            medians.append(median_of(runs, arguments.name))
            total, own = medians[-1]["seconds"], medians[-1]["pass"]
            others = {name: seconds for name, seconds in runs[0]["passes"].items() if name != arguments.name}
            cells = [
                f"{total:.2f}",
                f"{medians[-1]['cpu']:.2f}",
                f"{own:.3f}",
                f"{100 * own / total:.1f} %",
                f"{1e3 * own / count:.1f}",
            ]
            memory = medians[-1]["rss"]
            base = [compile_once(count, arguments, folder, backend="inductor") for _ in range(rounds * arguments.rss)]
            ratio = f"{memory / statistics.median(run['rss'] for run in base):.3f}" if base else ""
            rows.append(
                [
                    str(count),
                    str(runs[0]["nodes"]),
                    *cells,
                    ", ".join(f"{name} {seconds:.3f}" for name, seconds in others.items()),
                    f"{runs[0]['fused']} of {runs[0]['total']}",
                    *(f"{medians[-1][each]:.3f}" for each in ("placement", "audit")),
                    *(f"{medians[-1]['events']:.0f}", f"{memory / 1024:.0f}", ratio),
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    header = [
        "layers",
        "operators",
        "compile s",
        "CPU s",
        f"{arguments.name} s",
        "share",
        "ms a layer",
        "other passes s",
        "fused",
        "placement s",
        "report s",
        "events",
        "peak RSS MiB",
        "RSS / Inductor",
    ]
    print(markdown_table(header, rows))
    if len(layers) > 1:
        growth = exponent(layers, [m["pass"] for m in medians])
        whole = exponent(layers, [m["seconds"] for m in medians])
        rest = {each: exponent(layers, [m[each] for m in medians]) for each in ("cpu", "placement", "audit", "events")}
        told = ", ".join(f"{each} {power:.2f}" for each, power in rest.items())
        print(f"grows with layers to the power of: pass {growth:.2f}, compilation {whole:.2f}, {told}")
    if len(layers) > 2:  # a constant, such as imports on first use, bends the power but not the line
        slope, intercept, off = line(layers, [m["pass"] for m in medians])
        print(f"pass = {intercept:.3f} s + {1e3 * slope:.1f} ms a layer; off by {100 * off:.0f} % at most")
    share = medians[-1]["pass"] / medians[-1]["seconds"]
    if arguments.lowering == "inductor":
        verdict = "met" if share <= 0.05 else "missed"
        print(f"share at {layers[-1]} layers: {100 * share:.1f} %, target 5 %: {verdict}")
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
