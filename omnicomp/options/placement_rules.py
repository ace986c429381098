"""Rules of placement: which lowerings an operator, a module, a node or a subgraph may have.

A rule is a selector and a list of lowerings. Where several match a node, the last one decides; the rules of the
environment variable `OMNICOMP_PLACE` come after those of the options.

| selector | matches |
|---|---|
| `aten.topk`, `aten.topk.default` | an operator, with or without its overload |
| `layers.3.mlp`, `layers.*.mlp` | the nodes of a module, wherever that path lies in the model's |
| `addmm_3` | a node of a post-autograd graph by its name |
| `g0`, `g0.backward` | a graph, or a part of one |
| `g0.inference.3`, `graph0/3` | a subgraph, as it is numbered without this rule |
| `*` | everything |
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.fx import Node

from omnicomp.analysis.nodes import module_path, op_name
from omnicomp.options.selectors import is_within, names_operator

__all__ = ["Rule", "is_within", "last_match", "named_subgraphs", "parse_environment", "parse_rules"]

_GRAPH: Final = re.compile(r"(?:g|graph)(\d{1,18})(:\w+)?(?:[./](forward|backward|inference))?(?:[./](\d{1,18}))?")


@dataclasses.dataclass(frozen=True)
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
            raise ValueError(f"{selector!r} takes a lowering or a list of different ones, not {value!r}")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} for {selector!r} is no lowering; there are {', '.join(known)}")
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
            raise ValueError(f"{entry!r} is not of the form selector:lowering")
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
