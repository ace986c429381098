"""Operators of PyTorch's database; `bench/sweep_operators.py` goes through all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import omnicomp
from omnicomp import timeline
from omnicomp._torch import faults, opinfo
from omnicomp.errors import CompilerFaultError, OmnicompError
from omnicomp.testing.operators import FORMS, check_operator
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


def test_the_gradient_of_as_strided_in_place_is_eagers_with_a_reason() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone().as_strided_((2, 1, 1, 2), (1, 7, 7, 1)) * torch.arange(1.0, 5.0).view(2, 1, 1, 2)

    x = torch.randn(16, requires_grad=True)
    compiled: Any = torch.compile(function, backend="omni", options=EAGER)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(gradient, expected)
    (reason,) = reasons()
    assert "as_strided_" in reason
    with torch.no_grad():
        timeline.clear()
        assert torch.equal(compiled(x), function(x))
    assert reasons() == []


def test_a_matrix_rank_is_written_to_out() -> None:
    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.linalg.matrix_rank(x, out=out)
        return out + 1

    out = torch.zeros((), dtype=torch.int64)
    compiled: Any = torch.compile(function, backend="omni", options=EAGER)
    assert compiled(torch.eye(3), out) == 4
    assert out == 3
    (reason,) = reasons()
    assert "linalg_matrix_rank" in reason


def test_a_known_fault_is_raised_if_errors_are_to_be_raised() -> None:
    compiled: Any = torch.compile(
        lambda x, out: torch.linalg.matrix_rank(x, out=out), backend="omni", options={**EAGER, "on_error": "raise"}
    )
    with pytest.raises(Exception, match="AOTAutograd is known to be wrong"):
        compiled(torch.eye(3), torch.zeros((), dtype=torch.int64))
    assert issubclass(CompilerFaultError, OmnicompError)


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
    from torch._functorch._aot_autograd.runtime_wrappers import _FirstInvocationContext as Context

    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),)))
    of_torch = GraphModule({}, graph)
    with torch.library._scoped_library("omnicomp_test", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.ops.omnicomp_test.same.default, (graph.placeholder("x"),)))
        custom = GraphModule({}, graph)
        with faults.unobserved_first_call(custom):
            assert Context()._is_first
    with faults.unobserved_first_call(of_torch):
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


def test_an_operator_without_the_dtype_has_no_outcome() -> None:
    assert check_operator("bitwise_not", dtype=torch.float32) == []
    assert omnicomp.audit().graphs == ()
