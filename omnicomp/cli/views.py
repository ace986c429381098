"""The audit's formats, and the files that they are written to."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from omnicomp.audit import Audit
from omnicomp.audit.fleet.runs import Fleet
from omnicomp.errors import OmnicompError
from omnicomp.timeline.printable import one_line

__all__ = ["FORMATS", "check_writable", "format_of", "render", "write"]

FORMATS: Final[dict[str, Callable[[Audit | Fleet], str]]] = {
    "text": lambda found: found.to_text(),
    "json": lambda found: found.to_json(),
    "html": lambda found: found.to_html(),
    "summary": lambda found: f"{one_line(found.summary())}\n",
}
_SUFFIXES: Final = {".txt": "text", ".json": "json", ".html": "html", ".htm": "html"}


def format_of(path: Path) -> str:
    """The format that a file's extension stands for.

    Raises:
        OmnicompError: the extension is unknown.
    """
    try:
        return _SUFFIXES[path.suffix.lower()]
    except KeyError:
        known = ", ".join(dict.fromkeys(_SUFFIXES))
        raise OmnicompError(f"{path} has no known extension; name the audit with one of {known}") from None


def render(found: Audit | Fleet, format: str) -> str:
    """The audit of one timeline or of a folder in a format.

    Raises:
        OmnicompError: the format is unknown.
    """
    if format not in FORMATS:
        raise OmnicompError(f"unknown format {format!r}; known ones are {', '.join(FORMATS)}")
    return FORMATS[format](found)


def check_writable(path: Path) -> None:
    """Open the file for appending, so that a wrong path is found before hours of work are lost to it.

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
