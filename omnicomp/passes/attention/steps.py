"""The chain of steps from the product of queries and keys to the softmax."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from omnicomp.passes.attention.site import Add, Fill, Floor, Function, Scale, Step
from omnicomp.passes.attention.terms import Apply, Axis, Number, Position, Scores, Term, leaves

__all__ = ["axes_in", "number_in", "step_of", "steps_of", "uncast"]


def _has_scores(term: Term) -> bool:
    return any(isinstance(leaf, Scores) for leaf in leaves(term))


def uncast(term: Term) -> Term:
    """A term without the casts around it."""
    while isinstance(term, Apply) and term.op == "cast":
        term = term.args[0]
    return term


def number_in(term: Term) -> Any:
    """The number that a term is behind its casts, or None."""
    inner = uncast(term)
    return inner.value if isinstance(inner, Number) else None


def axes_in(term: Term) -> set[Axis]:
    """The axes that an element of the term depends on."""
    found: set[Axis] = set()
    for leaf in leaves(term):
        for position in tree_leaves(getattr(leaf, "at", None) or getattr(leaf, "position", None)):
            if isinstance(position, Position):
                found.update(position.flat())
    return found


def steps_of(score: Term) -> list[Step] | None:
    """The steps from the product to `score`, innermost first, or None if the scores are used twice on the way."""
    steps: list[Step] = []
    while not isinstance(score, Scores):
        if not isinstance(score, Apply):
            return None
        carriers = [n for n, argument in enumerate(score.args) if _has_scores(argument)]
        if len(carriers) != 1:
            return None
        if score.op != "cast":
            step = step_of(score, carriers[0])
            if step is None:
                return None
            steps.append(step)
        score = score.args[carriers[0]]
    return steps[::-1]


def step_of(term: Apply, carrier: int) -> Step | None:
    """The step that an operation takes from its operand number `carrier`, or None if it is no step."""
    others = [a for n, a in enumerate(term.args) if n != carrier]
    if term.op == "mul" or (term.op == "div" and carrier == 0):
        return Scale(others[0], term.op == "div")
    if term.op == "add" or (term.op == "sub" and carrier == 0):
        return Add(others[0], term.op == "sub")
    if term.op == "where" and carrier:
        condition, value = others
        kept_if = carrier == 1
        return Fill(Apply(dtype=torch.bool, op="not", args=(condition,)) if kept_if else condition, value)
    if term.op == "maximum" and isinstance(number_in(others[0]), int | float):
        return Floor(float(number_in(others[0])))
    if term.op == "neg":
        return Scale(Number(dtype=term.dtype, value=-1))
    return Function(term.op) if not others else None
