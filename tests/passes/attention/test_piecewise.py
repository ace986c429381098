"""Masks that are added: where they are zero, what they are elsewhere, in the dtypes of the program."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mask_terms import Site, apply, cast, number, read, values

from omnicomp.passes.attention.masks import read_mask
from omnicomp.passes.attention.piecewise import Piecewise, additive
from omnicomp.passes.attention.terms import Apply, Term

FLOAT = torch.float32
MINIMUM = torch.finfo(FLOAT).min
INFINITY = float("inf")


def constant(value: float) -> Term:
    return number(value, FLOAT)


def chosen(condition: Term, then: float, otherwise: float) -> Term:
    return apply("where", condition, constant(then), constant(otherwise))


def ints(site: Site) -> Term:
    return read("mask", site.b, site.k, dtype=torch.int64)


def inverted(site: Site) -> Term:
    return apply("sub", constant(1.0), cast(ints(site), FLOAT))


def negated(term: Term) -> Term:
    return apply("not", term)


# Two-valued terms: zero where the mask is causal or of padding, the second value elsewhere.
CASES: dict[str, tuple[Callable[[Site], Term], str, float]] = {
    "where": (lambda s: chosen(s.causal, 0.0, MINIMUM), "causal", MINIMUM),
    "where, other way": (lambda s: chosen(negated(s.causal), -1e9, 0.0), "causal", -1e9),
    "(1 - mask) * minimum": (
        lambda s: apply("mul", apply("sub", constant(1.0), cast(s.causal, FLOAT)), MINIMUM),
        "causal",
        MINIMUM,
    ),
    "mask * minimum": (lambda s: apply("mul", cast(negated(s.padding), FLOAT), MINIMUM), "padding", MINIMUM),
    "full minimum times upper triangle": (
        lambda s: apply("mul", constant(MINIMUM), cast(apply("gt", s.key, s.query), FLOAT)),
        "causal",
        MINIMUM,
    ),
    "logarithm of the mask": (lambda s: apply("log", cast(s.causal, FLOAT)), "causal", -INFINITY),
    "negation": (lambda s: apply("neg", chosen(s.causal, 0.0, 1e4)), "causal", -1e4),
    "minimum rounded to bfloat16": (
        lambda s: cast(chosen(s.causal, 0.0, MINIMUM), torch.bfloat16),
        "causal",
        -INFINITY,
    ),
    "clamped infinity": (
        lambda s: apply("maximum", chosen(s.causal, 0.0, -INFINITY), constant(MINIMUM)),
        "causal",
        MINIMUM,
    ),
    "filled twice": (
        lambda s: apply("where", negated(s.padding), constant(-1e9), chosen(s.causal, 0.0, -1e9)),
        "causal and padding",
        -1e9,
    ),
    "inverted integers, filled where not zero": (
        lambda s: apply("where", cast(inverted(s), torch.bool), constant(MINIMUM), inverted(s)),
        "padding",
        MINIMUM,
    ),
    "integers, filled where zero": (
        lambda s: apply(
            "where",
            apply("eq", ints(s), 0),
            constant(-INFINITY),
            apply("where", apply("eq", ints(s), 1), apply("sub", cast(ints(s), FLOAT), 1.0), -INFINITY),
        ),
        "padding",
        -INFINITY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_two_values_is_a_condition_and_its_value(name: str) -> None:
    make, mask, sentinel = CASES[name]
    site = Site(8, 8)
    found = additive(make(site), **site.axes)
    assert found is not None
    assert found.sentinel == sentinel
    assert read_mask(found.keep(), **site.axes).name == mask


def test_the_sum_of_two_masks_has_three_values() -> None:
    site = Site(8, 8)
    total = apply("add", chosen(site.causal, 0.0, MINIMUM), chosen(site.padding, 0.0, MINIMUM))
    found = additive(total, **site.axes)
    assert found is not None
    assert found.values == (0.0, MINIMUM, -INFINITY)
    assert found.sentinel is None
    assert read_mask(found.keep(), **site.axes).name == "causal and padding"
    dead = read_mask(found.where(lambda value: value == -INFINITY), **site.axes)
    assert {conjunct.kind for conjunct in dead.conjuncts} == {"window", "padding"}


def test_a_mask_added_twice_has_two_values() -> None:
    site = Site(8, 8)
    once = chosen(site.causal, 0.0, MINIMUM)
    found = additive(apply("add", once, chosen(site.causal, 0.0, MINIMUM)), **site.axes)
    assert found is not None
    assert (found.values, found.sentinel) == ((0.0, -INFINITY), -INFINITY)
    assert [condition for condition, _ in found.pieces][:-1] == [site.causal]


def test_a_constant_is_one_piece() -> None:
    site = Site(4, 4)
    found = additive(apply("mul", constant(0.0), -1.0), **site.axes)
    assert found is not None
    assert (found.values, found.sentinel) == ((0.0,), None)
    assert read_mask(found.keep(), **site.axes).is_full


@pytest.mark.parametrize(
    "make",
    [
        lambda s: read("bias", s.h, s.q, s.k, dtype=FLOAT),
        lambda s: apply("mul", inverted(s), MINIMUM),
        lambda s: apply("add", chosen(s.causal, 0.0, MINIMUM), read("bias", s.h, s.q, s.k, dtype=FLOAT)),
        lambda s: cast(apply("sub", s.key, s.query), FLOAT),
        lambda s: apply("where", apply("eq", ints(s), 0), constant(0.0), inverted(s)),
    ],
)
def test_what_may_take_other_values_is_not_piecewise(make: Callable[[Site], Term]) -> None:
    site = Site(4, 4)
    assert additive(make(site), **site.axes) is None


def test_too_many_values_are_not_piecewise() -> None:
    site = Site(40, 40)
    total: Term = constant(0.0)
    for i in range(6):
        total = apply("add", total, chosen(apply("lt", site.key, 5 * i), 2.0**i, 0.0))
    assert additive(total, **site.axes) is None


def test_zeros_of_either_sign_are_one_value_unless_something_divides_by_them() -> None:
    site = Site(4, 4)
    signed = apply("mul", cast(site.causal, FLOAT), -0.0)
    found = additive(signed, **site.axes)
    assert found is not None
    assert found.values == (0.0,)
    ends = additive(apply("reciprocal", chosen(site.causal, 0.0, -0.0)), **site.axes)
    assert ends is not None
    assert ends.values == (INFINITY, -INFINITY)


NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 2.0, MINIMUM, -INFINITY])
CONDITIONS = st.sampled_from(["causal", "padding", "not causal", "not padding", "own", "both"])
TERMS = st.recursive(
    st.one_of(NUMBERS, st.tuples(st.just("cast"), CONDITIONS)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]), inner, inner),
        st.tuples(st.just("where"), CONDITIONS, inner, inner),
        st.tuples(st.just("neg"), inner),
    ),
    max_leaves=5,
)


def build(recipe: Any, site: Site) -> Term:
    if isinstance(recipe, float):
        return constant(recipe)
    if isinstance(recipe, str):
        named = {"causal": site.causal, "padding": site.padding, "own": apply("eq", site.key, site.query)}
        named["both"] = apply("and", site.causal, site.padding)
        return negated(named[recipe[4:]]) if recipe.startswith("not ") else named[recipe]
    op, *parts = recipe
    args = tuple(build(part, site) for part in parts)
    return Apply(dtype=FLOAT, op=op, args=args)


def chain(found: Piecewise, site: Site, data: dict[str, np.ndarray]) -> np.ndarray:
    total = np.full((2, 3, 4, 5), np.nan, dtype=np.float32)
    for condition, value in reversed(found.pieces):
        total = np.where(values(condition, site.axes, data), np.float32(value), total)
    return total


@given(TERMS, st.integers(0, 2**32 - 1))
def test_pieces_give_the_values_of_the_term(recipe: Any, seed: int) -> None:
    site = Site(4, 5)
    term = build(recipe, site)
    found = additive(term, **site.axes)
    assert found is not None
    data = {"padding": np.random.default_rng(seed).random((2, 5)) < 0.5}
    with np.errstate(all="ignore"):
        wanted = values(term, site.axes, data)
        np.testing.assert_array_equal(chain(found, site, data), wanted)
        np.testing.assert_array_equal(values(found.keep(), site.axes, data), wanted == 0)
