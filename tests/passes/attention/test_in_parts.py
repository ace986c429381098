"""Scores, weights and masks that are written to in parts."""

import operator

import pytest
import torch
from fusion import Backend, compiled, differentiate, inputs
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from omnicomp.passes.attention.in_parts import _reaches, _Span
from omnicomp.timeline import Rewrite

INF = float("inf")


def scores(q, k):
    return q @ k.mT * 0.25


def last_keys_filled(q, k, v, m):
    s = scores(q, k)
    s[:, :, :, 5:] = -INF
    return s.softmax(-1) @ v


def from_the_end(q, k, v, m):
    s = scores(q, k)
    s[..., -3:] = -1e9
    return s.softmax(-1) @ v


def one_key_for_some_queries(q, k, v, m):
    s = scores(q, k)
    s[..., 1:4, 0] = -INF
    return s.softmax(-1) @ v


def weights_zeroed(q, k, v, m):
    w = scores(q, k).softmax(-1)
    w[..., 6:] = 0
    return w @ v


def bias_without_the_class_token(q, k, v, m):
    s = scores(q, k)
    s[:, :, 1:, 1:] += m[:, :, 1:, 1:]
    return s.softmax(-1) @ v


def less_and_more(q, k, v, m):
    s = scores(q, k)
    s[..., :2] -= 0.5
    s[..., 3:] = s[..., 3:] + m[..., 3:]
    s[..., 0] = -INF
    return s.softmax(-1) @ v


def relative_positions(q, k, v, m):
    s, (rows, columns) = scores(q, k), (m[:, :, 2:, :3], m[:, :, 2:, 3:5])
    s[:, :, 2:, 2:] = (
        s[:, :, 2:, 2:].view(2, 4, 2, 2, 3, 2)
        + rows.view(2, 1, 2, 2, 3).unsqueeze(-1)
        + columns.view(2, 1, 2, 2, 2).unsqueeze(-2)
    ).view(2, -1, 4, 6)
    return s.softmax(-1) @ v


def last_keys_hidden(q, k, v, m):
    mask = torch.zeros(6, 8, dtype=q.dtype)
    mask[:, 5:] = -INF
    return (scores(q, k) + mask).softmax(-1) @ v


def a_square_of_a_mask(q, k, v, m):
    mask = q.new_full((6, 8), -INF)
    mask[:, :2] = 0
    mask[2:, 2:5] = 0
    return (scores(q, k) + mask).softmax(-1) @ v


def bools(q, k, v, m):
    seen = torch.ones(6, 8, dtype=torch.bool)
    seen[:3, 4:] = False
    return scores(q, k).masked_fill(~seen, -INF).softmax(-1) @ v


def integers(q, k, v, m):
    seen = torch.zeros(6, 8, dtype=torch.int64)
    seen[..., :3] = 1
    seen[0, 4] = 1
    return scores(q, k).masked_fill(seen == 0, -INF).softmax(-1) @ v


MASKS = [last_keys_hidden, a_square_of_a_mask, bools, integers]
FUSED = [
    last_keys_filled,
    from_the_end,
    one_key_for_some_queries,
    weights_zeroed,
    bias_without_the_class_token,
    less_and_more,
    relative_positions,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [*FUSED, *MASKS])
def test_a_part_is_read_as_a_fill_or_a_bias_of_all(function, dtype):
    arguments, backend = [x.to(dtype) for x in inputs()], Backend()
    got, exact = compiled(function, backend)(*arguments), function(*(x.double() for x in arguments))
    error, eager = ((x - exact).abs().max().item() for x in (got, function(*arguments)))
    assert error <= 2 * eager + 1e-6
    assert "unknown" not in backend.rewrite().detail
    (graph,) = backend.graphs
    writes = graph.graph.find_nodes(op="call_function", target=operator.setitem)
    assert bool(writes) is (function in MASKS)  # a mask stays what the kernel reads


@pytest.mark.parametrize("function", [last_keys_filled, bias_without_the_class_token, relative_positions])
def test_gradients(function):
    *operands, mask = inputs()
    backend = differentiate(lambda q, k, v: function(q, k, v, mask), *operands)
    assert backend.attentions()


@pytest.mark.parametrize("function", [last_keys_filled, bias_without_the_class_token, less_and_more])
def test_a_symbolic_size_of_what_is_whole(function):
    backend = Backend()
    program = compiled(function, backend)
    for batch in (2, 3, 5):
        arguments = inputs(batch=batch)
        for each in arguments:
            torch._dynamo.mark_dynamic(each, 0)
        torch.testing.assert_close(program(*arguments), function(*arguments))
    backend.rewrite()


def first_keys_filled(q, k, v, m):
    s = scores(q, k)
    s[..., :3] = -1e9
    return s.softmax(-1) @ v


def some_keys_lowered(q, k, v, m):
    w = scores(q, k)
    w[:, :, 1:, 0:2] -= m[:, :, 1:, 0:2]
    w[..., 4:9] = -INF
    return w.softmax(-1) @ v


def first_key_filled(q, k, v, m):
    s = scores(q, k)
    s[..., 2:, 0] = -INF
    return s.softmax(-1) @ v


def last_keys_lowered(q, k, v, m):
    s = scores(q, k)
    s[..., 5:] += m[..., 5:]
    return s.softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (last_keys_filled, True),
        (bias_without_the_class_token, True),
        (first_keys_filled, True),
        (first_key_filled, True),
        (some_keys_lowered, True),
        (weights_zeroed, True),
        (last_keys_lowered, True),
        (from_the_end, False),
    ],
)
def test_a_symbolic_size_that_is_cut(function, fused):
    backend = Backend()
    program = compiled(function, backend)
    for length in (8, 12, 7, 4):
        arguments = inputs(queries=length, keys=length)
        for each in arguments:
            torch._dynamo.maybe_mark_dynamic(each, 2)
        torch._dynamo.maybe_mark_dynamic(arguments[-1], 3)
        torch.testing.assert_close(program(*arguments), function(*arguments), equal_nan=True)
    assert bool(backend.of(Rewrite)) is fused
    assert len(backend.graphs) <= 3  # Dynamo itself makes others for lengths in which a part is cut off, or not there


def test_a_part_is_known_to_be_there_or_not():
    shapes = ShapeEnv()
    size = shapes.create_symintnode(shapes.create_symbol(8, ConstantSource("length"), DimDynamic.DYNAMIC), hint=8)
    assert _reaches(size, _Span(1, None, None))  # a symbolic size is two or more
    assert _reaches(size, _Span(0, 2, None))
    assert not _reaches(size, _Span(5, None, None))
    assert not _reaches(size, _Span(0, 5, None))
    assert _reaches(8, _Span(5, 8, 8))
    assert not shapes.guards


def a_factor_of_a_part(q, k, v, m):
    s = scores(q, k)
    s[..., 5:] *= 0.5
    return s.softmax(-1) @ v


def seen_through_a_view(q, k, v, m):
    s = scores(q, k)
    view = s.flatten(0, 1)
    s[..., 5:] = -INF
    return view.softmax(-1).view_as(s) @ v


def every_other_key(q, k, v, m):
    s = scores(q, k)
    s[..., ::2] = -INF
    return s.softmax(-1) @ v


def a_part_that_is_used_again(q, k, v, m):
    s = scores(q, k)
    part = s[..., 1:] + m[..., 1:]
    s[..., 1:] = part
    return s.softmax(-1) @ v, part


def a_smaller_part(q, k, v, m):
    s = scores(q, k)
    s[..., 1:] = s[..., 1:2] + m[..., 1:2]
    return s.softmax(-1) @ v


def another_part(q, k, v, m):
    s = scores(q, k)
    s[..., 1:] = s[..., :-1] + m[..., 1:]
    return s.softmax(-1) @ v


def a_bias_that_changes_in_between(q, k, v, m):
    s, b = scores(q, k), m[..., 1:] * 2
    part = s[..., 1:] + b
    b.zero_()
    s[..., 1:] = part
    return s.softmax(-1) @ v


def without_gradients(q, k, v, m):
    s = scores(q, k)
    with torch.no_grad():
        s[..., 1:] += m[..., 1:]
    return s.softmax(-1) @ v


def of_the_program(q, k, v, m):
    s = m.expand(2, 4, 6, 8).clone()
    s[..., 5:] = -INF
    return s.softmax(-1) @ v


def a_dimension_more(q, k, v, m):
    s = scores(q, k)
    s[None, ..., 5:] = -INF
    return s.softmax(-1) @ v


def scores_returned(q, k, v, m):
    s = scores(q, k)
    s[..., 5:] += 1
    return s.softmax(-1) @ v, s


@pytest.mark.parametrize(
    "function",
    [
        a_factor_of_a_part,
        seen_through_a_view,
        every_other_key,
        a_part_that_is_used_again,
        a_smaller_part,
        another_part,
        a_bias_that_changes_in_between,
        without_gradients,
        of_the_program,
        a_dimension_more,
        scores_returned,
    ],
)
def test_what_is_not_fused_is_left_as_it_was(function):
    arguments, backend = inputs(), Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    assert backend.of(Rewrite) == []
    (graph,) = backend.graphs
    assert len(graph.graph.find_nodes(op="call_function", target=operator.setitem)) == 1


def test_another_change_of_a_part_is_told():
    backend = Backend()
    compiled(a_factor_of_a_part, backend)(*inputs())
    assert (
        backend.miss().sentence
        == "a part of the scores is written to, otherwise than by a number or a sum at fixed places"
    )
    assert "torch.where" in backend.miss().lever


def test_another_change_of_a_part_of_the_weights_is_told():
    def function(q, k, v):
        w = scores(q, k).softmax(-1)
        w[..., 5:] *= 0.5
        return w @ v

    backend = Backend()
    compiled(function, backend)(*inputs()[:3])
    assert backend.miss().sentence == "a part of the weights is written to, otherwise than by zero at fixed places"


def test_several_parts_are_left_in_their_order():
    def function(q, k, v, m):
        s = scores(q, k)
        s[..., :2] += m[..., :2]
        s[..., 5:] = -INF
        s[..., 1:4] *= 0.5
        return s.softmax(-1) @ v, s.shape[-1]

    arguments, backend = inputs(), Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    assert backend.of(Rewrite) == []
    (graph,) = backend.graphs
    writes = graph.graph.find_nodes(op="call_function", target=operator.setitem)
    assert [write.args[1] for write in writes] == [(..., slice(None, 2)), (..., slice(5, None)), (..., slice(1, 4))]
    assert len({write.args[0] for write in writes}) == 1


@pytest.mark.parametrize("value", [-1e9, -70000.0])
def test_a_number_beyond_the_dtype_is_infinite(value):
    def function(q, k, v):
        s = scores(q, k)
        s[..., 5:] = value
        return s.softmax(-1) @ v

    arguments, backend = [x.half() for x in inputs()[:3]], Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments), rtol=2e-3, atol=2e-3)
    assert backend.of(Rewrite) or value == -70000.0


def test_an_output_that_is_written_to_is_fused_all_the_same():
    def function(q, k, v, m):
        s = scores(q, k)
        s[..., 1:, 1:] += m[..., 1:, 1:]
        out = s.softmax(-1) @ v
        out[..., 1:, :] += q[..., 1:, :]
        out[..., 0] = 0
        return out.transpose(1, 2).flatten(2)

    arguments, backend = inputs(), Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    backend.rewrite()


@pytest.mark.parametrize("view", [lambda s: s, lambda s: torch.einsum("bhkq->bhkq", s)], ids=["itself", "a view"])
def test_an_input_that_is_written_to_stays_written(view):
    def function(s, v):
        seen = view(s)
        seen[..., 5:] = -INF
        return seen.softmax(-1) @ v

    given, value = torch.randn(2, 4, 6, 8), inputs()[2]
    ours = given.clone()
    torch.testing.assert_close(compiled(function, Backend())(ours, value), function(given, value))
    torch.testing.assert_close(ours, given)


def test_a_long_program_behind_a_part():
    def function(q, k, v, m):
        rest = m.clone()
        rest[..., 0] = 0
        out = scores(q, k).softmax(-1) @ v
        for _ in range(700):
            rest = rest + 1
        return out, rest

    arguments, backend = inputs(), Backend()
    torch.testing.assert_close(compiled(function, backend)(*arguments), function(*arguments))
    backend.rewrite()
