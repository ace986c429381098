"""Random predicates: what is claimed of a mask is what every one of its elements says, by brute force."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from mask_terms import Site, apply, cast, number, read, symbols, values

from omnicomp.passes.attention.masks import Mask, read_mask, under
from omnicomp.passes.attention.terms import Term
from omnicomp.passes.mask_classes import MaskClass

# A recipe is a nested tuple, so that one mask can be built for symbolic sizes and for numbers.
NUMBERS = st.integers(-3, 6)
POSITIVE = st.integers(1, 5)
INDEX = st.recursive(
    st.sampled_from(["q", "k"]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"]), inner, NUMBERS),
        st.tuples(st.sampled_from(["floordiv", "mod"]), inner, POSITIVE),
        st.tuples(st.sampled_from(["add", "sub", "maximum", "minimum"]), inner, inner),
        st.tuples(st.sampled_from(["abs", "neg"]), inner),
        st.tuples(st.just("float"), inner),
    ),
    max_leaves=3,
)
COMPARISONS = st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"])
ATOMS = st.one_of(
    st.tuples(COMPARISONS, INDEX, NUMBERS),
    st.tuples(COMPARISONS, INDEX, INDEX),
    st.sampled_from(
        [
            ("le", "k", "q"),
            ("le", "k", ("add", "q", 2)),
            ("lt", ("sub", "q", "k"), 2),
            ("lt", ("abs", ("sub", "q", "k")), 3),
            ("eq", ("floordiv", "q", 2), ("floordiv", "k", 2)),
            ("lt", "k", 2),
        ]
    ),
)
DATA = st.sampled_from(["padding", "document", "keys", "queries"])


def predicates(atoms: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["and", "or", "and", "xor"]), inner, inner),
            st.tuples(st.just("not"), inner),
            st.tuples(st.just("where"), inner, inner, inner),
            st.tuples(st.sampled_from(["product", "sum"]), inner, inner),
        ),
        max_leaves=4,
    )


def build(recipe: Any, site: Site) -> Term:
    if isinstance(recipe, str):
        if recipe in ("padding", "document", "keys", "queries"):
            sides = [read("document", site.b, axis, dtype=torch.int64) for axis in (site.q, site.k)]
            ints = read("keys", site.b, site.k, dtype=torch.int64)
            found = {
                "padding": site.padding,
                "document": apply("eq", *sides),
                "keys": apply("ne", ints, 0),
                "queries": apply("gt", sides[0], 0),
            }
            return found[recipe]
        return site.query if recipe == "q" else site.key
    op, *parts = recipe
    args = [build(part, site) if not isinstance(part, int) else part for part in parts]
    if op == "float":
        return cast(args[0], torch.float64)
    if op in ("product", "sum"):
        ints = [cast(argument, torch.int64) for argument in args]
        return apply("eq", apply("mul", *ints), 1) if op == "product" else apply("ge", apply("add", *ints), 1)
    kinds = [a.dtype for a in args if not isinstance(a, int) and a.dtype is not torch.bool]
    if torch.float64 in kinds:
        args = [a if isinstance(a, int) or a.dtype is torch.float64 else cast(a, torch.float64) for a in args]
    return apply(op, *args)


def band(mask: Mask, queries: int, keys: int, sizes: dict[Any, int]) -> np.ndarray:
    q, k = np.arange(queries)[:, None], np.arange(keys)
    found = np.ones((queries, keys), dtype=bool)

    def value(of: Any) -> int:
        return int(of.subs(sizes)) if hasattr(of, "subs") else of

    left, right = mask.window or (None, None)
    right = mask.offset if right is None else right
    if right is not None:
        found &= k <= q + value(right)
    if left is not None:
        found &= q - k <= value(left)
    return found


def tables_of_claims(mask: Mask, table: np.ndarray, sizes: dict[Any, int]) -> None:
    """Check the claims that have to hold of a mask without data; `table` is of (batch, heads, queries, keys)."""
    queries, keys = table.shape[2:]
    note(f"{mask.name} {queries}x{keys} {mask.proof}")
    if mask.is_full:
        assert table.all()
    if mask.is_causal:
        assert (table == np.tri(queries, keys, dtype=bool)).all()
    if mask.rows_nonempty:
        assert table.any(-1).all()
    if mask.offset is not None or mask.window is not None:
        assert (table == band(mask, queries, keys, sizes)).all()
    if mask.bottom_right:
        offset: Any = mask.offset
        assert (offset.subs(sizes) if hasattr(offset, "subs") else offset) == keys - queries


@given(predicates(ATOMS), st.integers(1, 6), st.integers(1, 6))
def test_of_known_sizes_everything_is_found_and_nothing_else(recipe: Any, queries: int, keys: int) -> None:
    site = Site(queries, keys)
    keep = build(recipe, site)
    table = values(keep, site.axes)
    mask = read_mask(keep, **site.axes)
    tables_of_claims(mask, table, {})
    triangle = np.tri(queries, keys, dtype=bool)
    assert mask.is_full == bool(table.all())
    assert mask.is_causal == (not table.all() and bool((table == triangle).all()))
    assert mask.rows_nonempty == bool(table.any(-1).all())
    assert not mask.depends_on_data
    assert (values(mask.term, site.axes) == table).all()


@given(predicates(ATOMS), st.sampled_from(["same", "both", "past"]))
def test_of_symbolic_sizes_what_is_claimed_holds_for_all(recipe: Any, sizes: str) -> None:
    environment, (one, two) = symbols(5, 7)
    queries, keys, past = {"same": (one, one, 0), "both": (one, two, 0), "past": (one, one + two, two)}[sizes]
    site = Site(queries, keys, past=past)
    mask = read_mask(build(recipe, site), **site.axes)
    assert environment.guards == []
    for a in (2, 3, 4, 7):
        for b in (2, 3, 5, 9) if sizes != "same" else (a,):
            known = Site(a, {"same": a, "both": b, "past": a + b}[sizes], past=b if sizes == "past" else 0)
            tables_of_claims(mask, values(build(recipe, known), known.axes), {one.node.expr: a, two.node.expr: b})


@given(predicates(st.one_of(ATOMS, DATA)), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_with_data_what_is_claimed_holds_for_all_data(recipe: Any, queries: int, keys: int, seed: int) -> None:
    site = Site(queries, keys)
    keep = build(recipe, site)
    mask = read_mask(keep, **site.axes)
    rest = under(mask, MaskClass(kind="full"), **site.axes)
    source = np.random.default_rng(seed)
    longest = max(queries, keys)
    for ones in (False, True, True):
        data = {
            "padding": source.random((2, keys)) < 0.5,
            "document": source.integers(0, 3, (2, longest)),
            "keys": source.integers(0, 2, (2, keys)),
        }
        table = values(keep, site.axes, data)
        assert (values(mask.term, site.axes, data) == table).all()
        if not mask.depends_on_data:
            tables_of_claims(mask, table, {})
        if mask.rows_nonempty:
            assert table.any(-1).all()
        if ones and all(values(c.term, site.axes, data).all() for c in mask.conjuncts if c.data):
            assert (values(rest.term, site.axes, data) == table).all()
        indices = [values(c.term, site.axes) for c in mask.conjuncts if not c.data]
        if mask.offset is not None or mask.window is not None:
            assert (np.logical_and.reduce(indices) == band(mask, queries, keys, {})).all()


def test_the_recipes_reach_the_masks_that_have_names() -> None:
    site = Site(6, 6)
    recipe = ("and", ("le", "k", "q"), ("product", "padding", ("lt", ("sub", "q", "k"), 2)))
    assert read_mask(build(recipe, site), **site.axes).name == "sliding window of 2 and padding"
    assert isinstance(build(("le", ("float", "k"), "q"), site), type(number(1)).__mro__[1])
