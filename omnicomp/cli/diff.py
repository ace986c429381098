"""`omnicomp diff`: what differs between two timelines or reports, and whether anything does."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from omnicomp.audit import AuditDiff, diff
from omnicomp.cli.output import emit, keep_inputs, pick
from omnicomp.errors import wrong_value
from omnicomp.safety.escapes import one_line

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
            raise wrong_value(option, percent, "a percentage that is not negative", example=20)
    time, memory = (None if percent is None else percent / 100 for percent in limits.values())
    found = diff(before, after, time_threshold=time, memory_threshold=memory)
    # On the terminal the text is as wide as that is.
    text = str(found) if name == "text" and output is None else FORMATS[name](found)
    return emit(text, output, status=1 if found.differs else 0)
