"""Repeated regions of Dynamo graphs: bodies are traced once, and what autograd makes of them computes the same."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.autograd_cache import check_cacheable
from torch.fx import GraphModule
from torch.nn import functional as F

import omnicomp
from omnicomp._torch.dynamo.regions import traced_anew
from omnicomp._torch.fx import boxed, copy_module
from omnicomp.analysis.nodes import module_path
from omnicomp.backend import autograd
from omnicomp.builder import regions
from omnicomp.builder.early_regions import EarlyRegions, InlinedPart, call_regions, settle


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "PAYS", 8)
    monkeypatch.setattr(regions, "SMALLEST", 4)
    monkeypatch.setattr(regions, "WORTH", 4)
    torch.compiler.reset()


class Seen:
    """A backend that rewrites graphs, and runs what autograd makes of them: with the calls, and with the bodies."""

    def __init__(self, *, inlined: bool, options: dict[str, Any] | None = None) -> None:
        self.found: list[EarlyRegions | None] = []
        self.parts: list[InlinedPart | None] = []
        self.nodes: list[int] = []
        self._inlined = inlined
        self._options = options or {}

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        found = call_regions(module, always=True, device="cpu", options=self._options)
        self.found.append(found)

        def compiler(part: GraphModule, part_inputs: Sequence[Any]) -> Any:
            self.nodes.append(len(part.graph.nodes))
            inlined = None if found is None else found.inlined(part)
            self.parts.append(inlined)
            if inlined is None or not self._inlined:
                return boxed(copy_module(part))
            settle(inlined.module)
            return boxed(inlined.module)

        with traced_anew():
            return aot_autograd(fw_compiler=compiler)(module if found is None else found.module, inputs)

    @property
    def calls(self) -> dict[str, int]:
        return {where: n for part in self.parts if part for where, n in part.shared.calls.items()}


def same(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> Seen:
    """Compare what a rewritten function returns and writes with what it does in eager."""
    seen = None
    for inlined in (True, False):
        torch.compiler.reset()
        seen = Seen(inlined=inlined)
        mine, theirs = ([x.clone() if torch.is_tensor(x) else x for x in inputs] for _ in range(2))
        with torch.no_grad():
            torch.manual_seed(0)
            expected = function(*theirs)
            torch.manual_seed(0)
            got = torch.compile(function, backend=seen, dynamic=dynamic)(*mine)
        torch.testing.assert_close((got, mine), (expected, theirs), rtol=1e-5, atol=1e-5, equal_nan=True)
        for one, another in zip(got, expected, strict=True):
            assert one.stride() == another.stride()
    assert seen is not None
    return seen


def weights(count: int, size: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, size) / size**0.5 for _ in range(count)]


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, weight)
    return torch.sin(y) * 2 + y.relu()


def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
    for weight in all:
        x = layer(x, weight)
    return (x,)


def test_a_body_is_traced_once() -> None:
    few, many = same(run, torch.randn(4, 8), *weights(4)), same(run, torch.randn(4, 8), *weights(12))
    assert list(few.calls.values()) == [4]
    assert list(many.calls.values()) == [12]
    assert many.nodes[0] - few.nodes[0] <= 8 * 4  # a placeholder, the body, a call and its result for each


def test_places_of_each_occurrence_are_kept() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return torch.sin(y) * 2 + y.relu()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            for each in self.layers:
                x = each(x)
            return (x,)

    seen = same(Model(), torch.randn(4, 8))
    assert seen.calls
    assert seen.parts[0]
    paths = [module_path(node) for node in seen.parts[0].module.graph.nodes]
    for index in range(4):
        assert paths.count(f"layers.{index}.linear") == paths.count("layers.0.linear") > 0


def test_views_are_made_outside() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        for weight in all:
            y = torch.sin(x) * 2 + x
            left, right = y.chunk(2, dim=-1)
            kept += [y.t(), y[1:], x[0], weight.t(), right, x.to(torch.float32)]
            x = torch.cat([right, left], -1) @ weight
        return (*kept, x)

    assert same(run, torch.randn(4, 8), *weights(5)).calls


@pytest.mark.parametrize("how", ["the source is written to", "the result is written to", "it is returned", "a view is"])
def test_what_layers_compute_from_the_same_tensor(how: str) -> None:
    def run(x: torch.Tensor, bias: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: list[torch.Tensor] = []
        for weight in all:
            turned = bias.t().contiguous()
            x = (layer(x, weight) @ turned).sin()
            if how == "the source is written to":
                bias.mul_(1.5)
            elif how == "the result is written to":
                x = x + turned.mul_(2)[:4]
            elif how == "it is returned":
                results.append(turned)
            else:
                results.append(turned[1:])
        return (x, *results)

    inputs = torch.randn(4, 8), torch.randn(8, 8), *weights(5)
    same(run, *inputs)
    with torch.no_grad():
        _, *results = torch.compile(run, backend=Seen(inlined=False))(*inputs)
    assert len({each.untyped_storage().data_ptr() for each in results}) == len(results)


@pytest.mark.parametrize("how", [lambda x: F.dropout(x, 0.5, False), lambda x: x.contiguous(), lambda x: x.mul_(2)])
def test_a_tensor_that_the_first_layer_is_given_twice(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(first: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        x = how(first)
        for weight in all:
            x = torch.sin(F.linear(x, weight)) * 2 + first
        return (x,)

    assert list(same(run, torch.randn(4, 8), *weights(6)).calls.values()) in ([5], [6])


def test_a_graph_with_calls_is_kept() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor]:
        for weight in all:
            x = layer(x, weight)
        return (x.view(2, 16).sum(-1),)

    (found,) = same(run, torch.randn(4, 8), *weights(5)).found
    assert found is not None
    check_cacheable(found.module)  # raises where AOTAutograd's cache would not keep it


def test_writes_stay_where_they_are() -> None:
    def run(cache: torch.Tensor, x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for index, weight in enumerate(all):
            y = layer(x, weight)
            cache[index] = y
            y = torch.cos(torch.sin(y) + cache[index]).exp().sin()
            y.add_(1)
            x = layer(y, weight) + cache[: index + 1].sum()
        return (x, cache[1])

    same(run, torch.zeros(5, 4, 8), torch.randn(4, 8), *weights(5))


def test_results_that_are_written_to_behind_a_call() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            y = layer(x, weight)
            z = y.view(-1)
            x = F.linear(y.cos().sin(), weight)
            z.mul_(2)
            x = x + y
        return (x,)

    same(run, torch.randn(4, 8), *weights(5))


def test_random_numbers_are_drawn_as_before() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            x = F.dropout(layer(x, weight), 0.5, True)
        return (x,)

    seen = same(run, torch.randn(4, 8), *weights(5))
    bodies = [getattr(found.module, name) for found in seen.found if found for name in found.titles]
    body = [node for each in bodies for node in each.graph.nodes]
    assert not any("dropout" in str(node.target) for node in body)


def test_attention_without_dropout_is_in_a_body() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            q = F.linear(x, weight).view(1, 4, 2, 4).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            x = torch.sin(y.transpose(1, 2).reshape(1, 4, 8)) + x
        return (x,)

    seen = same(run, torch.randn(1, 4, 8), *weights(5))
    assert sum(seen.calls.values()) == 5


def test_layers_that_differ_are_no_occurrence() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for index, weight in enumerate(all):
            y = layer(x, weight)
            x = torch.cos(y) * (3 if index == 2 else 2) + y.sin()
        return (x,)

    seen = same(run, torch.randn(4, 8), *weights(6))
    assert sum(seen.calls.values()) <= 5


def test_what_only_some_layers_return() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept: list[torch.Tensor] = []
        for index, weight in enumerate(all):
            middle = torch.sin(x) * 2
            x = (middle + x).cos() @ weight
            kept += [middle] if index == 2 else []
        return (*kept, x)

    assert same(run, torch.randn(4, 8), *weights(5)).calls


def test_dynamic_sizes() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            rows = x.shape[0]
            y = layer(x, weight).view(rows, 2, -1).transpose(0, 1).reshape(rows, -1)
            x = (y[: rows - 1].sum(0, keepdim=True) / rows + y) @ weight
        return (x,)

    assert same(run, torch.randn(6, 8), *weights(5), dynamic=True).calls


def test_autocast_is_left_alone() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for index, weight in enumerate(all):
            with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
                x = layer(x.float(), weight)
        return (x,)

    torch.compiler.reset()
    seen = Seen(inlined=True)
    with torch.no_grad():
        torch.compile(run, backend=seen)(torch.randn(4, 8), *weights(6))
    assert seen.found == [None]


def test_another_graph_of_the_same_names_is_traced_by_itself() -> None:
    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for weight in all:
            x = layer(x, weight)
        torch._dynamo.graph_break()
        for weight in all:
            x = torch.cos(F.linear(x, weight)).exp().sin() * 3
        return (x,)

    seen = same(run, torch.randn(4, 8), *weights(5))
    assert len([part for part in seen.parts if part]) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"cpp_wrapper": True},
        {"max_autotune": True},
        {"freezing": True},
        {"pre_grad_custom_pass": print},
        {"joint_custom_post_pass": print},
    ],
)
def test_options_that_leave_a_graph_whole(options: dict[str, Any]) -> None:
    seen = Seen(inlined=True, options=options)
    with torch.no_grad():
        torch.compile(run, backend=seen)(torch.randn(4, 8), *weights(5))
    assert seen.found == [None]


STEPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, w: F.linear(x, w),
    lambda x, w: x @ w.t(),
    lambda x, w: torch.sin(x) + x,
    lambda x, w: x.t().contiguous().t(),
    lambda x, w: torch.cat(x.chunk(2, -1)[::-1], -1),
    lambda x, w: x.clone().mul_(0.5).tanh_(),
    lambda x, w: torch.stack([x, w[:4]]).mean(0),
    lambda x, w: F.layer_norm(x, [8]),
    lambda x, w: x.softmax(-1) @ w,
    lambda x, w: torch.where(x > 0, x, w[:4]),
    lambda x, w: torch.var_mean(x, -1, keepdim=True)[1] + x,
    lambda x, w: x[:, torch.arange(7, -1, -1)],
    lambda x, w: F.dropout(x, 0.3, True),
    lambda x, w: x.add_(1),
    lambda x, w: x.reshape(2, 16).unbind(0)[1].view(2, 8).repeat(2, 1),
    lambda x, w: x.topk(8, -1).values,
    lambda x, w: x.to(torch.float32).expand(4, 8),
    lambda x, w: F.linear(x, w.t().contiguous()),
    lambda x, w: x @ w.tril().softmax(-1),
    lambda x, w: x @ w.mul_(0.9),
]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 24))])
def test_random_programs(seed: int) -> None:
    choice = random.Random(seed)
    steps = choice.choices(STEPS, k=choice.randint(3, 10))
    odd, kept = choice.randrange(6), choice.randrange(len(steps))
    exposed = choice.random() < 0.5
    shared = [choice.random() < 0.4 for _ in steps]  # whether all layers take the first one's weight

    def run(x: torch.Tensor, *all: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: list[torch.Tensor] = []
        for index, weight in enumerate(all):
            for number, step in enumerate(steps):
                x = step(x, all[0] if shared[number] else weight)
                if number == kept and (exposed or index == odd):
                    results.append(x[1:])
            if index == odd:
                x = x.cos()
        return (*results, x)

    same(run, torch.randn(4, 8), *weights(6))


def test_a_compiled_model_says_what_is_called() -> None:
    inputs = torch.randn(4, 8), *weights(5)
    with torch.no_grad():
        result = torch.compile(run, backend="omni")(*inputs)
    torch.testing.assert_close(result, run(*inputs))
    (row,) = omnicomp.audit().graphs[-1].subgraphs
    assert list(row.repeats.values()) == [5]
    assert row.ops["aten.mm.default"] == 5


def test_a_graph_that_can_not_be_traced_with_calls_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no calls")

    monkeypatch.setattr(autograd, "call_regions", fails)

    inputs = torch.randn(4, 8), *weights(4)
    with torch.no_grad():
        result = torch.compile(run, backend="omni")(*inputs)
    torch.testing.assert_close(result, run(*inputs))
    (row,) = omnicomp.audit().graphs[-1].subgraphs
    assert row.left_whole is not None
    assert "no calls" in row.left_whole.sentence
