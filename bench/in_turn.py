"""Run benches side by side, but let them measure one after another, on a machine that is quiet by then.

    python bench/in_turn.py --jobs 15 <<'END'
    bench/bench_dtypes.py --models bert --batches 8 --only inference
    bench/bench_dtypes.py --models bert --batches 8 --only training
    END

Compiling takes most of a bench's time, and keeps one processor busy; measuring takes little of it, and the whole
machine. Each line is a script of Python's with its arguments. All of a group compile and warm up together; when the
last of them waits for its turn (`harness.wait_for_turn`), they are let go one by one, each until it ends. What they
print comes in the order of the lines.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import GO, READY, TURN


class Job:
    """One bench, which waits for its turn."""

    def __init__(self, line: str, folder: Path) -> None:
        folder.mkdir()
        self.line, self.folder = line, folder
        self.output = folder / "output"
        with self.output.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                [sys.executable, *shlex.split(line)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, TURN: str(folder)},
            )

    def waits(self) -> bool:
        """Whether it is warmed up, or has ended."""
        return (self.folder / READY).exists() or self.process.poll() is not None

    def measure(self, deadline: float) -> int:
        """Let it measure, until it ends or there is no time left; its exit status, or that of a killed process."""
        (self.folder / GO).touch()
        try:
            return self.process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def group(lines: list[str], folder: Path, start: float, arguments: argparse.Namespace) -> int:
    """Run some benches; how many failed."""
    jobs = [Job(line, folder / str(number)) for number, line in enumerate(lines)]
    while not all(job.waits() for job in jobs) and time.monotonic() - start < arguments.warm_up:
        time.sleep(0.5)
    for job in jobs:
        if not job.waits():
            job.process.kill()
            job.process.wait()
            print(f"{job.line}: not warmed up in time", flush=True)
    print(f"warmed up after {time.monotonic() - start:.0f} s", flush=True)
    failed = 0
    for job in jobs:
        status = job.measure(start + arguments.limit)
        failed += status != 0
        print(f"$ python {job.line}", flush=True)
        print(job.output.read_text(encoding="utf-8"), flush=True)
        if status != 0:
            print(f"ended with {status}", flush=True)
    return failed


def main() -> int:
    """Run what standard input lists; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many compile at once")
    parser.add_argument("--warm-up", type=float, default=3600, help="seconds for it; who is late is ended")
    parser.add_argument("--limit", type=float, default=7200, help="seconds for all")
    arguments = parser.parse_args()
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    start, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name:
        for first in range(0, len(lines), arguments.jobs):
            folder = Path(name, str(first))
            folder.mkdir()
            failed += group(lines[first : first + arguments.jobs], folder, start, arguments)
    print(f"{len(lines) - failed} of {len(lines)} benches ended well ({time.monotonic() - start:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
