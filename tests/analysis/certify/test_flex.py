"""FlexAttention against attention that is written out: the graphs that it calls, right ones and wrong ones."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from omnicomp._torch.autograd.flex import FLEX, fast_tanh
from omnicomp._torch.fx import fake_mode
from omnicomp.analysis.certify import BLOCKS, FILL_HIDES, Assumption, check
from omnicomp.analysis.nodes import fake_value

LENGTH, HEADS, SIZE, REACH = 640, 6, 32, 200
CLAIMS = [Assumption(FILL_HIDES), Assumption(BLOCKS)]
Predicate = Callable[..., Any]


def inputs() -> list[torch.Tensor]:
    """Fake queries, keys, values, and a padding mask of whole numbers."""
    mode = fake_mode()
    made = [torch.empty(2, HEADS, LENGTH, SIZE, dtype=torch.bfloat16) for _ in range(3)]
    return [mode.from_tensor(each) for each in (*made, torch.empty(2, LENGTH, dtype=torch.int64))]


def written(seen: Predicate, score: Callable[[Any, Any], Any] = lambda scores, at: scores) -> GraphModule:
    """Attention that is written out, with a mask of the lowest number."""

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        at = torch.arange(LENGTH)
        scores = score(q @ k.transpose(-1, -2) * 0.25, at)
        kept = seen(at[:, None], at[None, :]) & mask.to(torch.bool)[:, None, None, :]
        scores = torch.where(kept, scores, torch.finfo(torch.bfloat16).min)
        return torch.softmax(scores, -1).to(v.dtype) @ v

    given = inputs()
    with torch.no_grad(), given[0].fake_mode:  # type: ignore[attr-defined]
        return make_fx(attention, pre_dispatch=True)(*given)


def flexible(
    seen: Predicate,
    score: Callable[[Any, Any, Any], Any] = lambda s, h, k: s,
    *,
    scale: float = 0.25,
    mean: bool = True,
) -> GraphModule:
    """FlexAttention, and an average over all keys in rows that see none."""
    given, graph = inputs(), Graph()
    nodes = [graph.placeholder(name) for name in ("q", "k", "v", "mask")]
    for node, value in zip(nodes, given, strict=True):
        node.meta["example_value"] = value
    mode: Any = given[0].fake_mode  # type: ignore[attr-defined]
    with mode:
        number, element = torch.zeros((), dtype=torch.int32), torch.zeros(())
    keep = symbolic_trace(lambda b, h, q, k, mask: seen(q, k) & mask[b, k].to(torch.bool))
    body = symbolic_trace(lambda s, b, h, q, k: score(s, h, k))
    for module, values in ((keep, [*[number] * 4, given[3]]), (body, [element, *[number] * 4])):
        for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
            node.meta["example_value"] = value
        for node in module.graph.nodes:
            if node.op.startswith("call_"):
                node.meta["example_value"] = _scalar(node, mode)
    root = {"keep": keep, "score": body}
    lists = graph.call_function(torch.ops.aten.zeros.default, ([2, 1, 5],))  # which nobody compares
    with mode:
        lists.meta["example_value"] = torch.zeros(2, 1, 5)
    mask = (LENGTH, LENGTH, *[lists] * 8, 128, 128, graph.get_attr("keep"))
    called = graph.call_function(FLEX, (*nodes[:3], graph.get_attr("score"), mask, scale, {}, (), (nodes[3],)))
    called.meta["example_value"] = (given[0], given[0][..., 0], given[0][..., 0])
    out = graph.call_function(operator.getitem, (called, 0))
    out.meta["example_value"] = given[0]
    if mean:

        def made(function: Any, *args: Any, **kwargs: Any) -> Any:
            node = graph.call_function(function, args, kwargs)
            with mode:
                node.meta["example_value"] = function(*map_arg(args, fake_value), **kwargs)
            return node

        at = made(torch.arange, LENGTH)
        rows, keys = made(torch.unsqueeze, at, 1), made(torch.unsqueeze, at, 0)
        padding = made(torch.unsqueeze, made(torch.unsqueeze, made(torch.ne, nodes[3], 0), 1), 1)
        shown = made(torch.logical_and, _seen(made, seen, rows, keys), padding)
        empty = made(torch.logical_not, made(torch.any, shown, dim=-1, keepdim=True))
        out = made(torch.where, empty, made(torch.mean, nodes[2], dim=-2, keepdim=True), out)
    graph.output((out,))
    return GraphModule(root, graph)


def _seen(made: Any, seen: Predicate, rows: Any, keys: Any) -> Any:
    """The predicate on nodes."""
    traced = symbolic_trace(lambda q, k: seen(q, k))
    known = dict(zip(traced.graph.find_nodes(op="placeholder"), (rows, keys), strict=True))
    for node in traced.graph.nodes:
        if node.op.startswith("call_"):
            args = map_arg(node.args, known.__getitem__)
            function = getattr(torch, node.target) if node.op == "call_method" else node.target
            known[node] = made(function, *args)
        elif node.op == "output":
            return known[node.args[0]]
    raise AssertionError


def _scalar(node: Any, mode: Any) -> torch.Tensor:
    """One element, of the kind that an operator makes of such."""
    args = map_arg(node.args, fake_value)
    name = getattr(node.target, "__name__", str(node.target))
    with mode:
        if name == "getitem":
            return torch.zeros((), dtype=args[0].dtype)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **node.kwargs)
        return node.target(*args, **node.kwargs)


def window(reach: int) -> Predicate:
    """Keys up to the query, and not far from it."""
    return lambda q, k: (k <= q) & (k > q - reach)


def around(reach: int) -> Predicate:
    """Keys on both sides."""
    return lambda q, k: (q - k).abs() <= reach


def capped(scores: Any, _: Any) -> Any:
    """A softcap."""
    return torch.tanh(scores / 50.0) * 50.0


def sloped(scores: Any, at: Any) -> Any:
    """A bias of the distance, whose slopes are numbered from one."""
    return scores + (torch.arange(1, HEADS + 1).float() * 0.125).view(HEADS, 1, 1) * at.float()


CASES: dict[str, tuple[Callable[[], GraphModule], Callable[[], GraphModule], str]] = {
    "window": (lambda: written(window(REACH)), lambda: flexible(window(REACH)), "proved"),
    "window of one more": (lambda: written(window(REACH)), lambda: flexible(window(REACH + 1)), "refuted"),
    "no window": (lambda: written(window(REACH)), lambda: flexible(lambda q, k: k <= q), "refuted"),
    "both sides": (lambda: written(around(64)), lambda: flexible(around(64)), "proved"),
    "both sides, one less": (lambda: written(around(64)), lambda: flexible(around(63)), "refuted"),
    "another scale": (lambda: written(window(REACH)), lambda: flexible(window(REACH), scale=0.26), "refuted"),
    "zeros in empty rows": (lambda: written(window(REACH)), lambda: flexible(window(REACH), mean=False), "refuted"),
    "softcap": (
        lambda: written(window(REACH), capped),
        lambda: flexible(window(REACH), lambda s, h, k: fast_tanh()(s * 0.02) * 50.0),
        "proved",
    ),
    "softcap of another cap": (
        lambda: written(window(REACH), capped),
        lambda: flexible(window(REACH), lambda s, h, k: fast_tanh()(s * 0.02) * 49.0),
        "refuted",
    ),
    "bias": (
        lambda: written(window(REACH), sloped),
        lambda: flexible(window(REACH), lambda s, h, k: s + (h + 1).float() * 0.125 * k.float()),
        "proved",
    ),
    "bias of the next head": (
        lambda: written(window(REACH), sloped),
        lambda: flexible(window(REACH), lambda s, h, k: s + (h + 2).float() * 0.125 * k.float()),
        "refuted",
    ),
    "no bias": (lambda: written(window(REACH), sloped), lambda: flexible(window(REACH)), "refuted"),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_that_flexattention_calls_are_compared_for_all_sizes(name: str) -> None:
    """Right ones are proved, and wrong ones refuted at sizes that the program may have."""
    before, after, verdict = CASES[name]
    found = check(before(), after(), assumptions=CLAIMS)
    assert found.verdict == verdict, (found.reason, found.methods)
