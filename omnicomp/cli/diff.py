"""`omnicomp diff`: what differs between two timelines or reports, and whether anything does."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from omnicomp.audit import AuditDiff, diff
from omnicomp.cli.output import emit, keep_inputs, pick
from omnicomp.errors import OmnicompError
from omnicomp.escapes import one_line

__all__ = ["FORMATS", "run_diff"]

FORMATS: Final[dict[str, Callable[[AuditDiff], str]]] = {
    "text": AuditDiff.to_text,
    "json": AuditDiff.to_json,
    "markdown": AuditDiff.to_markdown,
    "summary": lambda found: f"{one_line(found.summary())}\n",
}
_SUFFIXES: Final = {".txt": "text", ".json": "json", ".md": "markdown"}


def run_diff(
    before: Path,
    after: Path,
    *,
    format: str | None = None,
    output: Path | None = None,
    time_percent: float | None = None,
    memory_percent: float | None = None,
) -> int:
    """Print or write what differs.

    Returns:
        0 if nothing differs, 1 if something does.

    Raises:
        OmnicompError: a file can't be read or written, or the format is unknown.
    """
    keep_inputs(output, before, after)
    name = pick(FORMATS, format, output, _SUFFIXES)
    limits = {"--time-threshold": time_percent, "--memory-threshold": memory_percent}
    for option, percent in limits.items():
        if percent is not None and not 0 <= percent < float("inf"):
            raise OmnicompError(f"{option} takes a percentage that is not negative, not {percent:g}")
    time, memory = (None if percent is None else percent / 100 for percent in limits.values())
    found = diff(before, after, time_threshold=time, memory_threshold=memory)
    return emit(FORMATS[name](found), output, status=1 if found.differs else 0)
