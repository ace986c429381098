"""Bounds of masks over blocks: never narrower than the mask, and as narrow for the masks that models have."""

import pytest
import torch
from flex_forms import BOOL, apply, at, both, causal_term, compare, index, number, read, window
from hypothesis import given
from hypothesis import strategies as st

from omnicomp.passes.attention.flex_blocks import Bounds, Unbounded, find_blocks, grid
from omnicomp.passes.attention.flex_values import Backend, Indices, Values
from omnicomp.passes.attention.terms import Axis

CPU = torch.device("cpu")
SIZES = (2, 3, 500, 640)
B, H, Q, K = AXES = tuple((Axis(name, size),) for name, size in zip("bhqk", SIZES, strict=True))
I64, I32 = torch.int64, torch.int32


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


def blocks_of(term, tensors):
    """Of the bounds, and of the elements: whether a block may hold something, and whether it holds all."""
    indices = Indices(*AXES)
    rows, columns = (-(-size // 128) for size in SIZES[2:])
    index, valid = grid(call, SIZES, {0, 1, 2, 3}, (0, rows), columns, CPU, int)

    def element(leaf, position):
        return tensors[leaf.value][tuple(map(position, leaf.at))]

    values = Values(indices, Backend(call=call, index=index, read=element, number=lambda n: n))
    bounds = Bounds(call=call, indices=indices, values=values, number=lambda n: n, device=CPU)
    shape = (*SIZES[:2], rows, columns)
    exact = torch.as_tensor(values(term)).expand(*SIZES[:2], rows, 128, columns, 128)
    return tuple(
        [torch.broadcast_to(each, shape) for each in pair]
        for pair in (bounds.blocks(term, valid), find_blocks(call, exact, valid))
    )


def documents(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (SIZES[0], SIZES[3]), generator=generator).cumsum(-1)
    return lengths // 400


def same(left, right):
    return compare("eq", left, right)


def document_of(axes):
    return read("document", at(*B), at(*axes), dtype=I64)


KEPT = read("padding", at(*B), at(*K), dtype=BOOL)
MASKS = {
    "causal and documents": both(causal_term(Q, K), same(document_of(Q), document_of(K))),
    "documents": same(document_of(Q), document_of(K)),
    "causal and padding": both(causal_term(Q, K), KEPT),
    "window of data": both(window(Q, K, 200), compare("lt", document_of(K), number(3))),
    "another document": compare("not", same(document_of(Q), document_of(K))),
    "prefix of a row": compare("or", causal_term(Q, K), compare("lt", index(*K), read("prefix", at(*B), dtype=I64))),
    "distance on both sides": compare(
        "le", apply("abs", apply("sub", index(*Q), index(*K))), read("reach", at(*H), dtype=I64)
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_the_masks_of_models_are_exact(name, seed):
    lengths = torch.tensor([370, 640])
    tensors = {
        "document": documents(seed),
        "padding": torch.arange(SIZES[3]) < lengths[:, None],
        "prefix": torch.tensor([100, 300]),
        "reach": torch.tensor([0, 50, 300]),
    }
    (some, full), (held, all_held) = blocks_of(MASKS[name], tensors)
    assert torch.equal(full, all_held)
    assert not (held & ~some).any()
    # A block in which each part holds somewhere, but no pair has all parts, is not left out.
    assert (some & ~held).sum() <= (4 if name == "causal and documents" else 0)


integers = st.one_of(
    st.sampled_from(["q", "k", "b", "h"]),
    st.integers(-700, 700),
    st.sampled_from(["of_query", "of_key", "of_batch"]),
)


@st.composite
def predicates(draw, depth=3):
    kind = draw(st.sampled_from(["compare", "compare", "kept", "and", "or", "not"] if depth else ["compare", "kept"]))
    if kind == "kept":
        return KEPT
    if kind == "not":
        return compare("not", draw(predicates(depth=depth - 1)))
    if kind in ("and", "or"):
        return compare(kind, draw(predicates(depth=depth - 1)), draw(predicates(depth=depth - 1)))
    return compare(draw(st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"])), draw(numbers()), draw(numbers()))


@st.composite
def numbers(draw):
    def leaf(of):
        if isinstance(of, int):
            return number(of)
        axes = {"q": Q, "k": K, "b": B, "h": H}
        if of in axes:
            return index(*axes[of], start=draw(st.integers(-200, 200)), step=draw(st.sampled_from([1, -1, 2])))
        return read(of, *{"of_query": (at(*B), at(*Q)), "of_key": (at(*K),), "of_batch": (at(*B),)}[of], dtype=I64)

    one = leaf(draw(integers))
    operation = draw(st.sampled_from(["", "", "add", "sub", "abs", "floordiv"]))
    if operation == "abs":
        return apply("abs", one)
    if operation == "floordiv":
        return apply("floordiv", one, number(draw(st.sampled_from([3, 128]))))
    return apply(operation, one, leaf(draw(integers))) if operation else one


@given(predicates(), st.integers(0, 3))
def test_bounds_contain_every_pair(term, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "of_query": torch.randint(-3, 300, (SIZES[0], SIZES[2]), generator=generator).sort(-1).values,
        "of_key": torch.randint(-3, 300, (SIZES[3],), generator=generator),
        "of_batch": torch.randint(-3, 3, (SIZES[0],), generator=generator),
        "padding": torch.rand(SIZES[0], SIZES[3], generator=generator) < 0.99,
    }
    try:
        (some, full), (held, all_held) = blocks_of(term, tensors)
    except Unbounded:
        return
    assert not (held & ~some).any()
    assert not (full & ~all_held).any()


@pytest.mark.parametrize(
    "term",
    [
        read("pair", at(*Q), at(*K), dtype=BOOL),
        compare("lt", read("scale", at(*Q)), read("scale", at(*K))),
        compare("lt", apply("add", document_of(Q), index(*K)), number(3)),
        compare("lt", apply("mul", index(*Q), index(*K)), number(3)),
        compare("xor", causal_term(Q, K), KEPT),
    ],
    ids=["pairs", "floats", "sums of data", "products", "xor"],
)
def test_what_has_no_bounds_here_says_so(term):
    tensors = {
        "pair": torch.ones(SIZES[2:], dtype=BOOL),
        "scale": torch.ones(SIZES[3]),
        "document": documents(0),
        "padding": torch.ones(SIZES[0], SIZES[3], dtype=BOOL),
    }
    with pytest.raises(Unbounded):
        blocks_of(term, tensors)
