"""Jobs in another process: one that crashes the interpreter or hangs is a result, and the others still run.

A suite is a function that returns jobs by name, each a function that returns a JSON object. The process makes the suite
and runs its jobs in turn; if it dies, another one goes on behind the job that killed it.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from omnicomp.errors import OmnicompError

Jobs = Mapping[str, Callable[[], dict[str, Any]]]
_START_SECONDS: Final = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job."""

    name: str  # of the job
    result: dict[str, Any] | None = None  # what it returned, or None if it has no result
    raised: str = ""  # the traceback of what it raised; empty if nothing was
    crashed: str = ""  # how the process ended in it: `SIGSEGV`, `status 3`, `no answer in 300 s`; empty if it went on
    tail: str = ""  # the last lines that the process wrote, if it crashed
    seconds: float = 0.0  # wall time

    @property
    def problem(self) -> str:
        """What went wrong, in one line; empty if it has a result."""
        if self.crashed:
            ended = self.crashed if self.crashed.startswith("no answer") else f"the interpreter ended by {self.crashed}"
            last = [line.strip() for line in self.tail.splitlines() if line.strip()][-1:]
            return f"{ended}; its last words: {last[0][:200]}" if last else ended
        return self.raised.strip().splitlines()[-1][:300] if self.raised else ""


def run_isolated(
    suite: str, arguments: Mapping[str, Any], *, seconds: float = 300.0, environment: Mapping[str, str] | None = None
) -> Iterator[Outcome]:
    """Run the jobs of a suite in a process of their own, and another one whenever it dies.

    Args:
        suite: `module:function`, which is called with `arguments` and returns the jobs, the same in every process.
        arguments: as JSON has them.
        seconds: that a job may take.
        environment: variables that the process gets beside the present ones.

    Yields:
        An outcome for each job, in the suite's order.

    Raises:
        OmnicompError: the suite can't be made; its error is the last line that the process wrote.
    """
    done: list[str] = []
    while True:
        call = {"suite": suite, "arguments": dict(arguments), "done": done}
        with _Process(call, environment or {}) as process:
            names = process.names()
            for name in names:
                outcome = process.next(name, seconds)
                done.append(name)
                yield outcome
                if outcome.crashed:
                    break
            else:
                return


class _Process:
    """A process that runs the jobs that are left."""

    def __init__(self, call: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._call, self._environment = call, environment
        self._buffer = b""

    def __enter__(self) -> "_Process":
        self._read, write = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "omnicomp.testing.isolated", json.dumps(self._call), str(write)]
        # The package is found where this one was found, also in a checkout that was never installed.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            env={**os.environ, "PYTHONPATH": paths, **self._environment},
        )
        os.close(write)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._read)
        self._log.close()

    def names(self) -> list[str]:
        """The jobs that are left."""
        message = self._message(_START_SECONDS)
        if message is None:
            lines = self._tail().splitlines()
            raise OmnicompError(f"the checks could not start: {lines[-1] if lines else self._ended()}")
        if "error" in message:
            raise OmnicompError(message["error"])
        return message["names"]

    def next(self, name: str, seconds: float) -> Outcome:
        """Wait for one job."""
        start = time.perf_counter()
        message = self._message(seconds)
        taken = time.perf_counter() - start
        if message is None:
            how = self._ended(seconds)
            return Outcome(name=name, crashed=how, tail=self._tail(), seconds=taken)
        return Outcome(name=name, result=message.get("result"), raised=message.get("raised", ""), seconds=taken)

    def _message(self, seconds: float) -> dict[str, Any] | None:
        """The next line of the process, or None if it ends or says nothing for so long."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self._read, 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _ended(self, seconds: float = 0.0) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        status = self._process.poll()
        if status is None:
            return f"no answer in {seconds:.0f} s"
        return signal.Signals(-status).name if status < 0 else f"status {status}"

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-12:])


def _main(call: dict[str, Any], out: IO[str]) -> None:
    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    module, _, function = call["suite"].partition(":")
    try:
        jobs: Jobs = getattr(importlib.import_module(module), function)(**call["arguments"])
    except OmnicompError as error:
        say({"error": str(error)})
        return
    left = {name: job for name, job in jobs.items() if name not in set(call["done"])}
    say({"names": list(left)})
    for job in left.values():
        try:
            say({"result": job()})
        except Exception:  # noqa: BLE001 - becomes the outcome's text
            say({"raised": traceback.format_exc()})


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as _out:
        _main(json.loads(sys.argv[1]), _out)
    sys.stdout.flush()
    os._exit(0)  # a device's own clean-up at the end of a process is no part of any job


def find_function(name: str) -> Callable[..., Any]:
    """Import what a name stands for.

    Args:
        name: `path/to/file.py:function` or `package.module:function`; the module is also looked for in the current
            folder.

    Raises:
        OmnicompError: there is no such file, module or function, or importing it raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise OmnicompError(f"{name!r} names no function; write file.py:function or module:function")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise OmnicompError(f"{place} has no function {attribute!r}; write file.py:function or module:function")
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise OmnicompError(f"there is no file {path}; write file.py:function or module:function")
    name = f"omnicomp_named_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OmnicompError(f"{path} can't be imported; it has to be a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OmnicompError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise OmnicompError(f"the module {name} can't be imported: {type(error).__name__}: {error}") from error
