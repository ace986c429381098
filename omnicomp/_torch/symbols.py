"""Symbolic sizes."""

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, cast

import sympy
import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.fx.experimental.symbolic_shapes import free_symbols as free_symbols
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols
from torch.fx.experimental.symbolic_shapes import statically_known_true


def expression(value: Any) -> Any:
    """A number of the graph as a plain one, or as a SymPy expression if it is symbolic; adds no guard.

    Args:
        value: a Python number or bool, or a `torch.SymInt`, `torch.SymFloat` or `torch.SymBool`.

    Returns:
        The value itself if it is a Python number; an int, float or bool if the symbolic number is known to be one
        value; else its expression in the symbols of its shape environment.
    """
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    found: Any = value.node.expr
    if isinstance(value, torch.SymInt):
        return int(found) if found.is_Integer else found
    if isinstance(value, torch.SymFloat):
        return float(found) if found.is_number else found
    return bool(found) if found in (sympy.true, sympy.false) else found


def known_range(value: torch.SymInt, expr: sympy.Expr) -> tuple[int | None, int | None]:
    """What the shape environment of `value` knows about `expr`: smallest and largest value, or None; adds no guard."""
    bounds: Any = value.node.shape_env.bound_sympy(expr)
    lower, upper = (int(end) if getattr(end, "is_Integer", False) else None for end in (bounds.lower, bounds.upper))
    return lower, upper


def hints_of(environment: Any) -> Mapping[Any, Any]:
    """The numbers that the symbols of a shape environment had in the first call."""
    return getattr(environment, "backed_var_to_val", None) or getattr(environment, "var_to_val", {})


def environment_text(value: Any) -> str:
    """All that the shape environment of a symbolic number knows: sizes that were seen, ranges, guards."""
    environment = value.node.shape_env
    tables = (hints_of(environment), environment.var_to_range, environment.replacements, environment.divisible)
    texts = [
        sorted(f"{key}={table[key]}" if isinstance(table, dict) else str(key) for key in table) for table in tables
    ]
    return repr([*texts, [str(guard.expr) for guard in environment.guards]])


def facts_of(values: Iterable[Any]) -> tuple[dict[str, None], list[str]]:
    """The symbols of symbolic numbers by their names, in order, and what the shape environment knows of them.

    That is their ranges, the guards that name one of them, and what a number that is no size was.
    """
    found: dict[Any, Any] = {}
    for value in values:
        for symbol in sorted(value.node.expr.free_symbols, key=str):
            found.setdefault(symbol, value)
    environment: Any = next((value.node.shape_env for value in found.values()), None)
    guards = [guard.expr for guard in getattr(environment, "guards", ())]
    facts = [str(guard) for guard in guards if not guard.free_symbols.isdisjoint(found)]
    for symbol, value in found.items():
        seen = value.node.hint if isinstance(value, torch.SymFloat) and value.node.expr == symbol else None
        facts.append(f"{symbol} {environment.var_to_range.get(symbol)} {seen}")
    return {str(symbol): None for symbol in found}, facts


def may_guard_multiple(size: torch.SymInt, number: int) -> bool:
    """Whether a size may get a guard that it is a multiple of a number, or needs none; adds no guard.

    It is one in the call that is compiled for, and Dynamo goes on to make guards: not where a variant is compiled late,
    and not where a graph is exported. Nor is it where the program declares sizes to be dynamic.
    """
    if statically_known_true(size % number == 0):
        return True
    context, environment = TracingContext.try_get(), size.node.shape_env
    if context is None or not context.guards_context.dynamo_guards or environment.frozen or not size.node.has_hint():
        return False
    declared = any(
        constraint is not None and not constraint.warn_only
        for tracked in environment.tracked_fakes or ()
        for constraint in getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
    )
    return not declared and size.node.hint % number == 0


def guard_multiple(size: torch.SymInt, number: int) -> None:
    """Guard on a size being a multiple of a number; other sizes get another graph.

    Raises:
        RuntimeError: the guard was not added.
    """
    if not (size % number == 0 and statically_known_true(size % number == 0)):
        raise RuntimeError(f"no guard was added for {size} as a multiple of {number}")


def read_number(value: torch.Tensor, *, least: int, most: int) -> int:
    """The number in an integer tensor of one element; an unbacked symbol of that range where a graph is traced.

    Raises:
        RuntimeError: it is not in the range.
    """
    # AOTAutograd traces under another mode than Dynamo, and Inductor goes on with it.
    mode = getattr(value, "fake_mode", None) or detect_fake_mode(value)
    if mode is not None:
        # Dynamo breaks its graph at a number of the program's own (capture_scalar_outputs); that is done by now.
        mode.allow_scalar_outputs = True
    number: Any = value.item()
    if isinstance(number, torch.SymInt):
        number.node.shape_env._constrain_range_for_size(number.node.expr, least, most)
    torch._check(number >= least)
    torch._check(number <= most)
    return cast("int", number)


@contextlib.contextmanager
def unbound(like: torch.Tensor) -> Generator[None]:
    """Evaluate on fake tensors of the mode of `like` what is traced again later: its symbols are made anew then."""
    environment = getattr(getattr(like, "fake_mode", None), "shape_env", None)
    with environment.ignore_fresh_unbacked_symbols() if environment is not None else contextlib.nullcontext():
        yield
