"""A part that is cut frees inputs, shares memory and lays out its outputs as a whole one does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

import omnicomp
from omnicomp.builder import eager_artefact as fallbacks
from omnicomp.builder.partition import extract, stitching

SEEN: list[StorageWeakRef] = []
ALIVE: list[list[bool]] = []


@torch.library.custom_op("omnicomp_test::watch", mutates_args=())
def watch(x: Tensor) -> Tensor:
    """Note which of the inputs seen before are still there."""
    ALIVE.append([not seen.expired() for seen in SEEN])
    SEEN.append(StorageWeakRef(x.untyped_storage()))
    return x + 1


@watch.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    SEEN.clear()
    ALIVE.clear()
    yield
    SEEN.clear()
    ALIVE.clear()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"summary": False, "on_error": "raise", **options})


EAGER = {"lowerings": {"omnicomp_test.watch": "eager", "aten.erfinv": "eager"}}


def lowerings() -> list[str | None]:
    return [row.ran for row in omnicomp.audit().subgraphs]


@pytest.mark.inductor
def test_what_a_piece_used_last_is_freed_before_the_next_one_runs() -> None:
    def function(x: Tensor) -> Tensor:
        first = watch(x.sin() * 2)
        return watch(first.cos() * 2) + 1

    call = compiled(function, **EAGER)
    with torch.no_grad():
        for _ in range(2):
            SEEN.clear()
            ALIVE.clear()
            torch.testing.assert_close(call(torch.ones(16)), (torch.ones(16).sin() * 2 + 1).cos() * 2 + 2)
            assert ALIVE == [[], [False]]
    assert lowerings() == ["inductor", "eager", "inductor", "eager", "inductor"]


@pytest.mark.inductor
def test_what_a_piece_is_through_with_is_freed_inside_it() -> None:
    def function(x: Tensor) -> Tensor:
        return watch(watch(x.sin() * 2)) + 1  # one piece with two operators

    with torch.no_grad():
        compiled(function, **EAGER)(torch.ones(16))
    assert ALIVE == [[], [False]]
    assert lowerings() == ["inductor", "eager", "inductor"]


@pytest.mark.inductor
@pytest.mark.parametrize("held", [0, 2**20])
def test_an_inductor_piece_frees_what_is_too_large_to_be_held_for_a_retreat(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(fallbacks, "HELD_BYTES", held)

    def function(x: Tensor) -> Tensor:
        middle = torch.erfinv(x.sin() * 0.5)
        return watch(watch(middle).cos() * 2) + 1

    options = {"lowerings": {"aten.erfinv": "eager"}, "on_error": "retreat"}
    with torch.no_grad():
        compiled(function, **options)(torch.ones(16))
    assert ALIVE == [[], [held > 0]], "the result of erfinv goes into a piece that reads it once"
    assert lowerings()[:3] == ["inductor", "eager", "inductor"]


def programs() -> dict[str, Callable[[Tensor], Any]]:
    def views(x: Tensor) -> Any:
        out = torch.erfinv(x.tanh() * 0.5)
        return out, out.t(), out[0], out.view(-1)

    def inputs(x: Tensor) -> Any:
        return x, x.t(), torch.erfinv(x.tanh() * 0.5) + 1

    def written(x: Tensor) -> Any:
        x.add_(1)
        return torch.erfinv(x.tanh() * 0.5).t().contiguous().t() + 1, x.view(-1)

    def twice(x: Tensor) -> Any:
        out = torch.erfinv(x.tanh() * 0.5) * 2
        return out, out, out.expand(2, *out.shape)

    def strided(x: Tensor) -> Any:
        return torch.erfinv(x.t().tanh() * 0.5), torch.erfinv(x.tanh() * 0.5)[:, ::2] * 2

    return {function.__name__: function for function in (views, inputs, written, twice, strided)}


@pytest.mark.inductor
@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("training", [False, True])
def test_outputs_alias_and_are_laid_out_as_in_eager(name: str, training: bool) -> None:
    function = programs()[name]

    def run(call: Callable[..., Any]) -> tuple[list[Tensor], Tensor, Tensor | None]:
        torch.manual_seed(0)
        leaf = torch.randn(4, 6).requires_grad_(training)
        x = leaf * 1
        outputs = list(call(x))
        if training:
            sum(out.square().sum() for out in outputs).backward()  # type: ignore[union-attr]
        return outputs, x, leaf.grad

    expected, found = run(function), run(compiled(function, lowerings={"aten.erfinv": "eager"}))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1:], expected[1:])
    assert [out.stride() for out in found[0]] == [out.stride() for out in expected[0]]
    assert shared(*found[:2]) == shared(*expected[:2])
    assert "eager" in lowerings()


def shared(outputs: list[Tensor], x: Tensor) -> list[list[bool]]:
    """Which of the outputs and the input share memory."""
    storages = [value.untyped_storage().data_ptr() for value in (*outputs, x)]
    return [[first == second for second in storages] for first in storages]


def _graph() -> tuple[GraphModule, list[Any]]:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.add, (first, y))
    graph.output((second, None, y, 3))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    return GraphModule(torch.nn.Module(), graph), [first, second]


def test_a_call_is_exchanged_once_it_returned_and_not_before() -> None:
    module, nodes = _graph()
    pieces = [extract(module, [node]) for node in nodes]
    log: list[str] = []

    def call(name: str, function: Callable[..., Tensor], fails: bool = False) -> Callable[[list[Any]], list[Tensor]]:
        def run(inputs: list[Any]) -> list[Tensor]:
            log.append(name)
            if fails and log.count(name) == 1:
                raise ValueError(name)
            values = tuple(inputs)
            inputs.clear()
            return [function(*values)]

        return run

    firsts = [call("first sin", torch.sin, fails=True), call("first add", torch.add)]
    laters = [call("sin", torch.sin), call("add", torch.add)]
    stitched: Any = stitching(module, pieces).bind(firsts, [lambda each=each: each for each in laters])
    x, y = torch.ones(3), torch.full((3,), 2.0)
    with pytest.raises(ValueError, match="first sin"):
        stitched([x, y])
    for _ in range(2):
        inputs = [x, y]
        out = stitched(inputs)
        torch.testing.assert_close(out[0], x.sin() + y)
        assert (out[1], out[2] is y, out[3], inputs) == (None, True, 3, [])
    assert log == ["first sin", "first sin", "first add", "sin", "add"]
    assert stitched._boxed_call


def test_what_nobody_reads_is_freed_at_once() -> None:
    graph = Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("unused")
    node = graph.call_function(torch.sin, (x,))
    graph.output((node,))
    for each in graph.nodes:
        each.meta["val"] = torch.ones(3)
    module = GraphModule(torch.nn.Module(), graph)
    unused = torch.ones(3)
    reference = StorageWeakRef(unused.untyped_storage())
    inputs: list[Any] = [torch.ones(3), unused]
    del unused

    def sin(values: list[Any]) -> list[Tensor]:
        assert reference.expired()
        return [values.pop().sin()]

    (result,) = stitching(module, [extract(module, [node])]).bind([sin])(inputs)
    torch.testing.assert_close(result, torch.ones(3).sin())
