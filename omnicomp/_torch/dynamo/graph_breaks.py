"""Why Dynamo ended a graph: what it leaves on the graph that it hands to a backend."""

from typing import Any

__all__ = ["end_of"]


def end_of(gm: Any) -> tuple[str, str] | None:
    """Dynamo's text on why it broke off before the function was over, and the `file:line` where; None if it did not.

    Args:
        gm: the graph that Dynamo handed over; others have no such text.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return str(reason.reason), place
