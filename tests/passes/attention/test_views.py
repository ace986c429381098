"""Views read backward: every element that a chain of views shows is found in the tensor that it came from."""

import pytest
import torch
from traced import capture, evaluate, read

from omnicomp.passes.attention.reader import Reader, axes_of
from omnicomp.passes.attention.terms import Axis, Position, Read
from omnicomp.passes.attention.views import NotAView, full, source, split

CHAINS = {
    "transposed": lambda x: x.transpose(1, 3).permute(3, 0, 1, 2).mT,
    "flattened and split again": lambda x: x.flatten(1, 2).view(2, 3, 2, 2, 8),
    "regrouped": lambda x: x.reshape(2, 3, 2, 2, 8).permute(0, 3, 1, 2, 4).reshape(4, 6, 8),
    "across two boundaries": lambda x: x.reshape(6, 32).reshape(2, 12, 8).transpose(0, 1).reshape(3, 4, 16),
    "ones": lambda x: x.unsqueeze(0).unsqueeze(3).squeeze(0).squeeze(2),
    "expanded": lambda x: x[:, :, None].expand(2, 3, 5, 4, 8).reshape(2, 15, 4, 8),
    "repeated": lambda x: x.repeat(2, 1, 1, 3),
    "interleaved": lambda x: x.repeat_interleave(3, 1),
    "sliced": lambda x: x[:, 1:, :3, 2:7],
    "slice of a slice": lambda x: x[..., 1:7][..., 2:].transpose(0, 1),
    "from the end": lambda x: x[..., -3:].select(2, -1),
    "a slice merged": lambda x: x[:, :, 1:].flatten(1, 2),
    "selected": lambda x: x[1].select(1, 2),
    "chunks": lambda x: x.chunk(2, -1)[1].transpose(1, 2),
    "split unevenly": lambda x: x.split([1, 2], 1)[1],
    "unbound": lambda x: x.unbind(1)[2],
    "copies": lambda x: x.mT.contiguous().clone().detach().mT,
    "movedim": lambda x: torch.movedim(x, 0, 2).swapaxes(0, 1),
    "tiled and grouped": lambda x: x.unflatten(2, (2, 2)).repeat(1, 2, 1, 1, 1).flatten(2, 3),
}


@pytest.mark.parametrize("name", CHAINS)
def test_every_element_is_found(name):
    x = torch.randn(2, 3, 4, 8)
    term, at, tensors = read(CHAINS[name], x)
    assert isinstance(term, Read), "views leave no trace"
    (held,) = tensors
    assert term.value is held
    assert torch.equal(evaluate(term, at, tensors), CHAINS[name](x))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.flatten(1)[:, 3:].view(2, 31, 3), lambda x: x[..., ::2], lambda x: x.flatten(0, 1).view(3, 2, 4, 8)],
    ids=["a slice reshaped", "a step", "other digits"],
)
def test_what_axes_can_not_address_is_no_view(function):
    value = capture(function, torch.randn(2, 3, 4, 8)).output()
    # A reader stops where a view can't be read.
    stopped = Reader().expand(Reader().read(value, axes_of(value)))
    assert isinstance(stopped, Read)
    op = stopped.value.op
    assert op is not None
    with pytest.raises(NotAView):
        source(op, stopped.value.index, stopped.at)


def test_an_axis_that_is_split_is_seen_split_by_those_who_hold_it():
    axis = Axis("k", 12)
    before = Position((axis,))
    outer, inner = split([axis], 4)
    assert [a.size for a in (*outer, *inner)] == [3, 4]
    assert before.flat() == (*outer, *inner)
    again, last = split([axis], 2)
    assert [a.size for a in (*again, *last)] == [3, 2, 2]


def test_a_split_needs_sizes_that_divide():
    with pytest.raises(NotAView, match="cuts across"):
        split([Axis("k", 12)], 5)
    with pytest.raises(NotAView, match="mixes"):
        split([Axis("a", 2)], 4)


def test_only_the_whole_dimension_is_full():
    axis = Axis("k", 6)
    assert full(Position((axis,)), 6)
    assert not full(Position((axis,)), 7)
    assert not full(Position((axis,), 1), 6)
    assert full(Position(), 1)
