"""`omnicomp audit`: one view of a timeline or a report, on the terminal or in a file."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType

from omnicomp.audit import Audit, audit
from omnicomp.audit.fleet.runs import Fleet, fleet
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.trace import to_trace
from omnicomp.audit.views.tree import to_tree, tree_renderables
from omnicomp.audit.views.why import why
from omnicomp.cli.views import FORMATS, format_of, render, write
from omnicomp.errors import OmnicompError, nearest

__all__ = ["BASES", "run_audit"]

BASES: Final = {"flops": "flops", "time": "seconds", "operators": "nodes", "bytes": "bytes"}
_OF_ONE: Final = ("tree", "trace")


def run_audit(
    source: Path,
    *,
    format: str | None = None,
    output: Path | None = None,
    tree: bool = False,
    by: str | None = None,
    question: str | None = None,
    trace: Path | None = None,
    excerpts: bool = True,
) -> None:
    """Print or write a view; on a terminal it is in colour, and as wide as that is.

    Args:
        source: a timeline, a report as JSON, or a folder of timelines.
        format: a name of the formats; None for that of the output's extension, else text.
        output: the file to write; None for standard output.
        tree: the same as the format `tree`.
        by: what shares of the tree count: a key of `BASES`.
        question: what to tell the reasons of, instead of everything.
        trace: a file that gets the trace for Perfetto besides; nothing is printed then, unless it was asked for.
        excerpts: whether a page shows lines of source.

    Raises:
        OmnicompError: a file can't be read or written, or a format, a basis or what is asked for is unknown.
    """
    if by is not None and by not in BASES:
        raise OmnicompError(f"--by takes {', '.join(BASES)}, not {by!r}{nearest(by, BASES)}")
    if question is not None and (tree or format):
        raise OmnicompError("--why is a view of its own; leave --tree and --format out")
    found = fleet(source) if source.is_dir() else audit(source)
    wanted = "tree" if tree or (by is not None and format is None) else format
    chosen = wanted or (format_of(output) if output is not None and question is None else "text")
    if isinstance(found, Fleet):
        if question is not None or trace is not None or chosen in _OF_ONE:
            raise OmnicompError(f"{source} is a folder; name one timeline in it for --tree, --why and --trace")
        _say(render(found, chosen), output)
        return
    if trace is not None:
        write(trace, to_trace(found))
        if not wanted and question is None and output is None:
            return
    if question is not None:
        answers = why(found, question)
        _show(answers, answers.to_text, output)
        return
    views: dict[str, Callable[[], str]] = {
        "tree": lambda: to_tree(found, by=BASES[by] if by else None),
        "trace": lambda: to_trace(found),
        "html": lambda: to_html(found, excerpts=excerpts),
    }
    if chosen not in views and chosen not in FORMATS:
        known = dict.fromkeys((*FORMATS, *_OF_ONE))
        raise OmnicompError(f"unknown format {chosen!r}; known ones are {', '.join(known)}")
    plain = views.get(chosen) or (lambda: render(found, chosen))
    if chosen in ("text", "tree"):
        _show(_coloured(found, chosen, by), plain, output)
    else:
        _say(plain(), output)


def _coloured(found: Audit, chosen: str, by: str | None) -> RenderableType:
    return Group(*tree_renderables(found, by=BASES[by] if by else None)) if chosen == "tree" else found


def _show(coloured: RenderableType, plain: Callable[[], str], output: Path | None) -> None:
    """In colour on a terminal, and as plain text elsewhere, so that a pipe and a file get what they always get."""
    if output is None and sys.stdout.isatty():
        Console().print(coloured, highlight=False)
    else:
        _say(plain(), output)


def _say(text: str, output: Path | None) -> None:
    if output is not None:
        write(output, text)
        return
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
