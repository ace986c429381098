"""Views of one report.

`VIEWS` names those that `omnicomp audit --format` offers. A new one is a module here, a line in this table, and a test.
"""

from collections.abc import Callable
from typing import Final

from omnicomp.audit.model import Report
from omnicomp.audit.views.html import to_html
from omnicomp.audit.views.jsonform import to_json
from omnicomp.audit.views.rows import to_line
from omnicomp.audit.views.text import to_text
from omnicomp.audit.views.trace import to_trace
from omnicomp.audit.views.tree import to_tree

__all__ = ["VIEWS"]

VIEWS: Final[dict[str, Callable[[Report], str]]] = {
    "text": to_text,
    "json": to_json,
    "html": to_html,
    "summary": to_line,
    "tree": to_tree,
    "trace": to_trace,
}
