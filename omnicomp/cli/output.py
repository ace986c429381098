"""The format that a command writes, and where it writes it."""

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from omnicomp.errors import OmnicompError, wrong_value
from omnicomp.timeline.files import ROTATED
from omnicomp.timeline.sinks.jsonl import opened

T = TypeVar("T", int, float)
_SUFFIXES: Final = {".txt": "text", ".json": "json", ".html": "html", ".htm": "html"}


def format_of(path: Path) -> str:
    """The format of an audit that a file's extension stands for.

    Raises:
        OmnicompError: the extension is unknown.
    """
    try:
        return _SUFFIXES[path.suffix.lower()]
    except KeyError:
        known = ", ".join(dict.fromkeys(_SUFFIXES))
        raise OmnicompError(f"{path} has no known extension; name the audit with one of {known}") from None


def pick(formats: Mapping[str, Any], format: str | None, output: Path | None, suffixes: Mapping[str, str]) -> str:
    """The name of the format that was asked for, else the one of the output's extension, else `text`.

    Raises:
        OmnicompError: the format is unknown.
    """
    name = format or (suffixes.get(output.suffix.lower(), "text") if output is not None else "text")
    if name not in formats:
        raise wrong_value("--format", name, known=formats)
    return name


def number(option: str, text: str | None, kind: type[T], accepted: str, example: str) -> T | None:
    """The number that an option of the command line was given, or None.

    Raises:
        OptionError: the text is no number.
    """
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise wrong_value(option, text, accepted, example=example) from None


def check_writable(path: Path) -> None:
    """Open a file for appending, so that a wrong path is found before the program runs.

    Raises:
        OmnicompError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        opened(path).close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise OmnicompError(f"{path} can't be written ({said}); name another path") from None


def keep_inputs(output: Path | None, *inputs: Path | None) -> None:
    """Refuse an output that is one of the files that are read, or one of the timelines of a folder that is.

    Raises:
        OmnicompError: it is.
    """
    if output is None or not output.exists():
        return
    for path in inputs:
        if path is None:
            continue
        read = [path, Path(f"{path}{ROTATED}")]
        if path.is_dir():
            read = [file for pattern in ("*.jsonl", f"*.jsonl{ROTATED}") for file in path.rglob(pattern)]
        if any(file.exists() and file.is_file() and output.samefile(file) for file in read):
            raise OmnicompError(f"{output} is what is read; name another file to write to")


def write(path: Path, text: str) -> None:
    """Write a view under another name and rename it, so that what was there is whole, or replaced as a whole.

    Raises:
        OmnicompError: the file can't be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        real = path.resolve()  # what a link leads to is replaced, and not the link
        mode = real.stat().st_mode if real.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            with open(real, "wb") as file:
                file.write(data)
            return
        descriptor, made = tempfile.mkstemp(prefix=f".{real.name[:64]}.", dir=real.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.chmod(made, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
            os.replace(made, real)
        except BaseException:
            os.unlink(made)
            raise
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, a link in a circle
        said = getattr(error, "strerror", None) or error
        raise OmnicompError(f"{path} can't be written ({said}); name another path") from None


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def emit(text: str, output: Path | None = None, *, status: int = 0) -> int:
    """Write a view to a file, or to standard output in the encoding that it has.

    Returns:
        The status.

    Raises:
        OmnicompError: the file can't be written; or standard output, and the status says that all is well.
    """
    if output is not None:
        write(output, text)
        return status
    try:
        if sys.stdout is None:  # type: ignore[comparison-overlap]  # Python was started without one
            raise OSError("it is closed")
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it has seen enough
        _give_up_stdout()
    except (OSError, ValueError) as error:
        _give_up_stdout()
        said = f"standard output can't be written ({getattr(error, 'strerror', None) or error}); name a file with -o"
        if not status:
            raise OmnicompError(said) from None
        if sys.stderr is not None:  # type: ignore[comparison-overlap]
            print(f"omnicomp: error: {said}", file=sys.stderr)
    return status


def _give_up_stdout() -> None:
    """Let what is left in its buffer go nowhere: Python would fail on it when it ends, with a status of its own."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
