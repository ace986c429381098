"""`omnicomp audit`: one view of a timeline or a report, on the terminal or in a file."""

import sys
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType

from omnicomp.audit import audit
from omnicomp.audit.fleet import FLEET_VIEWS, Fleet, fleet
from omnicomp.audit.views import VIEWS
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.tree import to_tree, tree_renderables
from omnicomp.cli.output import emit, format_of, keep_inputs, write
from omnicomp.errors import OmnicompError, nearest

__all__ = ["BASES", "run_audit"]

BASES: Final = {"flops": "flops", "time": "seconds", "operators": "nodes", "bytes": "bytes"}


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

    Raises:
        OmnicompError: a file can't be read or written, or a format, a basis or what is asked for is unknown.
    """
    if by is not None and by not in BASES:
        raise OmnicompError(f"--by takes {', '.join(BASES)}, not {by!r}{nearest(by, BASES)}")
    if question is not None and (tree or format):
        raise OmnicompError("--why is a view of its own; leave --tree and --format out")
    keep_inputs(output, source)
    keep_inputs(trace, source)
    found = fleet(source) if source.is_dir() else audit(source)
    wanted = "tree" if tree or (by is not None and format is None) else format
    chosen = wanted or (format_of(output) if output is not None and question is None else "text")
    views = FLEET_VIEWS if isinstance(found, Fleet) else VIEWS
    if chosen not in VIEWS:
        raise OmnicompError(f"unknown format {chosen!r}; known ones are {', '.join(views)}")
    if isinstance(found, Fleet):
        if question is not None or trace is not None or chosen not in FLEET_VIEWS:
            raise OmnicompError(f"{source} is a folder; name one timeline in it for --tree, --why and --trace")
        emit(FLEET_VIEWS[chosen](found), output)
        return
    if trace is not None:
        write(trace, VIEWS["trace"](found))
        if not wanted and question is None and output is None:
            return
    basis = BASES[by] if by else None
    coloured = output is None and sys.stdout.isatty()
    if question is not None:
        answers = found.why(question)
        _print(answers) if coloured else emit(answers.to_text(), output)
    elif coloured and chosen == "text":
        _print(found)
    elif coloured and chosen == "tree":
        _print(Group(*tree_renderables(found, by=basis)))
    elif chosen == "tree":
        emit(to_tree(found, by=basis), output)
    elif chosen == "html":
        emit(to_html(found, excerpts=excerpts), output)
    else:
        emit(VIEWS[chosen](found), output)


def _print(coloured: RenderableType) -> None:
    Console().print(coloured, highlight=False)
