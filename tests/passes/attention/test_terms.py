"""Terms: equal meanings have equal keys, and rewriting touches only what it changes."""

import torch

from omnicomp.passes.attention.terms import (
    OPERATIONS,
    Apply,
    Axis,
    Index,
    Number,
    Position,
    Read,
    flat,
    key_of,
    leaves,
    rewrite,
)

INTEGER, FLOAT = torch.int64, torch.float32


def causal(query, key, offset=0):
    row = Apply(
        dtype=INTEGER,
        op="add",
        args=(Index(dtype=INTEGER, position=Position((query,))), Number(dtype=INTEGER, value=offset)),
    )
    return Apply(dtype=torch.bool, op="le", args=(Index(dtype=INTEGER, position=Position((key,))), row))


def test_axes_of_one_element_and_split_ones_resolve():
    inner = Axis("k", 6)
    inner.parts = (Axis("k", 2), Axis("k", 3))
    assert flat([Axis("b", 1), inner]) == inner.parts
    assert repr(inner) == "(k<2> k<3>)"
    assert Position((inner,)).flat() == inner.parts


def test_keys_are_equal_for_the_same_function_of_named_axes_only():
    one, two = (Axis("q", 4), Axis("k", 4)), (Axis("q", 4), Axis("k", 4))
    names = [dict(zip(axes, ("query", "key"), strict=True)) for axes in (one, two)]
    assert key_of(causal(*one), names[0]) == key_of(causal(*two), names[1])
    assert key_of(causal(*one), names[0]) != key_of(causal(*reversed(two)), names[1])
    assert key_of(causal(*one), names[0]) != key_of(causal(*one, offset=1), names[0])
    assert key_of(causal(*one), {}) != key_of(causal(*two), {}), "axes without a name stand for themselves"


def test_keys_tell_tensors_and_dtypes_apart():
    axis, held = Axis("k", 4), [object(), object()]
    reads = [Read(dtype=FLOAT, value=value, at=(Position((axis,)),)) for value in held]
    assert key_of(reads[0], {axis: "k"}) != key_of(reads[1], {axis: "k"})
    shifted = Read(dtype=FLOAT, value=held[0], at=(Position((axis,), 1),))
    assert key_of(reads[0], {axis: "k"}) != key_of(shifted, {axis: "k"})
    casts = [Apply(dtype=dtype, op="cast", args=(reads[0],)) for dtype in (torch.half, torch.bfloat16)]
    assert key_of(casts[0], {axis: "k"}) != key_of(casts[1], {axis: "k"})


def test_rewriting_replaces_outermost_parts_and_shares_the_rest():
    axis = Axis("k", 4)
    term = causal(Axis("q", 4), axis)
    left, right = term.args

    def change(item):
        return Number(dtype=INTEGER, value=7) if item is left else None

    new = rewrite(term, change)
    assert new.args[0].value == 7
    assert new.args[1] is right
    assert rewrite(term, lambda item: None) is term
    assert [type(leaf) for leaf in leaves(new)] == [Number, Index, Number]
    assert len(new.args) == OPERATIONS[new.op]
