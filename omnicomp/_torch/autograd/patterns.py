"""Inductor's pattern matcher: the search for an override's reference in a post-autograd graph."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.pattern_matcher import MULTIPLE, PatternMatcherPass, fwd_only, register_replacement
from torch._inductor.pattern_matcher import Match as Match
from torch.fx import Graph, Node

from omnicomp import records


@records.dataclass(frozen=True, kw_only=True)
class Pattern:
    """A computation to look for in graphs."""

    apply: Callable[[Graph], int]  # rewrites a graph and returns the number of places
    matcher: Any  # Inductor's table of what `apply` looks for

    def places(self, graph: Graph) -> list[Node]:
        """The first outputs of every place that computes the pattern, also where other nodes use its steps."""
        found: list[Node] = []
        for (op, target), entries in self.matcher.patterns.items():
            patterns = [_whoever_uses_it(entry.pattern) for entry in entries]
            nodes = graph.find_nodes(op=op, target=target)
            found += [node for node in nodes if any(pattern.match(node) for pattern in patterns)]
        return found


def _whoever_uses_it(pattern: Any) -> Any:
    """A copy of a pattern that does not ask how many users the nodes have that it matches."""
    pattern = copy.deepcopy(pattern)
    stack, seen = [pattern], set[int]()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if hasattr(item, "users"):
            item.users = MULTIPLE
        if isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).get(name, ()) for name in ("outputs", "args", "kwargs"))
    return pattern


def build_pattern(
    search: Callable[..., Any],
    replace: Callable[..., Any],
    example: Sequence[Any],
    scalars: Mapping[str, int | float],
    check: Callable[[Match, dict[str, Any]], bool],
) -> Pattern:
    """Trace `search` and `replace` to ATen (with Inductor's decompositions).

    Args:
        search: the computation to look for; its parameters are the pattern's inputs.
        replace: what it becomes, with the same parameters.
        example: tensors for the parameters that are tensors, in order.
        scalars: a value for each parameter that is a number; it must occur nowhere else in the traced pattern.
        check: asked for every match, with the nodes and numbers that were matched, by parameter name.
    """
    matcher: Any = PatternMatcherPass(pass_name="omnicomp_override")
    names = tuple(inspect.signature(search).parameters)
    traced_with: list[tuple[Any, ...]] = [()]

    @functools.wraps(search)
    def traced(*args: Any) -> Any:
        traced_with[0] = args
        return search(*args)

    def extra_check(match: Match) -> bool:
        # Before it asks, the matcher traces `search` again for the match. Up to torch 2.12 the numbers of that trace
        # are not among the match's arguments, so they are taken from the trace.
        values = {name: match.kwargs.get(name, value) for name, value in zip(names, traced_with[0], strict=True)}
        return check(match, values)

    with torch.no_grad():
        register_replacement(
            traced, replace, list(example), fwd_only, matcher, extra_check=extra_check, scalar_workaround=dict(scalars)
        )
    return Pattern(apply=matcher.apply, matcher=matcher)
