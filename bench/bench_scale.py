"""What one rank costs a large job: events, bytes, cache traffic, messages between ranks, and seconds of building.

    python bench/bench_scale.py --json scale.json

docs/scale.md multiplies these by ten thousand. The model is a small Llama of hand-written attention in training, which
is compiled layer by layer; a graph is one layer.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def one(folder: Path, artefacts: str) -> dict[str, Any]:
    """Compile a layer in this process, and say how long it took and what was left."""
    import torch

    import omnicomp
    from examples.train.llama import WIDTH, Layer

    began, before = time.perf_counter(), os.times()
    loaded = omnicomp.load(artefacts) if artefacts else None
    torch.manual_seed(0)
    layer, x = torch.compile(Layer("written"), backend="omni"), torch.randn(2, 128, WIDTH)
    layer(x, None).sum().backward()
    seconds, used = time.perf_counter() - began, sum(os.times()[:4]) - sum(before[:4])
    if not artefacts and not (folder / "file.omni").exists():
        omnicomp.save(folder / "file.omni")
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "events": len(omnicomp.timeline.events()),
        "refused": "" if loaded is None or loaded.reason is None else loaded.reason.sentence,
    }


class Counted:
    """A store that counts its messages."""

    def __init__(self, store: Any) -> None:
        self._store, self.messages, self.bytes = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def counted(*words: Any) -> Any:
            self.messages += 1
            self.bytes += len(repr(words))
            return found(*words)

        return counted if callable(found) else found


def rank(late: float) -> None:
    """Call a graph with a collective, and print what this rank asked of the job's store; one rank comes late."""
    import torch
    import torch.distributed._functional_collectives as funcol
    from torch.distributed import distributed_c10d

    import omnicomp

    torch.distributed.init_process_group("gloo")
    me, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    store = Counted(distributed_c10d._get_default_store())
    distributed_c10d._get_default_store = lambda: store

    @torch.compile(backend="omni", options={"lowerings": ["eager"]})
    def total(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x.sin(), "sum", torch.distributed.group.WORLD)

    time.sleep(late if me == size - 1 else 0)
    total(torch.ones(8))
    (waited,) = [event.seconds for event in omnicomp.timeline.events() if event.type == "agreement"]
    counts = {"messages": store.messages, "bytes": store.bytes, "waited": waited}
    everyone: list[Any] = [None] * size
    torch.distributed.all_gather_object(everyone, counts)
    if me == 0:
        print(json.dumps({"ranks": size, "late": late, "each": everyone}), flush=True)
    torch.distributed.barrier()


def run(*words: Any, folder: Path, cache: str, timeline: str = "") -> list[dict[str, Any]]:
    """This script in a process of its own; the JSON lines that it prints."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / cache), "OMNICOMP_CACHE_DIR": str(folder / cache / "omni")}
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "OMNICOMP_TIMELINE": timeline}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **caches, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def size(path: Path) -> tuple[int, int]:
    """Files and bytes of a folder."""
    files = [each for each in path.rglob("*") if each.is_file()]
    return len(files), sum(each.stat().st_size for each in files)


def read_folder(timeline: Path, folder: Path, ranks: int) -> dict[str, float]:
    """Seconds and memory of one report for so many ranks, by copies of one rank's timeline."""
    from omnicomp.audit.fleet import fleet

    folder.mkdir()
    text = timeline.read_text()
    for number in range(ranks):
        (folder / f"{number}.jsonl").write_text(text.replace('"rank": 0', f'"rank": {number}'))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = fleet(folder)
    seconds = time.perf_counter() - began
    report = len(found.to_json())
    shutil.rmtree(folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "ranks": ranks,
        "seconds": seconds,
        "peak_kib_more": grown,
        "groups": len(found.groups),
        "json_bytes": report,
    }


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=500, help="timelines in the folder that is read")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--artefacts", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank(arguments.rank)
        return
    if arguments.one:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(one(arguments.one, arguments.artefacts)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = (__file__, "--one", folder)
        run(*words, folder=folder, cache="first")  # has Inductor's C++ headers compiled, once a machine
        (folder / "file.omni").unlink()
        timeline = folder / "cold.jsonl"
        (cold,) = run(*words, folder=folder, cache="cold", timeline=str(timeline))
        files, kept = size(folder / "cold")
        (warm,) = run(*words, folder=folder, cache="cold")
        (loaded,) = run(*words, "--artefacts", folder / "file.omni", folder=folder, cache="loaded")
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
        stores = [
            run(*launch, ranks, __file__, "--rank", late, folder=folder, cache="cold")
            for ranks in (2, 4, 8)
            for late in (0, 10)
        ]
        found = {
            "graph": {"events": cold["events"], "timeline_bytes": timeline.stat().st_size},
            "build": {"cold": cold, "warm": warm, "loaded": loaded},
            "cache": {"files": files, "bytes": kept},
            "artefacts": {"bytes": (folder / "file.omni").stat().st_size},
            "store": stores,
            "report": read_folder(timeline, folder / "runs", arguments.ranks),
        }
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
