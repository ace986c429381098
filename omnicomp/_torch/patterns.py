"""Inductor's pattern matcher: the search for an override's reference in a post-autograd graph."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, fwd_only, register_replacement

__all__ = ["Match", "build_pattern"]


def build_pattern(
    search: Callable[..., Any],
    replace: Callable[..., Any],
    example: Sequence[Any],
    scalars: Mapping[str, int | float],
    check: Callable[[Match, dict[str, Any]], bool],
) -> Callable[[torch.fx.Graph], int]:
    """Trace `search` and `replace` to ATen (with Inductor's decompositions) and return a function that rewrites graphs.

    Args:
        search: the computation to look for; its parameters are the pattern's inputs.
        replace: what it becomes, with the same parameters.
        example: tensors for the parameters that are tensors, in order.
        scalars: a value for each parameter that is a number; it must occur nowhere else in the traced pattern.
        check: asked for every match, with the nodes and numbers that were matched, by parameter name.

    Returns:
        A function from a graph to the number of places that it rewrote.
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
    return matcher.apply
