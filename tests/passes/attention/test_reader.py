"""Tensors read as terms: evaluating the term gives what the program computes, dtype by dtype."""

import math

import pytest
import torch
from traced import capture, evaluate, read

from omnicomp.passes.attention.reader import Reader, axes_of, number_of
from omnicomp.passes.attention.terms import Apply, Index, Number, Read, leaves

PADDING = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
LOWEST = torch.finfo(torch.float32).min


def rows(n=5):
    return torch.arange(n)[:, None]


PROGRAMS = {
    "additive padding": lambda p: (1.0 - p[:, None, None, :].float()) * -1e4,
    "inverted": lambda p: p[:, None, None].to(torch.bool).logical_not().float().masked_fill(p[:, None, None] == 0, -9),
    "causal by index": lambda p: torch.arange(5)[None, :] <= rows(),
    "triangle of ones": lambda p: torch.tril(torch.ones(5, 5, dtype=torch.bool), 1) & p[:, None].bool(),
    "triangle filled": lambda p: torch.triu(torch.full((5, 5), LOWEST), diagonal=1),
    "window": lambda p: ((rows() - torch.arange(5)).abs() < 3) | ~p[:, None].bool(),
    "chunks": lambda p: (rows() // 2) == torch.div(torch.arange(5), 2, rounding_mode="floor"),
    "remainder": lambda p: (rows() + torch.arange(5)) % 3 != 0,
    "distances": lambda p: -(rows() - torch.arange(5)[None]).clamp(min=0, max=3).float() * 0.5,
    "backward": lambda p: torch.arange(9, -1, -2)[None].expand(5, 5),
    "documents": lambda p: p[:, :, None] == p[:, None, :],
    "where": lambda p: torch.where(p[:, None] > 0, 0.0, -math.inf).expand(2, 5, 5),
    "integers": lambda p: (p * 3 - 1).pow(2) // 2,
    "bool arithmetic": lambda p: (p.bool() ^ (p > 0)) | (p.ne(1) & p.ge(0)),
    "half": lambda p: (p.half() * 0.1 + 1000).to(torch.bfloat16).square(),
    "functions": lambda p: torch.tanh(p.float() / 3).exp().log().sigmoid().rsqrt().neg().abs(),
    "reversed": lambda p: 2.0 - 3.0 / (p + 1),
    "alpha": lambda p: torch.add(p.float(), p, alpha=3) - torch.sub(p, 2, alpha=4),
    "indexed by index": lambda p: p[torch.arange(2)[:, None, None, None], torch.arange(5)],
    "indexed with a slice": lambda p: p.float()[:, torch.arange(5)] * 2,
    "assigned": lambda p: torch.zeros(2, 5).index_put((p == 0,), torch.tensor(-7.0)),
    "maximum": lambda p: torch.maximum(torch.minimum(p, rows(2)), p - 1),
    "filled in place": lambda p: torch.zeros(5, 5).masked_fill_(torch.arange(5) > rows(), LOWEST).add_(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_term_is_what_the_program_computes(name):
    term, at, tensors = read(PROGRAMS[name], PADDING)
    expected = PROGRAMS[name](PADDING)
    assert term.dtype == expected.dtype
    assert set(leaf.value for leaf in leaves(term) if isinstance(leaf, Read)) <= set(tensors), "read to the inputs"
    torch.testing.assert_close(evaluate(term, at, tensors), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(-1),
        lambda x: torch.fmod(x, 3),
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
        lambda x: torch.bitwise_and(x, 3),
        lambda x: x[x > 0].new_zeros(2),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: torch.zeros(2, 5).index_put((x == 0,), torch.tensor(-7.0), accumulate=True),
    ],
    ids=["cumsum", "fmod", "truncation", "bits", "data", "data index", "accumulated"],
)
def test_what_is_no_view_index_or_arithmetic_is_a_read(function):
    x = torch.tensor([[1, 0, 3, 1, 4], [0, 0, 7, 1, 2]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = capture(lambda x: function(x) * 1, x)
    value = backend.output()
    term = Reader().expand(Reader().read(value, axes_of(value)))
    opaque = [leaf for leaf in leaves(term) if isinstance(leaf, Read)]
    names = {op.op.name for leaf in opaque if (op := leaf.value) and op.op is not None}
    assert names or all(isinstance(leaf, Number) for leaf in leaves(term))


def test_a_column_of_joined_tensors_is_read_in_the_piece_that_it_lies_in():
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    term, at, tensors = read(lambda x, y: torch.cat([x, y], 1)[:, 4:] * 2, x, y)
    assert torch.equal(evaluate(term, at, tensors), y * 2)
    term, _, _ = read(lambda x, y: torch.cat([x, y], 1)[:, 3:] * 2, x, y)
    assert any(isinstance(leaf, Read) and leaf.value.op is not None for leaf in leaves(term)), "no single piece"


def test_only_what_is_wanted_is_looked_into():
    backend, reader = capture(lambda x: (x * 2 + 1).exp(), torch.randn(3)), Reader()
    value = backend.output()
    term = reader.expand(reader.read(value, axes_of(value)), lambda r: r.value.op is None or r.value.op.name != "mul")
    (held,) = [leaf for leaf in leaves(term) if isinstance(leaf, Read)]
    assert held.value.op.name == "mul"


def test_a_definition_is_made_once():
    backend, reader = capture(lambda x: x * 2, torch.randn(3)), Reader()
    value = backend.output()
    at = axes_of(value)
    first, second = (reader.define(reader.read(value, at)) for _ in range(2))
    assert first is second


def test_a_slice_may_start_at_a_symbolic_number():
    x = torch.randn(7, 3)
    backend, reader = capture(lambda x, y: x[x.size(0) - y.size(0) :] * 2, x, torch.randn(4), dynamic=True), Reader()
    value = backend.output()
    at = axes_of(value)
    term = reader.expand(reader.read(value, at))
    (held,) = [leaf for leaf in leaves(term) if isinstance(leaf, Read)]
    assert isinstance(held.at[0].start, torch.SymInt)
    assert held.at[0].axes == at[0].axes
    assert reader.define(held) is reader.define(held)
    assert reader.expand(held) is held, "an input"


def test_constants_of_the_graph_are_numbers():
    backend = capture(lambda x: x * torch.tensor(0.25), torch.randn(3))
    (op,) = [op for op in backend.trace.ops if op.name == "mul"]
    assert number_of(op.args[1]) == 0.25
    assert number_of(op.args[0]) is None


def test_an_index_keeps_start_and_step():
    term, _, _ = read(lambda x: torch.arange(2, 12, 2, dtype=torch.float32) + x, torch.zeros(5))
    (index,) = [leaf for leaf in leaves(term) if isinstance(leaf, Index)]
    assert (index.start, index.step, index.dtype) == (2, 2, torch.float32)
    assert isinstance(term, Apply)
