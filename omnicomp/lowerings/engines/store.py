"""The cache of executables of engines: by content, in memory and, where an engine can, on disk.

The key holds everything that the executable depends on: the graph with shapes, strides, dtypes and devices, the
contents of the weights that are built in, the engine with its version and options, torch, omnicomp, and the machine's
threads.
"""

import contextlib
import hashlib
import os
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from omnicomp._torch.inductor.store import folder, note_use, oldest_first, read_trusted, write_whole
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger

log = logger("omnicomp.engines")

_DIGITS: Final = 64
_DEFAULT_BYTES: Final = 2 * 2**30


class Store:
    """Executables of this process by key, and their serialised forms on disk."""

    def __init__(self) -> None:
        self._memory: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
        self._building: dict[str, Any] = {}
        self._lock = new_lock()

    def get(
        self,
        key: str,
        engine: str,
        make: Callable[[], object],
        load: Callable[[bytes], object] | None,
        dump: Callable[[object], bytes | None] | None,
        owner: str = "",
    ) -> tuple[object, str]:
        """The cached executable of a key, or else the result of `make`, which is cached.

        Two threads that ask for one key get one executable.

        Args:
            key: of the content; see `key_of`.
            engine: name of the engine, which has a folder of its own.
            make: compiles.
            load: makes an executable of bytes from the disk; None where nothing is stored.
            dump: the inverse; None from it if this executable cannot be stored.
            owner: whose memory an executable may hold; it is given to nobody else. What is on the disk holds nobody's.

        Returns:
            The executable, and where it came from: `memory`, `disk` or `compiled`.

        Raises:
            Exception: what `make` raises.
        """
        own = f"{key} {owner}"
        with self._lock:
            lock = self._building.setdefault(own, new_lock())
        with lock:
            found = self._memory.get(own)
            if found is not None:
                return found, "memory"
            path = self._path(engine, key)
            found = _load(path, load) if load is not None else None
            source = "disk"
            if found is None:
                found, source = make(), "compiled"
                if dump is not None:
                    _keep(path, found, dump)
            self._memory[own] = found
            return found, source

    def clear(self) -> None:
        """Forget what this process holds; the disk is left as it is."""
        with self._lock:
            self._memory.clear()
            self._building.clear()

    @staticmethod
    def _path(engine: str, key: str) -> Path:
        return folder() / "engines" / engine / f"{key}.bin"


store: Final = Store()


def key_of(*parts: object) -> str:
    """Hash of the parts, and of the processor: what a library generates may be for its instructions."""
    text = repr((*parts, platform.machine(), platform.processor()))
    return hashlib.sha256(text.encode()).hexdigest()


def limit() -> int:
    """Bytes that the files of all engines may take together: `OMNICOMP_ENGINE_CACHE_BYTES`, or 2 GiB."""
    text = os.environ.get("OMNICOMP_ENGINE_CACHE_BYTES", "")
    try:
        return max(int(text), 0) if text else _DEFAULT_BYTES
    except ValueError:
        log.warning("OMNICOMP_ENGINE_CACHE_BYTES is no number of bytes: %r; %d are used", text, _DEFAULT_BYTES)
        return _DEFAULT_BYTES


def _load(path: Path, load: Callable[[bytes], object]) -> object | None:
    try:
        data = read_trusted(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s can't be read, so it is compiled again: %s", path.name, error)
        return None
    digest, body = data[:_DIGITS], data[_DIGITS:]
    if digest.decode(errors="replace") != hashlib.sha256(body).hexdigest():
        log.warning("%s is damaged, so it is compiled again", path.name)
        path.unlink(missing_ok=True)
        return None
    try:
        found = load(body)
    except Exception as error:  # noqa: BLE001 - it is compiled again; the file would fail each time
        log.warning("%s can't be loaded, so it is compiled again: %s: %s", path.name, type(error).__name__, error)
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):  # only its age is lost
        os.utime(path)
    note_use(path)
    return found


def _keep(path: Path, made: object, dump: Callable[[object], bytes | None]) -> None:
    allowed = limit()
    try:
        body = dump(made) if allowed else None
        if body is None or len(body) > allowed:
            return
        write_whole(path, hashlib.sha256(body).hexdigest().encode() + body, files=None)
        note_use(path)
        prune(path.parent.parent, allowed)
    except Exception as error:  # noqa: BLE001 - it runs all the same; the next process compiles again
        log.warning("%s can't be kept: %s: %s", path.name, type(error).__name__, error)


def prune(folder: Path, allowed: int) -> None:
    """Remove the least recently used files until those of all engines take no more than the allowed bytes."""
    total = 0
    for path in reversed(oldest_first(folder.glob("*/*.bin"))):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            total += path.stat().st_size
        if total > allowed:
            path.unlink(missing_ok=True)
