"""Operators of PyTorch's database; `bench/sweep_operators.py` goes through all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from operator_sweep import FORMS, check_operator
from torch.fx import GraphModule

import omnicomp
from omnicomp import timeline
from omnicomp._torch import opinfo
from omnicomp._torch.repairs.first_call import has_custom_operators, unobserved_first_call
from omnicomp.errors import OmnicompError
from omnicomp.timeline import Retreat

EAGER = {"lowerings": ["eager"]}

SELECTION = (
    "addmm",
    "as_strided",
    "cdist",
    "complex",
    "cumsum",
    "diagonal_scatter",
    "expand",
    "fft.irfft",
    "histogramdd",
    "index_put",
    "linalg.eigh",
    "linalg.lstsq",
    "linalg.matrix_rank",
    "masked_select",
    "multinomial",
    "nn.functional.batch_norm",
    "nn.functional.dropout",
    "nn.functional.max_pool2d",
    "nn.functional.rrelu",
    "norm.nuc",
    "polygamma.polygamma_n_1",
    "scatter_reduce.prod",
    "sparse.sampled_addmm",
    "to_sparse",
    "unfold",
)


def reasons() -> list[str]:
    return [
        event.reason.sentence
        for event in timeline.current().events()
        if isinstance(event, Retreat) and event.reason is not None and event.target_lowering == "eager"
    ]


@pytest.mark.parametrize("name", SELECTION)
def test_what_passes_in_eager_passes(name: str) -> None:
    outcomes = check_operator(name, options=EAGER, forms=FORMS)
    assert [outcome for outcome in outcomes if not outcome.passed] == []
    assert any(outcome.verdict in ("ok", "retreated") for outcome in outcomes)


@pytest.mark.parametrize("name", ["linalg.pinv", "linalg.pinv.singular", "pinverse", "linalg.matrix_rank", "fft.fft"])
def test_complex_operators_pass(name: str) -> None:
    outcomes = check_operator(name, dtype=torch.complex64, options=EAGER, forms=FORMS)
    assert {outcome.verdict for outcome in outcomes} <= {"ok", "retreated"}
    assert outcomes


@pytest.mark.inductor
def test_the_first_call_of_a_complex_inverse_is_right_under_inductor_too() -> None:
    x = torch.randn(5, 5, dtype=torch.complex64)
    compiled = torch.compile(lambda x: torch.linalg.pinv(x), backend="omni")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), torch.linalg.pinv(x))


@pytest.mark.parametrize("form", ["function", "in_place"])
def test_as_strided_of_shared_positions_needs_no_retreat(form: str) -> None:
    outcomes = check_operator("as_strided", samples=5, options=EAGER, forms=[form])
    assert {outcome.verdict for outcome in outcomes} == {"ok"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_matrix_rank_is_written_to_out(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        returned = torch.linalg.matrix_rank(x, out=out)
        return returned, out + 1

    out = torch.zeros((), dtype=dtype)
    compiled: Any = torch.compile(function, backend="omni", options=EAGER, fullgraph=True)
    returned, more = compiled(torch.eye(3), out)
    assert (out.item(), more.item(), returned.data_ptr()) == (3, 4, out.data_ptr())
    assert reasons() == []


def test_a_matrix_rank_resizes_out_as_eager_does() -> None:
    out = torch.zeros(4, dtype=torch.int64)
    compiled: Any = torch.compile(
        lambda x, out: torch.linalg.matrix_rank(x, out=out) + 1, backend="omni", options=EAGER
    )
    with pytest.warns(UserWarning, match="resized"):
        assert compiled(torch.eye(3), out) == 4
    assert (out.shape, out.item()) == ((), 3)


def test_a_matrix_rank_inside_a_branch_is_written_to_out() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros((), dtype=torch.int64)
        torch.linalg.matrix_rank(x, out=out)
        return out + 1

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, branch, lambda x: x.sum().long(), (x,))

    compiled: Any = torch.compile(function, backend="omni", options=EAGER)
    assert compiled(torch.eye(3)) == 4


@pytest.mark.parametrize("name", ["polygamma.polygamma_n_0", "polygamma.polygamma_n_2"])
def test_polygamma_in_place_needs_no_retreat(name: str) -> None:
    outcomes = check_operator(name, options=EAGER, forms=["in_place"])
    assert {outcome.verdict for outcome in outcomes} == {"ok"}


@pytest.mark.parametrize("arguments", [{"p": 0.5, "training": False}, {"p": 0.0, "training": True}])
def test_what_is_written_to_the_result_of_no_dropout_reaches_its_input(arguments: dict[str, Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, **arguments).add_(1)

    x = torch.zeros(3)
    compiled: Any = torch.compile(function, backend="omni", options=EAGER)
    result = compiled(x)
    assert x.tolist() == [1, 1, 1]
    assert result.data_ptr() == x.data_ptr()


def test_dropout_that_drops_something_stays() -> None:
    compiled: Any = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="omni", options=EAGER)
    assert (compiled(torch.ones(1000)) == 0).any()


def test_graphs_with_custom_operators_keep_the_check_of_their_aliases() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),)))
    of_torch = GraphModule({}, graph)
    with torch.library._scoped_library("omnicomp_test", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.ops.omnicomp_test.same.default, (graph.placeholder("x"),)))
        custom = GraphModule({}, graph)
        assert has_custom_operators(custom)
    assert not has_custom_operators(of_torch)


def test_the_first_call_is_made_without_a_mode_while_the_repair_is_in_force() -> None:
    from torch._functorch._aot_autograd.runtime_wrappers import _FirstInvocationContext as Context

    with unobserved_first_call():
        assert not Context()._is_first
    assert Context()._is_first


def backend_with(change: Callable[[list[Any]], list[Any]]) -> Callable[..., Any]:
    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: change(list(gm(*args)))

    return backend


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda values: values, "ok"),
        (lambda values: [value + 0.01 for value in values], "wrong_value"),
        (lambda values: [value.double() for value in values], "wrong_value"),
        (lambda values: [value.t().contiguous().t() for value in values], "wrong_layout"),
        (lambda values: [value.detach() for value in values], "wrong_gradient"),
        (lambda values: [value * 2 - value.detach() for value in values], "wrong_gradient"),
        (lambda values: 1 / 0, "raised"),
    ],
)
def test_a_backend_that_is_wrong_is_found_out(change: Callable[[list[Any]], list[Any]], verdict: str) -> None:
    outcome = check_operator("mm", samples=1, backend=backend_with(change))[0]
    assert outcome.verdict == verdict, outcome.detail


def test_names_are_patterns_and_unknown_ones_an_error() -> None:
    assert {"add", "addmm"} <= set(opinfo.names("add*,mul"))
    assert "mul" in opinfo.names("add*,mul")
    with pytest.raises(OmnicompError, match="no operator 'nothing'"):
        check_operator("nothing")


def test_the_database_leaves_the_settings_of_the_process_open() -> None:
    opinfo.names()
    assert not torch.backends.flags_frozen()


def test_an_operator_without_the_dtype_has_no_outcome() -> None:
    assert check_operator("bitwise_not", dtype=torch.float32) == []
    assert omnicomp.audit().graphs == ()
