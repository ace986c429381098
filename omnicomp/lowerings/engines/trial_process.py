"""The worker of `omnicomp.lowerings.engines.trial`, seen from the process that asks: started at need, replaced if dead.

It is a Python of its own with the same `sys.path`, not a fork of this one, whose threads would not survive that. It
does not import the user's main module, and leaves when this process ends, or when it was not asked for a minute.
"""

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, Final

__all__ = ["DiedError", "HungError", "NotStartedError", "Worker", "worker"]

# Until the worker has imported what it needs, from a cold disk.
_START_SECONDS: Final = 180.0
_CODE: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from omnicomp.lowerings.engines.trial_worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class NotStartedError(Exception):
    """No worker could be started; the message is its last words."""


class HungError(Exception):
    """The worker did not answer in time; it was ended."""


class DiedError(Exception):
    """The worker died at its task."""

    def __init__(self, code: int, words: str, *, gone: bool) -> None:
        """Hold its exit status, negative for a signal, its last line, and whether no other is in its place."""
        super().__init__(f"exit status {code}")
        self.code, self.words, self.gone = code, words, gone


class _Process:
    """One worker process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.log: IO[bytes] = tempfile.TemporaryFile()
        self.connection, theirs = Pipe()
        environment = {name: text for name, text in os.environ.items() if not name.startswith("OMNICOMP_TIMELINE")}
        arguments = [json.dumps(list(map(str, sys.path))), str(theirs.fileno()), str(self.owner)]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # an interrupt from the terminal is for the program
            )
        finally:
            theirs.close()

    def forget_words(self) -> None:
        """Empty what it has written so far."""
        self.log.truncate(0)

    def words(self) -> str:
        """The last line that it wrote, at most 200 characters."""
        self.log.seek(0)
        text = self.log.read().replace(b"\0", b"").decode(errors="replace")  # it writes on where it was
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""

    def end(self) -> None:
        """Kill it, if it is this process' and still there."""
        self.connection.close()
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


class Worker:
    """The worker of this process, one task at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> tuple[str, str]:
        """What a worker answers.

        Args:
            request: of `omnicomp.lowerings.engines.trial_worker`.
            seconds: that it may take, once it has begun.

        Raises:
            NotStartedError: there is no worker.
            HungError: it did not answer in time.
            DiedError: it died at it.
        """
        with self._lock:
            data = pickle.dumps(request)
            try:
                process = self._begun(data)
                if not process.connection.poll(seconds):
                    raise HungError
                return self._answer(process)
            except DiedError as died:
                if died.gone:
                    self._end()
                raise
            except BaseException:  # also an interrupt: what is in the pipe would be taken for the next answer
                self._end()
                raise

    @property
    def pid(self) -> int | None:
        """The process that was asked last, if it is still there."""
        process = self._process
        return None if process is None or process.process.poll() is not None else process.process.pid

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._end()

    def _begun(self, data: bytes) -> _Process:
        """A worker that has begun a task. One that left since it was last asked is replaced."""
        if self._process is not None and self._process.owner != os.getpid():
            self._process = None  # this process was forked, and the worker is its parent's
        words = ""
        for _ in range(2 if self._process is not None else 1):
            process = self._process
            if process is None:
                try:
                    process = self._process = _Process()
                except OSError as error:
                    raise NotStartedError(f"{sys.executable} can't be started: {error}") from error
            try:
                process.forget_words()
                process.connection.send_bytes(data)
                if process.connection.poll(_START_SECONDS) and process.connection.recv() == "begun":
                    return process
                words = f"no answer within {_START_SECONDS:g} s"
            except (EOFError, OSError):
                words = process.words()
            self._end()
        raise NotStartedError(f"the process that tries it can't be started: {words or 'it says nothing'}")

    def _answer(self, process: _Process) -> tuple[str, str]:
        connection: Connection = process.connection
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            try:
                code = process.process.wait(10)
            except subprocess.TimeoutExpired:
                code = 0  # it closed the connection and lives
            raise DiedError(code, process.words(), gone=True) from None
        if answer[0] == "died":
            raise DiedError(answer[1], process.words(), gone=False)
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


worker: Final = Worker()
atexit.register(worker.close)
