"""Masks are named for what they are, static and symbolic, in every spelling; and nothing is claimed that is not so."""

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from mask_terms import Site, apply, cast, index, number, read, symbols, values

from omnicomp.passes.attention import masks, tables
from omnicomp.passes.attention.linear import Linear
from omnicomp.passes.attention.masks import Mask, read_mask, sees_first_key, under
from omnicomp.passes.attention.predicates import Clause, Literal
from omnicomp.passes.attention.structure import term_key
from omnicomp.passes.attention.terms import Apply, Axis, Position, Read, Term
from omnicomp.passes.mask_classes import MaskClass

FLOAT = torch.float32

# Spellings of one mask, each as a function of the site.
SPELLINGS: dict[str, list[Callable[[Site], Term]]] = {
    "causal": [
        lambda s: s.causal,
        lambda s: apply("ge", s.query, s.key),
        lambda s: apply("not", apply("gt", s.key, s.query)),
        lambda s: apply("lt", s.key, apply("add", s.query, 1)),
        lambda s: apply("ge", apply("sub", s.query, s.key), 0),
        lambda s: apply("not", apply("ge", apply("sub", s.key, s.query), 1)),
        lambda s: apply("eq", apply("where", s.causal, number(1.0, FLOAT), 0.0), 1.0),
        lambda s: apply("not", apply("eq", apply("where", s.causal, number(1.0, FLOAT), 0.0), 0.0)),
        lambda s: cast(cast(s.causal, torch.int64), torch.bool),
        lambda s: apply("lt", apply("sub", s.key, s.query), number(0.5, FLOAT)),
        lambda s: apply("and", s.causal, apply("ge", s.query, 0)),
        lambda s: apply("le", apply("mul", s.key, 2), apply("add", apply("mul", s.query, 2), 1)),
        lambda s: apply("where", s.causal, apply("ge", s.key, 0), apply("lt", s.key, 0)),
        lambda s: apply("eq", apply("maximum", s.query, s.key), s.query),
        lambda s: apply("le", apply("floordiv", apply("mul", s.key, 3), 3), s.query),
    ],
    "none": [
        lambda s: apply("ge", s.query, 0),
        lambda s: apply("lt", s.key, number(float("inf"), FLOAT)),
        lambda s: apply("or", s.causal, apply("gt", s.key, s.query)),
        lambda s: apply("ge", apply("abs", apply("sub", s.query, s.key)), 0),
        lambda s: apply("lt", apply("mod", s.key, 5), 5),
        lambda s: number(True, torch.bool),
    ],
    "sliding window of 3": [
        lambda s: apply("and", s.causal, apply("gt", s.key, apply("sub", s.query, 3))),
        lambda s: apply("and", s.causal, apply("lt", apply("sub", s.query, s.key), 3)),
        lambda s: apply("not", apply("or", apply("gt", s.key, s.query), apply("ge", apply("sub", s.query, s.key), 3))),
    ],
    "window of 2 on both sides": [
        lambda s: apply("le", apply("abs", apply("sub", s.query, s.key)), 2),
        lambda s: apply("lt", apply("maximum", apply("sub", s.query, s.key), apply("sub", s.key, s.query)), 3),
        lambda s: apply("not", apply("gt", apply("abs", apply("sub", s.key, s.query)), number(2.5, FLOAT))),
    ],
    "chunked by 4": [
        lambda s: apply("eq", apply("floordiv", s.query, 4), apply("floordiv", s.key, 4)),
        lambda s: apply("eq", apply("sub", apply("floordiv", s.query, 4), apply("floordiv", s.key, 4)), 0),
        lambda s: apply("not", apply("ne", apply("floordiv", s.key, 4), apply("floordiv", s.query, 4))),
    ],
    "block causal by 4": [
        lambda s: apply("le", apply("floordiv", s.key, 4), apply("floordiv", s.query, 4)),
    ],
    "prefix of 3": [
        lambda s: apply("or", s.causal, apply("lt", s.key, 3)),
        lambda s: apply("where", apply("lt", s.key, 3), number(True, torch.bool), s.causal),
    ],
    "first 3 keys": [
        lambda s: apply("lt", s.key, 3),
        lambda s: apply("not", apply("le", number(3), s.key)),
    ],
    "document": [
        lambda s: apply("eq", *(read("d", s.b, axis, dtype=torch.int64) for axis in (s.q, s.k))),
        lambda s: apply("not", apply("ne", *(read("d", s.b, axis, dtype=torch.int32) for axis in (s.k, s.q)))),
    ],
    "padding": [
        lambda s: s.padding,
        lambda s: apply("not", apply("eq", read("p", s.b, s.k, dtype=torch.int64), 0)),
        lambda s: cast(read("p", s.b, s.k, dtype=torch.int64), torch.bool),
        lambda s: apply("lt", s.key, read("length", s.b, dtype=torch.int64)),
    ],
    "unknown": [
        lambda s: read("m", s.b, s.h, s.q, s.k),
        lambda s: apply("or", s.causal, read("image", s.b, s.q)),
        lambda s: apply("le", s.key, read("position", s.b, s.q, dtype=torch.int64)),
        lambda s: apply("le", apply("mul", s.query, s.key), 3),
    ],
    "causal and padding": [
        lambda s: apply("and", s.causal, s.padding),
        lambda s: apply("mul", s.padding, s.causal),
        lambda s: apply("not", apply("or", apply("not", s.padding), apply("lt", s.query, s.key))),
        lambda s: apply("eq", apply("mul", cast(s.causal, torch.int64), cast(s.padding, torch.int64)), 1),
        lambda s: apply("gt", apply("add", cast(s.causal, FLOAT), cast(s.padding, FLOAT)), 1.5),
    ],
    "causal and document": [
        lambda s: apply("and", *(SPELLINGS[name][0](s) for name in ("document", "causal"))),
    ],
    "causal and chunked by 4": [
        lambda s: apply("and", *(SPELLINGS[name][0](s) for name in ("chunked by 4", "causal"))),
    ],
}
CASES = [pytest.param(name, i, id=f"{name}-{i}") for name, some in SPELLINGS.items() for i in range(len(some))]


@pytest.mark.parametrize(("name", "spelling"), CASES)
def test_a_mask_has_its_name_in_every_spelling(name: str, spelling: int) -> None:
    site = Site(16, 16)
    mask = read_mask(SPELLINGS[name][spelling](site), **site.axes)
    assert mask.name == name
    assert mask.is_full == (name == "none")
    assert mask.is_causal == (name == "causal")


@pytest.mark.parametrize(("name", "spelling"), CASES)
def test_a_mask_of_symbolic_sizes_has_the_same_name_and_adds_no_guard(name: str, spelling: int) -> None:
    environment, (batch, size) = symbols(3, 7)
    site = Site(size, size, batch=batch)
    mask = read_mask(SPELLINGS[name][spelling](site), **site.axes)
    # In float32, the indices of an axis of any size are not exact.
    assert mask.name == name
    assert mask.is_causal == (name == "causal")
    assert mask.proof in ("algebra", "")
    assert environment.guards == []


def fields(mask: Mask) -> tuple[Any, ...]:
    return (mask.name, mask.is_full, mask.is_causal, mask.offset, mask.window, mask.bottom_right, mask.rows_nonempty)


@pytest.mark.parametrize(
    ("queries", "keys", "past", "left", "expected"),
    [
        (4, 7, 0, None, ("causal", False, True, 0, None, False, True)),
        (4, 7, 3, None, ("causal, offset 3", False, False, 3, None, True, True)),
        (7, 4, 0, None, ("causal", False, True, 0, None, False, True)),
        (7, 4, -3, None, ("causal, offset -3", False, False, -3, None, True, False)),
        (1, 9, 8, None, ("none", True, False, None, None, False, True)),
        (1, 9, 0, None, ("causal", False, True, 0, None, False, True)),
        (5, 1, 0, None, ("none", True, False, None, None, False, True)),
        (4, 4, 0, 3, ("causal", False, True, 0, None, True, True)),
        (4, 4, 0, 2, ("sliding window of 3", False, False, 0, (2, 0), True, True)),
        (4, 7, 3, -1, ("sliding window of 3, offset 3", False, False, 3, (-1, 3), True, True)),
        (7, 4, 0, 2, ("sliding window of 3", False, False, 0, (2, 0), False, False)),
        (3, 3, -9, None, ("empty", False, False, None, None, False, False)),
    ],
)
def test_sizes_decide_what_a_band_is(queries: int, keys: int, past: int, left: int | None, expected: Any) -> None:
    site = Site(queries, keys, past=past)
    keep: Term = site.causal
    if left is not None:
        keep = apply("and", keep, apply("le", apply("sub", index(site.q), site.key), left))
    assert fields(read_mask(keep, **site.axes)) == expected


def test_a_cache_of_symbolic_length_shifts_the_diagonal_to_the_bottom_right() -> None:
    _, (queries, past) = symbols(5, 9)
    site = Site(queries, queries + past, past=past)
    mask = read_mask(site.causal, **site.axes)
    assert (mask.offset, mask.bottom_right, mask.is_causal) == (past.node.expr, True, False)
    assert mask.rows_nonempty
    one = Site(1, past + 1, past=past)
    assert read_mask(one.causal, **one.axes).is_full


def test_unrelated_symbolic_sizes_leave_open_whether_each_query_has_a_key() -> None:
    _, (queries, keys) = symbols(5, 9)
    site = Site(queries, keys, past=keys - queries)
    mask = read_mask(site.causal, **site.axes)
    assert sympy.expand(mask.offset - keys.node.expr + queries.node.expr) == 0
    assert mask.bottom_right
    assert not mask.rows_nonempty


def test_digits_of_an_index_are_quotients_and_remainders() -> None:
    for size in (4, symbols(4)[1][0]):
        q, k = ([Axis(f"{name}0", size), Axis(f"{name}1", 3)] for name in "qk")
        axes: Any = {"batch": (), "heads": (), "query": q, "key": k}
        assert read_mask(apply("eq", index(q[0]), index(k[0])), **axes).name == "chunked by 3"
        assert read_mask(apply("le", index(*k), index(*q)), **axes).is_causal
        assert read_mask(apply("lt", index(q[1]), 3), **axes).is_full
    whole = Axis("q", 12)
    whole.parts = tuple(q)
    assert read_mask(apply("le", index(*k), index(whole)), **axes | {"query": (whole,)}).is_causal


def test_data_and_its_negation_cancel_and_follow_from_each_other() -> None:
    site = Site(8, 8)
    ints = read("p", site.b, site.k, dtype=torch.int64)
    # The form in which a two-valued float mask is patched by an integer padding mask.
    minimum = torch.finfo(FLOAT).min
    float_causal = apply("where", site.causal, number(0.0, FLOAT), minimum)
    dead = apply("eq", apply("add", float_causal, cast(ints, FLOAT)), 0.0)
    mask = read_mask(apply("and", site.causal, apply("not", dead)), **site.axes)
    assert mask.name == "causal and padding"
    inverted = apply("sub", number(1.0, FLOAT), cast(ints, FLOAT))
    both = apply("and", apply("not", cast(inverted, torch.bool)), apply("eq", ints, 1))
    assert len(read_mask(both, **site.axes).conjuncts) == 1
    assert read_mask(apply("or", site.padding, apply("not", site.padding)), **site.axes).is_full


def test_no_number_is_neither_smaller_nor_not_smaller() -> None:
    site = Site(4, 4)
    value = read("x", site.b, site.k, dtype=FLOAT)
    small = apply("lt", value, 0.5)
    assert not read_mask(apply("or", small, apply("ge", value, 0.5)), **site.axes).is_full
    assert read_mask(apply("or", small, apply("not", small)), **site.axes).is_full
    whole = read("x", site.b, site.k, dtype=torch.int64)
    assert read_mask(apply("or", apply("lt", whole, 1), apply("ge", whole, 1)), **site.axes).is_full


@pytest.mark.parametrize(
    ("known", "name"),
    [
        (MaskClass(kind="full"), "causal"),
        (MaskClass(kind="causal"), "causal"),
        (MaskClass(kind="band", left=2, right=0), "sliding window of 3"),
        (MaskClass(kind="prefix", right=0, length=3), "causal"),
    ],
)
def test_the_rest_of_a_mask_stays_where_the_class_of_its_data_is_known(known: MaskClass, name: str) -> None:
    site = Site(8, 8)
    mask = read_mask(apply("and", site.causal, site.padding), **site.axes)
    assert not mask.rows_nonempty
    found = under(mask, known, **site.axes)
    assert (found.name, found.rows_nonempty) == (name, True)
    assert under(None, MaskClass(kind="prefix", right=0, length=3), **site.axes).name == "prefix of 3"
    assert sees_first_key(mask, **site.axes)
    assert not sees_first_key(under(None, MaskClass(kind="band", left=1), **site.axes), **site.axes)


def test_a_key_that_needs_no_data_leaves_no_query_without_one() -> None:
    site = Site(8, 8)
    own = apply("eq", site.query, site.key)
    assert read_mask(apply("and", site.causal, apply("or", site.padding, own)), **site.axes).rows_nonempty


def test_dtypes_that_cannot_hold_the_index_prove_nothing_by_algebra() -> None:
    _, (size,) = symbols(7)
    site = Site(size, size)
    single = apply("le", cast(site.key, FLOAT), cast(site.query, FLOAT))
    assert read_mask(single, **site.axes).name == "unknown"
    site = Site(300, 300)
    short = apply("le", cast(site.key, torch.bfloat16), cast(site.query, torch.bfloat16))
    mask = read_mask(short, **site.axes)
    assert (mask.name, mask.is_causal, mask.proof) == ("unknown", False, "")
    site = Site(200, 200)
    narrow = apply("le", cast(site.key, torch.int8), cast(site.query, torch.int8))
    assert not read_mask(narrow, **site.axes).is_causal
    site = Site(100, 100)
    narrow = apply("le", cast(site.key, torch.int8), cast(site.query, torch.int8))
    assert read_mask(narrow, **site.axes).is_causal


def test_what_algebra_cannot_read_is_decided_by_evaluation_of_known_sizes() -> None:
    site = Site(9, 9)
    squares = apply("le", apply("mul", site.key, site.key), apply("mul", site.query, site.query))
    mask = read_mask(squares, **site.axes)
    assert (mask.name, mask.is_causal, mask.proof) == ("causal", True, "evaluation")
    _, (size,) = symbols(9)
    site = Site(size, size)
    squares = apply("le", apply("mul", site.key, site.key), apply("mul", site.query, site.query))
    mask = read_mask(squares, **site.axes)
    assert (mask.name, mask.is_causal, mask.proof) == ("unknown", False, "")


def test_a_reading_that_evaluation_contradicts_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, term: Term, positive: bool = True) -> tuple[Clause, ...]:
        return (Clause((Literal(term=term, relation="le", form=Linear(constant=1)),)),)

    monkeypatch.setattr(masks.NormalForm, "read", wrong)
    site = Site(4, 4)
    with pytest.raises(tables.MaskDisagreement, match="mask '"):
        read_mask(site.causal, **site.axes)


def test_the_term_of_a_mask_is_the_mask() -> None:
    site = Site(5, 6)
    keep = apply("and", SPELLINGS["chunked by 4"][0](site), apply("or", site.causal, apply("lt", site.key, 2)))
    mask = read_mask(keep, **site.axes)
    assert (values(mask.term, site.axes) == values(keep, site.axes)).all()


def test_layers_share_a_key_and_other_masks_do_not() -> None:
    def key_of(site: Site, keep: Term) -> Any:
        return term_key(keep, **site.axes)

    one, other, longer = Site(8, 8), Site(8, 8), Site(8, 9)
    keys = [key_of(site, apply("and", site.causal, site.padding)) for site in (one, other, longer)]
    assert keys[0] == keys[1] != keys[2]
    assert hash(keys[0]) == hash(keys[1])
    assert key_of(one, one.causal) != key_of(one, apply("lt", one.key, one.query))
    tensors = [Read(dtype=torch.bool, value=torch.ones(8), at=(Position(axes=(one.k,)),)) for _ in range(2)]
    assert key_of(one, tensors[0]) != key_of(one, tensors[1])


def test_a_term_with_shared_parts_takes_no_exponential_time() -> None:
    site = Site(8, 8)
    total: Term = site.causal
    for _ in range(60):
        total = Apply(dtype=torch.bool, op="or", args=(total, total))
    assert read_mask(total, **site.axes).is_causal
    assert len(term_key(total, **site.axes)) == 2  # type: ignore[arg-type]


def test_a_term_that_is_not_boolean_is_refused() -> None:
    site = Site(4, 4)
    with pytest.raises(ValueError, match="boolean term"):
        read_mask(site.query, **site.axes)


def test_every_query_is_in_the_document_of_its_own_key() -> None:
    site = Site(8, 8)

    def document(axis: Axis, dtype: torch.dtype = torch.int64, start: int = 0) -> Term:
        at = (Position(axes=(site.b,)), Position(axes=(axis,), start=start))
        return Read(dtype=dtype, value="d", at=at)

    def nonempty(left: Term, right: Term) -> bool:
        mask = read_mask(apply("and", site.causal, apply("eq", left, right)), **site.axes)
        return mask.rows_nonempty

    assert nonempty(document(site.q), document(site.k))
    assert nonempty(document(site.k), document(site.q))
    assert not nonempty(document(site.q), document(site.k, start=1)), "the next key's document"
    assert not nonempty(document(site.q), apply("add", document(site.k), 1)), "the document after this one"
    assert not nonempty(document(site.q, torch.float32), document(site.k, torch.float32)), "NaN is not itself"
    later = apply("lt", site.query, site.key)
    same = apply("eq", document(site.q), document(site.k))
    assert not read_mask(apply("and", later, same), **site.axes).rows_nonempty, "but not that of its own key"
