"""Selectors: text that names operators or modules, in rules of placement, in budgets and in acknowledgements."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

__all__ = ["is_within", "names_operator", "selects"]


def is_within(path: str, selector: str) -> bool:
    """Whether consecutive components of a module's path match those of the selector."""
    parts, wanted = path.split("."), selector.split(".")
    return bool(path) and any(
        all(map(fnmatchcase, parts[start : start + len(wanted)], wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def names_operator(op: str, selector: str) -> bool:
    """Whether an operator such as `aten.topk.default` matches a selector, with or without its overload."""
    return fnmatchcase(op, selector) or fnmatchcase(op, f"{selector}.*")


def selects(
    selector: str,
    op: str,
    *,
    node: str = "",
    modules: Iterable[str] = (),
    ids: Iterable[str] = (),
    function: str = "",
) -> bool:
    """Whether a selector is for an operator: by its name, its node, its modules, its function, or an id.

    Args:
        selector: as in rules of placement.
        op: the operator, or empty if it is not known.
        node: name of the node.
        modules: module paths; all of them must be within what the selector names.
        ids: of the graph, the part and the subgraph.
        function: qualified name of the compiled function.
    """
    paths = tuple(modules)
    if selector == "*" or selector in ids or (node and selector == node):
        return True
    if (op and names_operator(op, selector)) or (function and fnmatchcase(function, selector)):
        return True
    return bool(paths) and all(is_within(path, selector) for path in paths)
