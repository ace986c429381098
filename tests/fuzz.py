"""Random programs in eager and under omni, and the smallest form of those that differ, as tests.

    python -m tests.fuzz --seconds 600 --seed 7

Each program is drawn from a number, so `--only NUMBER` draws it again. A program that fails is reduced, run with
torch's own backends to say whose fault it is, and written to the folder of `--out` as a test that stands alone. The
exit status is 1 if a program failed that is right with `backend="aot_eager"`; `--strict` asks it for all but those that
Dynamo gets wrong, with `backend="eager"`.
"""

import argparse
import collections
import dataclasses
import json
import multiprocessing
import os
import pprint
import secrets
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_PROGRAMS_OF_A_WORKER = 150  # then a fresh process takes over, as Dynamo keeps some memory of each program
_LIMIT = 600.0  # seconds for one program, on a busy machine


@dataclasses.dataclass(frozen=True)
class Found:
    """A program that failed, reduced."""

    number: int
    kind: str
    detail: str
    owner: str
    test: str
    signature: str


def examine(number: int, lowerings: str, reduce_seconds: float) -> Found | None:
    """Draw a program, run it, and reduce it if it fails."""
    import torch
    from fuzz_checks import blame, check
    from fuzz_programs import Program, draw
    from fuzz_reduction import reduce

    torch.set_num_threads(1)
    program = draw(number, lowerings=lowerings)
    failure = check(program.source(), options=program.all_options())
    if failure is None:
        return None
    dynamos = check(program.source(), backend="eager")

    def fails(candidate: Program) -> bool:
        found = check(candidate.source(), options=candidate.all_options())
        if found is None or found.kind != failure.kind:
            return False
        return dynamos is not None or check(candidate.source(), backend="eager") is None

    smallest = reduce(program, fails, seconds=reduce_seconds)
    last = check(smallest.source(), options=smallest.all_options()) or failure
    blamed = blame(smallest.source())
    owner = next((name for name, verdict in blamed.items() if verdict != "right"), "omni")
    lines = [statement.text for statement in smallest.statements]
    test = _test(number, smallest, last, blamed)
    return Found(number, failure.kind, str(last), owner, test, "\n".join(lines))


def _test(number: int, program: Any, failure: Any, blamed: dict[str, str]) -> str:
    said = "\n".join(f"    {name}: {verdict[:300]}" for name, verdict in {"omni": str(failure), **blamed}.items())
    said = said.replace("\\", "/").replace('"""', "'''")
    options = pprint.pformat(program.all_options())
    return f'''"""Program {number} of tests/fuzz.py; what was seen with each backend:

{said}
"""

from fuzz_checks import verify

PROGRAM = """
{program.source().rstrip()}
"""


def test_program():
    verify(PROGRAM, options={options})
'''


def _work(connection: Connection, lowerings: str, reduce_seconds: float, out: str) -> None:
    log = os.open(os.path.join(out, f"worker.{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    while True:
        number = connection.recv()
        if number is None:
            return
        try:
            connection.send(examine(number, lowerings, reduce_seconds))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {str(error)[:500]}")


class _Worker:
    """A process that examines one program at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        given = (other, arguments.lowerings, arguments.reduce_seconds, str(arguments.out))
        self.process = context.Process(target=_work, args=given, daemon=False)
        self.process.start()
        other.close()
        self.number: int | None = None
        self.since = time.monotonic()
        self.done = 0

    def give(self, number: int) -> None:
        self.number, self.since = number, time.monotonic()
        self.connection.send(number)

    def answer(self, limit: float) -> Any:
        """What came of the program, a sentence if the process is lost, or `...` while it runs."""
        try:
            if self.connection.poll():
                self.done += 1
                return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return f"crash: exit code {self.process.exitcode}"
        if time.monotonic() - self.since > limit:
            self.end()
            return f"timeout: more than {limit:.0f} s"
        return ...

    def leave(self) -> None:
        """Let the process end by itself, which frees what it shares with others."""
        self.connection.send(None)
        self.process.join(30)
        self.end()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def main(argv: list[str] | None = None) -> int:
    """Run programs until the time is over; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, help="of the run; a fresh one is drawn and printed")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of programs, as a report names them")
    parser.add_argument("--examples", type=int, help="stop after so many programs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lowerings", choices=["eager", "inductor", "mixed"], default="mixed")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the tests; a new one in the temporary folder"
    )
    parser.add_argument("--reduce-seconds", type=float, default=60)
    parser.add_argument("--strict", action="store_true", help="fail for what is wrong with `aot_eager` too")
    arguments = parser.parse_args(argv)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    arguments.out = arguments.out or Path(tempfile.mkdtemp(prefix="omnicomp-fuzz-"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, failures in {arguments.out}", flush=True)
    return _Run(arguments, seed).run()


class _Run:
    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self._arguments = arguments
        only = arguments.only
        count = len(only) if only else arguments.examples or 10**6
        self._numbers = iter(only if only else range(seed * 10**6, seed * 10**6 + count))
        self._counts: collections.Counter[str] = collections.Counter()
        self._seen: set[tuple[str, str]] = set()
        self._end = time.monotonic() + arguments.seconds

    def run(self) -> int:
        workers = [_Worker(self._arguments) for _ in range(self._arguments.jobs)]
        try:
            while workers:
                for worker in list(workers):
                    if worker.number is None and not self._next(worker):
                        worker.leave()
                        workers.remove(worker)
                        continue
                    answer = worker.answer(_LIMIT + self._arguments.reduce_seconds)
                    if answer is ...:
                        continue
                    self._take(worker.number, answer)
                    worker.number = None
                    lost = isinstance(answer, str) and answer.startswith(("crash", "timeout"))
                    if lost or worker.done >= _PROGRAMS_OF_A_WORKER:
                        worker.end() if lost else worker.leave()
                        workers[workers.index(worker)] = _Worker(self._arguments)
                time.sleep(0.02)
        finally:
            for worker in workers:
                worker.end()
        return self._report()

    def _next(self, worker: _Worker) -> bool:
        number = next(self._numbers, None) if time.monotonic() < self._end else None
        if number is not None:
            worker.give(number)
        return number is not None

    def _take(self, number: int | None, answer: Any) -> None:
        self._counts["programs"] += 1
        if answer is None:
            return
        if isinstance(answer, str):
            self._counts["lost"] += 1
            print(f"program {number}: {answer}", flush=True)
            (self._arguments.out / f"lost_{number}.txt").write_text(answer + "\n")
            return
        signature = (answer.kind, answer.signature)
        self._counts[f"wrong first with {answer.owner}"] += 1
        if signature in self._seen:
            return
        self._seen.add(signature)
        file = self._arguments.out / f"test_{answer.owner}_{answer.kind.split()[0]}_{number}.py"
        file.write_text(answer.test)
        print(f"program {number}: {answer.detail[:200]} ({answer.owner}) -> {file}", flush=True)
        if answer.owner != "eager":
            print(answer.test, flush=True)

    def _report(self) -> int:
        for name, count in sorted(self._counts.items()):
            print(f"{count:6d} {name}")
        (self._arguments.out / "counts.json").write_text(json.dumps(self._counts))
        forgiven = ["eager"] if self._arguments.strict else ["eager", "aot_eager"]
        fine = {"programs", *(f"wrong first with {owner}" for owner in forgiven)}
        return int(bool(self._counts.keys() - fine))


if __name__ == "__main__":
    sys.exit(main())
