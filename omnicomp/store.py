"""Small files that processes share: known failures, measured speeds, verified overrides, components of cache keys.

`JsonStore` has one JSON file a key. A file that is missing, damaged, unreadable or of another schema is a miss.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from omnicomp._torch.inductor.compile_fx import cache_dir

__all__ = ["JsonStore", "folder", "oldest_first", "prune", "write_whole"]

log = logging.getLogger("omnicomp.store")
T = TypeVar("T")
_FILES: Final = 512


def folder() -> Path:
    """Where it is kept: `OMNICOMP_CACHE_DIR`, or `omnicomp` in Inductor's cache folder."""
    own = os.environ.get("OMNICOMP_CACHE_DIR")
    return Path(own).expanduser() if own else Path(cache_dir()) / "omnicomp"


class _OtherVersionError(Exception):
    """A file of another schema, which is nothing to complain about."""


class JsonStore(Generic[T]):
    """Values of one kind by key, in a folder of their own.

    Each write replaces a file as a whole, and removes the files that were not used for the longest time when there are
    too many. Neither reading nor writing raises: a failure is returned as a sentence, and the first one is logged.
    """

    def __init__(
        self,
        name: str,
        dump: Callable[[T], Any],
        load: Callable[[Any], T],
        *,
        schema: int = 1,
        files: int = _FILES,
        size: int = 2**20,
        root: Callable[[], Path] = folder,
    ) -> None:
        """Describe the values.

        Args:
            name: of the folder.
            dump: makes what JSON can hold of a value.
            load: the inverse, for anything that a file may hold; raises if it is something else.
            schema: a file of another one, such as an older version's, is a miss that is not logged.
            files: that the folder may have.
            size: bytes that a file may have.
            root: where the folder is.
        """
        self.name, self._dump, self._load, self._schema = name, dump, load, schema
        self._files, self._size, self._root = files, size, root
        self._warned = False

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._root() / self.name

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.folder / f"{key}.json"

    def read(self, key: str) -> tuple[T | None, str]:
        """The value of a key or None, and what is wrong with its file, or an empty text."""
        path = self.path(key)
        try:
            value = self._value(path, key)
        except FileNotFoundError:
            return None, ""
        except _OtherVersionError as error:
            return None, f"{path} {error}"
        except OSError as error:
            return None, self._failed(f"{path} can't be read: {error}")
        except Exception as error:  # noqa: BLE001 - whatever is in the file, it is a miss that says so
            return None, self._failed(f"{path} is damaged: {type(error).__name__}: {error}")
        with contextlib.suppress(OSError):  # only its age is lost
            os.utime(path)
        return value, ""

    def write(self, key: str, value: T) -> str:
        """Store a value; returns why that failed, or an empty text."""
        text = json.dumps({"schema": self._schema, "key": key, "value": self._dump(value)}, sort_keys=True)
        if len(text) > self._size:
            return self._failed(f"{self.path(key)} is not written: its {len(text)} characters are too many")
        try:
            write_whole(self.path(key), text, self._files)
        except OSError as error:
            return self._failed(f"{self.path(key)} can't be written: {error}")
        return ""

    def all(self) -> list[tuple[str, T | str]]:
        """Every key with its value, or with what is wrong with its file; the least recently used first."""
        found: list[tuple[str, T | str]] = []
        for path in oldest_first(self.folder.glob("*.json")):
            try:
                found.append((path.stem, self._value(path, path.stem)))
            except Exception as error:  # noqa: BLE001 - it is returned
                found.append((path.stem, f"{type(error).__name__}: {error}"))
        return found

    def remove(self, key: str) -> None:
        """Remove the file of a key."""
        self.path(key).unlink(missing_ok=True)

    def _value(self, path: Path, key: str) -> T:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != self._schema:
            raise _OtherVersionError("is of another version")
        if data["key"] != key:
            raise ValueError("it belongs to another key")
        return self._load(data["value"])

    def _failed(self, sentence: str) -> str:
        # A folder that can't be written would be told of at every write; the sentence is returned all the same.
        log.log(logging.DEBUG if self._warned else logging.WARNING, "omni: %s: %s", self.name, sentence)
        self._warned = True
        return sentence


def write_whole(path: Path, data: str | bytes, files: int | None = _FILES) -> None:
    """Write a file so that a reader sees all of it or what was there before, and keep at most `files` such.

    Those of the same folder and suffix that were not used for the longest time are removed; none with None.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        if isinstance(data, str):
            made.write_text(data, encoding="utf-8")
        else:
            made.write_bytes(data)
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    if files is not None:
        prune(path.parent, path.suffix, files)


def prune(place: Path, suffix: str, keep: int = _FILES) -> None:
    """Remove the files of a suffix that were not used for the longest time, if there are more than `keep`."""
    files = oldest_first(place.glob(f"*{suffix}"))
    for path in files[: max(len(files) - keep, 0)]:
        path.unlink(missing_ok=True)


def oldest_first(paths: Iterable[Path]) -> list[Path]:
    """The paths by when they were last used."""

    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            return 0.0

    return sorted(paths, key=age)
