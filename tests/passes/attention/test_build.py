"""Terms made into tensors again give what the program computed, in the order of dimensions that is asked for."""

import operator

import pytest
import torch
from traced import capture, read

from omnicomp.passes.attention.build import Builder
from omnicomp.passes.attention.reader import Reader, axes_of
from omnicomp.passes.attention.terms import Axis, Index, Number, Position, Read

CPU = torch.device("cpu")


def call(function, args, kwargs=None):
    """Run a call at once, on real tensors."""
    return function(*args, **(kwargs or {}))


def builder(tensors):
    made = Builder(lambda value: tensors[value], call)
    for value, x in tensors.items():
        made.learn(x, axes_of(value))
    return made


@pytest.mark.parametrize(
    "program",
    [
        lambda x, p: x.transpose(1, 2) * 2 - 1,
        lambda x, p: torch.where(p[:, None, None] > 0, x, -7.0),
        lambda x, p: x.masked_fill((torch.arange(5) > torch.arange(4)[:, None]) | (p[:, None, None] == 0), 0.0),
        lambda x, p: torch.tanh(x / 3).clamp(min=-0.5, max=0.5).exp(),
        lambda x, p: x.half() + p[:, None, None].half(),
        lambda x, p: (torch.arange(3, 23, 4) * 2.0).expand(2, 3, 4, 5) - x,
        lambda x, p: torch.maximum(x, p[:, None, None].float()) // 2 % 3,
        lambda x, p: x[:, 1:, :, 2:4] + 1,
        lambda x, p: ~(p[:, None, :] == p[:, :, None]) ^ (p[:, None] > 0),
        lambda x, p: x.flatten(1, 2).reshape(2, 6, 2, 5).sigmoid(),
    ],
)
def test_a_term_is_made_again(program):
    x, p = torch.randn(2, 3, 4, 5), torch.tensor([[1, 1, 0, 1, 2], [0, 2, 1, 1, 1]])
    term, at, tensors = read(program, x, p)
    expected = program(x, p)
    found = builder(tensors).term(term, [position.axes for position in at], CPU)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.expand(expected.shape), expected)


def test_dimensions_are_grouped_permuted_and_widened():
    backend = capture(lambda x: x * 1, torch.randn(2, 3, 4))
    (held, tensor) = next(iter(backend.tensors().items()))
    at = axes_of(held)
    b, h, k = (position.axes[0] for position in at)
    q = Axis("q", 5)
    build = builder(backend.tensors())
    assert torch.equal(build.place(tensor, at, [(b, h), (), (k,)]), tensor.reshape(6, 1, 4))
    assert torch.equal(build.place(tensor, at, [(k,), (h,), (b,)]), tensor.permute(2, 1, 0))
    wide = build.place(tensor, at, [(b,), (h,), (q,), (k,)], wide=(2,))
    assert torch.equal(wide, tensor[:, :, None].expand(2, 3, 5, 4))
    grouped = build.place(tensor, at, [(b, q), (h,), (k,)])
    assert torch.equal(grouped, tensor[:, None].expand(2, 5, 3, 4).reshape(10, 3, 4))
    with pytest.raises(ValueError, match="axis that its place does not have"):
        build.place(tensor, at, [(b,), (k,)])


def test_a_slice_is_cut_out():
    backend = capture(lambda x: x[:, 1:3], torch.randn(2, 4))
    reader, value = Reader(), backend.output()
    at = axes_of(value)
    term = reader.expand(reader.read(value, at))
    assert isinstance(term, Read)
    (tensor,) = backend.tensors().values()
    found = builder(backend.tensors()).place(tensor, term.at, [position.axes for position in at])
    assert torch.equal(found, tensor[:, 1:3])


def test_an_index_of_several_axes_counts_through():
    outer, inner = Axis("k", 3), Axis("k", 4)
    term = Index(dtype=torch.float32, position=Position((outer, inner), 1), start=10, step=2)
    found = Builder(operator.not_, call).term(term, [(outer,), (inner,)], CPU)
    assert torch.equal(found, (torch.arange(1.0, 13) * 2 + 10).view(3, 4))


def test_symbolic_numbers_need_someone_who_holds_them():
    symbol = object()
    term = Number(dtype=torch.float32, value=symbol)
    with pytest.raises(ValueError, match="symbolic number"):
        Builder(operator.not_, call).term(term, [], CPU)
    held = Builder(operator.not_, call, {symbol: 0.5}.__getitem__)
    assert held.factor(term, [], CPU) == 0.5
    assert torch.equal(held.term(term, [], CPU), torch.tensor(0.5))


def test_the_scores_can_not_be_made():
    from omnicomp.passes.attention.terms import Scores

    with pytest.raises(ValueError, match="Scores"):
        Builder(operator.not_, call).term(Scores(dtype=torch.float32), [], CPU)
