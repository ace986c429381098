"""Jobs of a few ranks over gloo, each a forked process; what each printed as its last line is its result."""

import json
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import python

PRELUDE = """
import datetime, faulthandler, json, os, signal, sys, time
import torch
import torch.distributed as dist
RANK, SIZE, GIVEN = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), json.loads(os.environ["GIVEN"])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=RANK, world_size=SIZE,
    timeout=datetime.timedelta(seconds=200),
)
torch.set_num_threads(1)
faulthandler.enable()  # a rank that dies says where
"""


def run_ranks(
    size: int, program: str, given: Mapping[str, Any] | None = None, folder: Path | None = None, timeout: float = 300
) -> list[Any]:
    """Run a program behind `PRELUDE` on every rank.

    Args:
        size: how many ranks.
        program: prints JSON in its last line; `GIVEN` has what follows.
        given: for all ranks.
        folder: for the program, and for caches; each rank has one of its own in it, and its timeline.
        timeout: seconds until a rank is killed.

    Returns:
        By rank, what it printed, or its exit status and the end of what it wrote to stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: list[Any] = [None] * size
    words = ["-c", PRELUDE + program]
    if folder is not None:  # so that graphs know their lines
        (folder / "program.py").write_text(PRELUDE + program)
        words = [str(folder / "program.py")]

    def run(rank: int) -> None:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "PORT": str(port),
            "GIVEN": json.dumps(given or {}),
        }
        if folder is not None:
            variables |= {
                "OMNICOMP_TIMELINE": str(folder / f"rank{rank}.jsonl"),
                "OMNICOMP_CACHE_DIR": str(folder / f"cache{rank}"),
            }
        try:
            done = python(*words, environment=variables, timeout=timeout)
        except subprocess.TimeoutExpired:
            results[rank] = {"hung": True}
            return
        lines = done.stdout.strip().splitlines()
        printed = done.returncode == 0 and lines and lines[-1].startswith(("{", "["))
        results[rank] = json.loads(lines[-1]) if printed else {"status": done.returncode, "stderr": done.stderr[-4000:]}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
