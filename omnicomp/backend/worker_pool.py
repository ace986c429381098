"""Processes that build graphs behind the running program, and the threads that wait for them.

Each worker leads a process group of its own, with the compilers that it starts. The group ends with the program: at its
exit, and by the worker itself once the pipe to the program is closed, however the program ended. A worker that has
nothing to do for a while ends as well.
"""

import atexit
import collections
import contextlib
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from omnicomp.errors import first_line

MODULE: Final = "omnicomp.backend.worker"
IDLE_SECONDS: Final = 60.0
_LENGTH: Final = struct.Struct(">Q")
_CLOSING_SECONDS: Final = 5.0
_ATTEMPTS: Final = 2
_NICE: Final = 5


class WorkerError(Exception):
    """A worker ended, or could not be started."""


class Order(Protocol):
    """A graph to build."""

    data: bytes

    def is_wanted(self) -> bool:
        """Whether the program still has the graph."""
        ...

    def done(self, reply: bytes) -> None:
        """Take what the worker returned; called in a thread of the pool."""
        ...

    def failed(self, why: str) -> None:
        """There is no reply; called in a thread of the pool."""
        ...


def most_workers() -> int:
    """How many processes build at once."""
    return 2 if (os.cpu_count() or 1) >= 8 else 1


class Worker:
    """A process that builds one graph after another."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            WorkerError: that is not possible.
        """
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs), str(answers)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMNICOMP_BACKGROUND": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs, answers),
                start_new_session=True,
            )
        except OSError as error:
            self.forget()
            raise WorkerError(f"a worker can't be started: {first_line(error)}") from error
        finally:
            os.close(theirs)
            os.close(answers)
        _yield_to_program(self._process.pid)

    def ask(self, data: bytes) -> bytes:
        """Have a graph built.

        Raises:
            WorkerError: the process ended.
        """
        try:
            send(self._write, data)
            return receive(self._read)
        except (EOFError, OSError):
            try:
                status = self._process.wait(_CLOSING_SECONDS)
            except subprocess.TimeoutExpired:
                status = 0
            ended = f"signal {-status}" if status < 0 else f"status {status}"
            raise WorkerError(f"the process that built the graph ended with {ended}") from None

    def kill(self) -> None:
        """End the process and what it started; who waits for it gets an error."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give up what belongs to it in this process, once it was killed."""
        self.forget()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)

    def forget(self) -> None:
        """Close the pipes: in a forked child, which would keep the worker from seeing that the program ended."""
        for end in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(end)


class Pool:
    """Up to `most_workers()` workers or as many as are said, started when there is something to build."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._orders: collections.deque[Order] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        self._free = 0
        self._closing = False

    def submit(self, order: Order) -> None:
        """Build a graph when it is its turn."""
        with self._changed:
            if self._closing:
                return
            self._orders.append(order)
            if len(self._orders) > self._free and len(self._threads) < (self._most or most_workers()):
                thread = threading.Thread(target=self._serve, name="omnicomp-background", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def pids(self) -> list[int]:
        """The processes that are there."""
        with self._changed:
            return [worker._process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers, and wait for the threads."""
        with self._changed:
            self._closing = True
            self._orders.clear()
            workers, threads = list(self._workers), list(self._threads)
            self._changed.notify_all()
        for worker in workers:
            worker.kill()
        end = time.monotonic() + _CLOSING_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))

    def forget(self) -> None:
        """Leave the workers to the process that this one was forked from."""
        for worker in self._workers:
            worker.forget()

    def _next(self) -> Order | None:
        with self._changed:
            self._free += 1
            self._changed.wait_for(lambda: self._closing or bool(self._orders), IDLE_SECONDS)
            self._free -= 1
            if self._orders and not self._closing:
                return self._orders.popleft()
            self._threads.remove(threading.current_thread())
            return None

    def _serve(self) -> None:
        worker: Worker | None = None
        while (order := self._next()) is not None:
            if order.is_wanted():
                worker = self._build(order, worker)
        if worker is not None:
            self._end(worker)

    def _build(self, order: Order, worker: Worker | None) -> Worker | None:
        """Build one graph; again in a new process if the first one ended, as another graph may have been to blame."""
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                worker = self._start() if worker is None else worker
                reply = worker.ask(order.data)
            except WorkerError as error:
                why = str(error)
                if worker is not None:
                    self._end(worker)
                worker = None
                if self._closing:
                    return None
                continue
            if not self._closing:
                order.done(reply)
            return worker
        order.failed(why)
        return worker

    def _start(self) -> Worker:
        with forking:
            worker = Worker()
            self._workers.append(worker)
        if self._closing:  # who closes the pool may not have seen it
            worker.kill()
        return worker

    def _end(self, worker: Worker) -> None:
        worker.kill()
        with forking:
            self._workers.remove(worker)
            worker.close()


def _yield_to_program(pid: int) -> None:
    """Let a worker have a quarter of a busy processor, from before it imports anything; its compilers inherit that.

    Linux shares a processor between sessions first (`sched(7)`, autogroup), for which niceness within one is nothing.
    """
    with contextlib.suppress(OSError):  # it has ended, or this system has no such groups
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def serve(read: int, write: int, build: Callable[[bytes], bytes]) -> None:
    """Answer one message after another in a worker; when the program has closed its pipe, end with all of the group.

    Args:
        read: the end of the pipe from the program.
        write: the end of the pipe to it.
        build: makes an answer of a message.
    """
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                waiting.put(receive(read))
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        send(write, build(waiting.get()))


def send(end: int, data: bytes) -> None:
    """Write a message into a pipe.

    Raises:
        OSError: nobody reads it.
    """
    view = memoryview(_LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(end, view) :]


def receive(end: int) -> bytes:
    """Read a message from a pipe.

    Raises:
        EOFError: the other end is closed.
    """
    return _exactly(end, _LENGTH.unpack(_exactly(end, _LENGTH.size))[0])


def _exactly(end: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = os.read(end, min(count - len(found), 2**20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


forking: Final = threading.Lock()
"""Held while this process forks, and by threads of the pool where a child could not go on from half of what they do."""

_pool, _improving = Pool(), Pool(1)


def pool() -> Pool:
    """The pool of this process."""
    return _pool


def improving() -> Pool:
    """The one for better builds of what runs compiled already; who has nothing compiled yet does not wait for them."""
    return _improving


def _after_fork() -> None:
    global _pool, _improving
    forking.release()
    for each in (_pool, _improving):
        each.forget()
    _pool, _improving = Pool(), Pool(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=forking.acquire, after_in_parent=forking.release, after_in_child=_after_fork)
atexit.register(lambda: (_pool.close(), _improving.close()))
