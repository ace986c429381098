"""Programs that once gave other results than eager, or an error that eager does not have."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import fast
from torch import Tensor

import omnicomp
from omnicomp.timeline import Ran, Retreat, current

EAGER = {"lowerings": ["eager"]}


@pytest.fixture
def digamma_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor can't lower digamma, so that every graph with one is cut."""
    from torch._inductor import lowering

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.digamma.default, fail)
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.inductor
@pytest.mark.usefixtures("digamma_fails")
@pytest.mark.parametrize("double", fast([1, 2], (2).__eq__))
def test_a_cut_behind_a_size_that_depends_on_data(double: int) -> None:
    """Torch predicts transposed memory for nonzero, and Inductor's own results don't keep to it."""

    def found(x: Tensor) -> Tensor:
        return torch.digamma((x > 0).nonzero().float() + double) * double

    x = torch.tensor([[1.0, -1.0, 2.0], [3.0, 4.0, -5.0]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(torch.compile(found, backend="omni", fullgraph=True)(x), found(x))
    assert [e.lowering for e in current() if isinstance(e, Ran)] == ["inductor", "eager", "inductor"]
    assert omnicomp.audit().mismatches == ()


@torch.library.custom_op("omnicomp_tests::only_in_dynamo", mutates_args=())
def only_in_dynamo(x: Tensor) -> Tensor:
    return x.clone()


@only_in_dynamo.register_fake
def _(x: Tensor) -> Tensor:
    if only_in_dynamo.autograd_is_tracing:  # type: ignore[attr-defined]
        raise RuntimeError("no fake result for autograd")
    return torch.empty_like(x)


only_in_dynamo.register_vmap(lambda info, dims, x: (only_in_dynamo(x), dims[0]))


def _grad(x: Tensor) -> Tensor:
    return torch.func.grad(lambda a: (only_in_dynamo(torch.ones(3)) * a * a).sum())(x)


def _jvp(x: Tensor) -> Tensor:
    return torch.func.jvp(lambda a: (only_in_dynamo(torch.ones(3)) * a * a).sum(), (x,), (x,))[1]


def _vmap(x: Tensor) -> Tensor:
    return torch.vmap(lambda a: only_in_dynamo(a).sum())(x)


@pytest.mark.parametrize("function", [_grad, _jvp, _vmap])
def test_a_retreat_from_within_a_transform_leaves_the_transform(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph enters a transform by a call of its own, and tracing it ended before the call that leaves it."""
    from omnicomp._torch.autograd import aot_autograd as aot

    compile_graph = aot.compile_graph

    def tracing(*args: Any) -> Any:
        monkeypatch.setattr(only_in_dynamo, "autograd_is_tracing", True, raising=False)
        return compile_graph(*args)

    monkeypatch.setattr(only_in_dynamo, "autograd_is_tracing", False, raising=False)
    monkeypatch.setattr(aot, "compile_graph", tracing)
    x = torch.rand(3, 3)
    torch.testing.assert_close(torch.compile(function, backend="omni", options=EAGER)(x), function(x))
    assert "no fake result" in next(e for e in current() if isinstance(e, Retreat)).reason.sentence
