"""The format that a command writes, and where it writes it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnicomp.errors import OmnicompError, nearest

__all__ = ["check_writable", "emit", "format_of", "pick", "write"]

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
        known = ", ".join(formats)
        raise OmnicompError(f"unknown format {name!r}{nearest(name, formats) or f'; known ones are {known}'}")
    return name


def check_writable(path: Path) -> None:
    """Open a file for appending, so that a wrong path is found before the program runs.

    Raises:
        OmnicompError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise OmnicompError(f"{path} can't be written ({error.strerror}); name another path") from None


def write(path: Path, text: str) -> None:
    """Write a view.

    Raises:
        OmnicompError: the file can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OmnicompError(f"{path} can't be written ({error.strerror}); name another path") from None


def emit(text: str, output: Path | None) -> None:
    """Write a view to a file, or to standard output in the encoding that it has."""
    if output is not None:
        write(output, text)
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
