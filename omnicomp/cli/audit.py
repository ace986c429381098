"""`omnicomp audit`: one view of a timeline or a report, on the terminal or in a file."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType

from omnicomp.audit import audit
from omnicomp.audit.fleet import FLEET_VIEWS, Fleet, fleet
from omnicomp.audit.views import VIEWS
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.layout import plain
from omnicomp.audit.views.text import renderables
from omnicomp.audit.views.tree import tree_renderables
from omnicomp.cli.output import emit, format_of, keep_inputs, write
from omnicomp.errors import OmnicompError, wrong_value

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
    full: bool = False,
) -> None:
    """Print or write a view; on a terminal it is in colour, and as wide as that is.

    Raises:
        OmnicompError: a file can't be read or written, or a format, a basis or what is asked for is unknown.
    """
    if by is not None and by not in BASES:
        raise wrong_value("--by", by, known=BASES)
    if question is not None and (tree or format):
        raise OmnicompError("--why is a view of its own; leave --tree and --format out")
    keep_inputs(output, source)
    keep_inputs(trace, source)
    found = fleet(source) if source.is_dir() else audit(source)
    wanted = "tree" if tree or (by is not None and format is None) else format
    chosen = wanted or (format_of(output) if output is not None and question is None else "text")
    if chosen not in VIEWS:
        raise wrong_value("--format", chosen, known=FLEET_VIEWS if isinstance(found, Fleet) else VIEWS)
    width = None if output is None else 120
    if isinstance(found, Fleet):
        if question is not None or trace is not None or chosen not in FLEET_VIEWS:
            raise OmnicompError(f"{source} is a folder; name one timeline in it for --tree, --why and --trace")
        emit(found.to_text(width) if chosen == "text" else FLEET_VIEWS[chosen](found), output)
        return
    if trace is not None:
        write(trace, VIEWS["trace"](found))
        if not wanted and question is None and output is None:
            return
    shown: Iterable[RenderableType] = ()
    if question is not None:
        shown = (found.why(question),)
    elif chosen == "text":
        shown = renderables(found, full=full or format is not None or output is not None)
    elif chosen == "tree":
        shown = tree_renderables(found, by=BASES[by] if by else None)
    elif chosen == "html":
        emit(to_html(found, excerpts=excerpts), output)
        return
    else:
        emit(VIEWS[chosen](found), output)
        return
    if output is None and sys.stdout.isatty():
        Console().print(*shown, sep="\n", highlight=False)
    else:
        emit(plain(*shown, width=width), output)
