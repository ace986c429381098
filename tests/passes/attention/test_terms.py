"""Terms: equal meanings have equal keys, and rewriting touches only what it changes."""

import torch

from omnicomp.passes.attention.terms import (
    OPERATIONS,
    Apply,
    Axis,
    Index,
    Number,
    Position,
    flat,
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
