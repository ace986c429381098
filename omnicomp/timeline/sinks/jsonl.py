"""JSON Lines files of the timeline: one object per line, rotated at a size limit if one is set."""

import atexit
import errno
import json
import multiprocessing
import os
import re
import select
import socket
import stat
import threading
import time
import weakref
from multiprocessing import util
from pathlib import Path
from typing import IO, Any, Final

from omnicomp._torch.inductor.store import make_folder
from omnicomp.errors import OptionError
from omnicomp.safety import privacy
from omnicomp.safety.escapes import one_line
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline.events import Process
from omnicomp.timeline.files import ROTATED
from omnicomp.timeline.recorder import Timeline, rank, run_id

try:
    import fcntl
except ImportError:  # Windows: processes that share a file don't rotate it at the same moment
    fcntl = None

log = logger("omnicomp.timeline")

ENVIRONMENT_VARIABLE: Final = "OMNICOMP_TIMELINE"
LIMIT_VARIABLE: Final = "OMNICOMP_TIMELINE_MAX_BYTES"

# Seconds to wait for who reads from a pipe that is full.
_PATIENCE: Final = 5
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

_unwritable: set[str] = set()
_unwritable_lock = new_lock()


def expand(path: str) -> Path:
    """Replace `%p` by the process id, `%r` by the rank (`RANK`, else 0), `%h` by the host's name, `~` by the home."""
    name = path.replace("%p", str(os.getpid())).replace("%r", str(rank()))
    return Path(name.replace("%h", socket.gethostname()) if "%h" in name else name).expanduser()


def parse_size(text: str) -> int | None:
    """Bytes of `65536`, `64K`, `64M` or `1G`; None for an empty text or 0, which is no limit.

    Raises:
        OptionError: it is no size.
    """
    match = re.fullmatch(r"(\d{1,18})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not text.strip():
        return None
    if match is None:
        raise OptionError(f"{LIMIT_VARIABLE} takes a number of bytes such as 64M, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()] or None


class JsonLinesSink:
    """Appends one JSON object a line by one unbuffered `write`, so that a killed process loses at most its last line.

    A forked child opens a file of its own if the path has `%p`, and else appends to the same file: single `write`
    calls in append mode do not tear. Under a limit, a file that would grow beyond half of it is renamed (`.1` is
    appended to its name, and what had that name is lost), and a new one is begun.
    """

    def __init__(self, path: str, max_bytes: int | None = None) -> None:
        """Open the file for appending.

        Args:
            path: with `%p`, `%r` and `%h` as in `expand`; missing folders are made.
            max_bytes: that the file and the rotated one may have together; None for the limit of the environment
                variable `OMNICOMP_TIMELINE_MAX_BYTES`, if it is set.

        Raises:
            OSError: the file can't be opened for writing.
            ValueError, RuntimeError: the path is none: it has a NUL, or names a user who does not exist.
            OptionError: the environment's limit is no size.
        """
        self._pattern = path
        limit = parse_size(os.environ.get(LIMIT_VARIABLE, "")) if max_bytes is None else max_bytes
        self._each = None if not limit else max(limit // 2, 1)
        self._began = 0  # by the process of that id
        self._file = self._open()

    def _open(self) -> IO[bytes]:
        self._pid = os.getpid()
        self._path = expand(self._pattern)
        make_folder(self._path.parent)
        file = opened(self._path)
        # What a killed process left of its last line must not take the next one with it.
        self._start = b"\n" if _ends_within_a_line(self._path) else b""
        return file

    def begin(self) -> None:
        """Write that this process begins, and at its exit that it ended: of a killed one that is missing."""
        pid = os.getpid()
        if self._began == pid:
            return
        if self._pid != pid:
            self._file = self._open()
        self._put(_process("began"))
        self._began = pid
        _begun.add(self)
        if multiprocessing.parent_process() is not None:
            # The children of `multiprocessing` leave Python's own exit functions out.
            util.Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """Write that this process ended, if it wrote that it began."""
        if self._began != os.getpid():
            return
        self._began = 0
        try:
            self._put(_process("ended"))
        except (OSError, ValueError) as error:
            log.warning("the end of the process can't be written to %s (%s)", one_line(self._pattern), error)

    def write(self, record: dict[str, Any]) -> None:
        """Write one event."""
        if self._pid != os.getpid():
            self._file = self._open()
            if self._began:
                self.begin()
        self._put(record)

    def _put(self, record: dict[str, Any]) -> None:
        line = _line(record)
        if self._each is not None:
            size = os.fstat(self._file.fileno()).st_size
            if size and size + len(line) > self._each:
                self._rotate()
                if self._began:
                    line = _line(_process("began")) + line
        line, self._start = self._start + line, b""
        while line:
            written: Any = self._file.write(line)  # None: a pipe is full
            if written is None and not select.select([], [self._file], [], _PATIENCE)[1]:
                raise TimeoutError(f"nobody reads from the pipe for {_PATIENCE} s")
            line = line[written or 0 :]

    def _rotate(self) -> None:
        """Begin a new file, unless another process that writes to it just did."""
        descriptor = self._file.fileno()
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                os.replace(self._path, f"{self._path}{ROTATED}")
        finally:
            self._file.close()  # which releases the lock
        self._file = self._open()

    def close(self) -> None:
        """Close the file."""
        self.end()
        self._file.close()


_begun: Final[weakref.WeakSet[JsonLinesSink]] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Registered at the import, so that nearly all else that the program does at its exit comes before."""
    for sink in list(_begun):
        sink.end()


def _process(state: str) -> dict[str, Any]:
    event = Process(state=state, run=run_id(), pid=os.getpid(), rank=rank(), time=time.time())
    return {**event.to_dict(), "thread": threading.current_thread().name}


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def opened(path: Path) -> IO[bytes]:
    """A file for appending, made for this user alone; a pipe is not waited for.

    Raises:
        OSError: it can't be opened, or another user put a link, or a file in a folder for all, at its place.
    """
    if hasattr(os, "geteuid"):
        mine = (os.geteuid(), 0)
        try:
            state = path.lstat()
        except FileNotFoundError:
            state = None
        if state is not None and state.st_uid not in mine:
            shared = stat.S_ISREG(state.st_mode) and path.parent.stat().st_mode & stat.S_IWOTH
            if stat.S_ISLNK(state.st_mode) or shared:
                raise PermissionError(errno.EPERM, "another user put it there")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o600), "ab", buffering=0)


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file():  # a pipe, or /dev/stderr
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def attach(timeline: Timeline, path: str | None = None, max_bytes: int | None = None) -> None:
    """Add the JSON Lines sink named by `path`, or by the environment if it is None.

    A path that can't be written warns once a path and is left: a run is never lost to its log.
    """
    privacy.refresh()
    pattern = path if path is not None else os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not pattern or timeline.has_sink(pattern) or timeline.gave_up(pattern):
        return
    with _unwritable_lock:
        if pattern in _unwritable:
            return
        try:
            sink = JsonLinesSink(pattern, max_bytes)
        except OptionError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            _unwritable.add(pattern)
            log.warning(
                "the timeline can't be written to %s (%s); the program goes on without it: "
                "name a writable path in options={'timeline': ...} or %s",
                one_line(pattern),
                getattr(error, "strerror", None) or error,
                ENVIRONMENT_VARIABLE,
            )
            return
    timeline.add_sink(pattern, sink)
