"""TVM: a virtual machine a thread, strided inputs, NaN, indices, weights, sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import VIEWS, network, results_stay, threads_share
from recorded import ran, retreats
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.lowerings.engines.base import EngineExecutable
from omnicomp.timeline import Placement

pytestmark = pytest.mark.engine

tvm = pytest.importorskip("tvm")


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["tvm", "eager"], **options})


def declined() -> str:
    events = omnicomp.timeline.events()
    chains = [node.chain for event in events if isinstance(event, Placement) for node in event.declined]
    return " ".join(reason.sentence for chain in chains for reason in chain)


def test_a_network_runs_whole() -> None:
    model, x = network(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=1e-4, atol=1e-5)
    assert ran() == {"tvm"}
    assert not retreats()


@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("empty", "negated")])
def test_any_view_is_taken(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x * 2) + x.sum()

    x = VIEWS[name]()
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert ran() == {"tvm"}
    assert not retreats()


def test_what_tvm_itself_refuses_is_made_plain() -> None:
    """Its reader of DLPack takes neither strides nor an address between the boundaries of vectors."""
    for x in (VIEWS["transposed"](), VIEWS["not aligned"]()):
        with pytest.raises(RuntimeError, match=r"contiguous|aligned"):
            tvm.runtime.from_dlpack(x)


def test_tensors_without_elements_are_refused() -> None:
    x = torch.randn(0, 6)
    torch.testing.assert_close(compiled(lambda x: x * 2 + 1)(x), x * 2 + 1)
    assert "it takes no tensors without elements" in declined()
    assert not retreats()


def test_each_thread_has_a_machine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that threads share crashes the process."""
    engine = resolve_engine("tvm")
    made: list[EngineExecutable] = []
    build = type(engine).compile

    def noted(self: Any, subgraph: Any) -> EngineExecutable:
        made.append(build(self, subgraph))
        return made[-1]

    monkeypatch.setattr(type(engine), "compile", noted)
    threads_share(compiled)
    assert not retreats()
    (executable,) = made
    assert executable.session() is not executable.session()


def test_results_are_the_callers() -> None:
    results_stay(compiled, distinct=False)


def test_a_weight_that_changes_in_place_is_never_stale() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    call = compiled(model)
    with torch.no_grad():
        for factor in (1, 3, -2, 0.5, 2, 7):
            model.weight.mul_(factor)
            torch.testing.assert_close(call(x), model(x))
        model.weight.data.zero_()
        torch.testing.assert_close(call(x), model(x))


NOT_A_NUMBER: dict[str, Callable[[Tensor], Any]] = {
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "amax": lambda x: x.amax(-1),
    "min": lambda x: x.min(1),
    "argmax": lambda x: x.argmax(1),
    "sort": lambda x: x.sort(dim=-1, stable=True),
    "sort of the largest": lambda x: x.sort(dim=-1, descending=True, stable=True),
    "sign": torch.sign,
    "isnan": torch.isnan,
    "equal to itself": lambda x: x == x.clone(),
    "max pool": lambda x: F.max_pool2d(x[None, None], 2),
}


@pytest.mark.parametrize("name", NOT_A_NUMBER)
def test_nan_is_where_torch_has_it(name: str) -> None:
    x = torch.randn(6, 8)
    x[1, 2] = x[1, 5] = x[4, 0] = torch.nan
    x[2, 3], x[2, 4], x[1, 1] = torch.inf, -torch.inf, torch.inf
    function = NOT_A_NUMBER[name]
    torch.testing.assert_close(compiled(lambda x: function(x))(x), function(x), equal_nan=True)
    assert "tvm" in ran()
    assert not retreats()


def test_an_index_out_of_range_reads_nothing_outside() -> None:
    """Torch raises; code of TVM's would read, or write, memory of others."""
    weight, index = torch.randn(5, 4), torch.tensor([4, 5, 10**9, -(10**9)])
    result = compiled(lambda w, i: F.embedding(i, w) * 2, verify="off")(weight, index)
    assert torch.equal(result, weight[[4, 4, 4, 0]] * 2)


def test_integers_are_divided_by_known_numbers_alone() -> None:
    """Division of an integer by zero ends the process, where torch raises."""
    x, y = torch.arange(8), torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])
    torch.testing.assert_close(compiled(lambda x: x % 3 + 1)(x), x % 3 + 1)
    assert ran() == {"tvm"}
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda x, y: x % y)(x, y)
    assert "it divides integers by known numbers alone" in declined()


def test_random_operators_and_training_are_refused() -> None:
    x = torch.randn(64, requires_grad=True)
    call = compiled(lambda x: torch.rand_like(x) + x * 2)
    torch.manual_seed(3)
    expected = torch.rand_like(x) + x * 2
    torch.manual_seed(3)
    actual = call(x)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert "it is for inference alone" in declined()
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(call(x), expected)
    assert "it has no form of the operator" in declined()


def test_each_class_of_sizes_has_its_program() -> None:
    call = compiled(lambda x: torch.softmax(x, -1) @ x.t())
    for rows in (3, 5, 9, 3, 1):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(call(x), torch.softmax(x, -1) @ x.t())
    assert not retreats()
