"""Selectors: text that names operators or modules, in rules of placement, in budgets and in acknowledgements."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from torch.fx import Node

from omnicomp import records
from omnicomp.analysis.nodes import module_path, op_name
from omnicomp.errors import wrong_value


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


_GRAPH: Final = re.compile(r"(?:g|graph)(\d{1,18})(:\w+)?(?:[./](forward|backward|inference))?(?:[./](\d{1,18}))?")


@records.dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        selector: as in the table above.
        lowerings: names of lowerings, in order; eager is asked last in any case.
    """

    selector: str
    lowerings: tuple[str, ...]

    @functools.cached_property
    def place(self) -> tuple[str, str | None, int | None] | None:
        """Graph, part and index that the selector names, the last two if it does; None if it names no graph."""
        found = _GRAPH.fullmatch(self.selector)
        if found is None:
            return None
        number, variant, part, index = found.groups()
        return f"g{number}{variant or ''}", part, None if index is None else int(index)

    def matches(self, node: Node, graph: str, part: str, names: Sequence[str] = ()) -> bool:
        """Whether the rule is for a node, leaving aside selectors of subgraphs; `names` are further operators of it."""
        if self.place is not None:
            named, own_part, index = self.place
            return named == graph and own_part in (None, part) and index is None
        if self.selector in (node.name, "*"):
            return True
        if any(names_operator(name, self.selector) for name in (op_name(node), *names)):
            return True
        return is_within(module_path(node), self.selector)


def parse_rules(given: Mapping[Any, Any], known: Sequence[str]) -> tuple[Rule, ...]:
    """Rules from `options={"lowerings": {selector: lowering or list of them}}`.

    Raises:
        ValueError: a lowering is unknown, or a list is empty; the message names it.
    """
    rules: list[Rule] = []
    for selector, value in given.items():
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, (tuple, list)) or not names or len(set(map(str, names))) != len(names):
            raise wrong_value(repr(selector), value, "a lowering, or a list of different ones", example="['eager']")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise wrong_value(repr(selector), unknown[0], known=known)
        rules.append(Rule(str(selector), tuple(names)))
    return tuple(rules)


def parse_environment(text: str, known: Sequence[str]) -> tuple[Rule, ...]:
    """Rules from `selector:lowering,lowering;selector:lowering`, as in `graph0/3:eager;aten.topk:eager`.

    Raises:
        ValueError: an entry has no colon, or a lowering is unknown.
    """
    given: dict[str, list[str]] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        selector, colon, names = entry.rpartition(":")
        if not colon or not selector.strip():
            raise wrong_value("an entry", entry, "selector:lowering", example="aten.topk:eager")
        given[selector.strip()] = [name.strip() for name in names.split(",")]
    return parse_rules(given, known)


def last_match(rules: Sequence[Rule], node: Node, graph: str, part: str, names: Sequence[str] = ()) -> Rule | None:
    """The rule that decides on a node, leaving aside those of subgraphs; `names` are further operators of it."""
    return next((rule for rule in reversed(rules) if rule.matches(node, graph, part, names)), None)


def named_subgraphs(rules: Sequence[Rule], graph: str, part: str) -> dict[int, Rule]:
    """The rules for single subgraphs of a part, by index."""
    found: dict[int, Rule] = {}
    for rule in rules:
        if rule.place is None:
            continue
        named, own_part, index = rule.place
        if index is not None and named == graph and own_part in (None, part):
            found[index] = rule
    return found
