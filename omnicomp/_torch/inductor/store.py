"""Small files that processes share: known failures, measured speeds, verified overrides, components of cache keys.

`JsonStore` has one JSON file a key. A file that is missing, damaged, unreadable or of another schema is a miss.

What is in a cache folder decides what code runs. So files are made for this user alone, whole and never through a link,
and what another user owns or may write to is not read (docs/security.md). Secrets are removed from what is stored.
"""

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from omnicomp.safety import privacy
from omnicomp.safety.privacy import logger

log = logger("omnicomp.store")
T = TypeVar("T")
_FILES: Final = 512
_used: Final[dict[Path, None]] = {}


def folder() -> Path:
    """Where it is kept: `OMNICOMP_CACHE_DIR`, or `omnicomp` in Inductor's cache folder."""
    own = os.environ.get("OMNICOMP_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    from omnicomp._torch.inductor.compile_fx import cache_dir  # a timeline is written and read without torch

    return Path(cache_dir()) / "omnicomp"


def note_use(path: Path) -> None:
    """Remember that this process went by a file, or wrote it."""
    _used[path] = None


def used() -> list[Path]:
    """The files that this process went by or wrote, as far as they are still there."""
    return [path for path in list(_used) if path.is_file()]


def key_of(*parts: object) -> str:
    """The key of a value: a hash of all that it depends on."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


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
        note_use(path)
        return value, ""

    def write(self, key: str, value: T) -> str:
        """Store a value; returns why that failed, or an empty text."""
        text = self._text(key, value)
        if len(text) > self._size:
            return self._failed(f"{self.path(key)} is not written: its {len(text)} characters are too many")
        try:
            write_whole(self.path(key), text, self._files)
        except OSError as error:
            return self._failed(f"{self.path(key)} can't be written: {error}")
        note_use(self.path(key))
        return ""

    def settle(self, key: str, value: T) -> tuple[T, str]:
        """Store a value if there is none yet; what all processes that settle a key go by, and why storing failed.

        Of several processes that come to different values, such as measured ones, the first that stores one decides:
        the first rank of a distributed job, whose ranks need not share the folder, and then the first on this machine.
        """
        from omnicomp._torch.distributed import job  # a timeline is written and read without torch

        path, ranks = self.path(key), job()
        if ranks is not None:
            value = self._load(json.loads(ranks.settle(f"{self.name}/{key}", self._text(key, value)))["value"])
            return value, "" if path.exists() else self.write(key, value)
        if path.exists() and self.read(key)[0] is None:  # a damaged file, or one of another version
            return value, self.write(key, value)
        try:
            write_whole(path, self._text(key, value), self._files, replace=False)
        except FileExistsError:
            found, why = self.read(key)
            return (value if found is None else found), why
        except OSError as error:
            return value, self._failed(f"{path} can't be written: {error}")
        note_use(path)
        return value, ""

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

    def _text(self, key: str, value: T) -> str:
        kept = privacy.refresh().secrets_in(self._dump(value))
        return json.dumps({"schema": self._schema, "key": key, "value": kept}, sort_keys=True)

    def _value(self, path: Path, key: str) -> T:
        data = json.loads(read_trusted(path))
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


def make_folder(path: Path) -> None:
    """Make a folder with those above it that are missing, for this user alone.

    Raises:
        OSError: it can't be made, or something else is there.
    """
    if not path.is_dir():
        if path.parent != path:
            make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def check_trusted(state: os.stat_result, path: Path, *, group: bool = True) -> None:
    """Refuse what another user may have written: only files and folders of this user and of root are trusted.

    Args:
        state: of the file or the folder.
        path: of it.
        group: whether to refuse what its group may write to, too, and not only what everybody may.

    Raises:
        PermissionError: someone else owns it, or may write to it.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return
    if state.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user (uid {state.st_uid}) and is not trusted")
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & (0o022 if group else 0o002) and not sticky:
        raise PermissionError(f"other users may write to {path} (mode {state.st_mode & 0o777:o}): it is not trusted")


def read_trusted(path: Path) -> bytes:
    """The contents of a regular file that only this user, or root, can have written.

    Raises:
        PermissionError: it is not trusted.
        OSError: it can't be read, is a link, or is no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{path} is no regular file")
        check_trusted(state, path)
        return file.read()


def append(path: Path, text: str) -> None:
    """Append to a file of this user alone, never through a link.

    Raises:
        OSError: it can't be written.
    """
    make_folder(path.parent)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(path, flags, 0o600), "ab") as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_whole(path: Path, data: str | bytes, files: int | None = _FILES, *, replace: bool = True) -> None:
    """Write a file of this user alone so that a reader sees all of it or what was there before.

    At most `files` of the same folder and suffix are kept; those that were not used for the longest time are removed,
    none with None.

    Raises:
        FileExistsError: the file is there, and shall not be replaced.
        OSError: it can't be written.
    """
    make_folder(path.parent)
    content = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    descriptor, made = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)  # of a name that was free
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        if replace:
            os.replace(made, path)
        else:
            os.link(made, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
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
