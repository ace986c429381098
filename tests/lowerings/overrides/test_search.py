"""Overrides with a search: what is asked before a place is taken, and what is undone when it can't be."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import omnicomp
from omnicomp.analysis.certify import PROVED, REFUTED
from omnicomp.analysis.nodes import insert_call, op_name
from omnicomp.errors import OverrideError
from omnicomp.lowerings.overrides.registry import registered, unregister
from omnicomp.lowerings.overrides.search import Ended, Found
from omnicomp.lowerings.overrides.trust import distrust
from omnicomp.timeline import Reason

EAGER = {"lowerings": ["override", "eager"], "on_error": "raise"}
calls: list[str] = []


@torch.library.custom_op("omnicomp_test::sin_cos", mutates_args=())
def sin_cos(x: Tensor) -> Tensor:
    calls.append("sin_cos")
    return torch.cos(torch.sin(x))


sin_cos.register_fake(torch.empty_like)


def search(module: GraphModule) -> Iterator[Found | Ended]:
    for node in module.graph.nodes:
        if op_name(node).endswith(".cos"):
            inner: Any = node.args[0]
            if not op_name(inner).endswith(".sin"):
                yield Ended(node=node, sentence="it is the cosine of something else", observed=op_name(inner))
                continue
            x = inner.args[0]

            def write(node: Any = node, x: Any = x) -> Any:
                return insert_call(node, torch.ops.omnicomp_test.sin_cos.default, (x,))

            yield Found(output=node, steps=(inner,), arguments={"x": x}, write=write)


def reference(x: Tensor) -> Tensor:
    return torch.cos(torch.sin(x))


@pytest.fixture(autouse=True)
def forget(own_overrides: None) -> None:
    calls.clear()


def declare(**options: Any) -> None:
    operators = (torch.ops.omnicomp_test.sin_cos.default,)
    declared = {"name": "sin_cos", "search": search, "reference": reference, "operators": operators, **options}
    omnicomp.override(**declared)(sin_cos)


def refusals() -> list[str]:
    parts = [part for graph in omnicomp.audit().graphs for part in graph.parts]
    return [reason.sentence for part in parts for node in part.declined for reason in node.chain]


def run(function: Any, *inputs: Tensor, **options: Any) -> None:
    compiled = torch.compile(function, backend="omni", options={**EAGER, **options})
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


def plain(x: Tensor) -> Tensor:
    return (x * 2).sin().cos() + 1


def test_a_place_is_taken_and_attested() -> None:
    declare()
    run(plain, torch.randn(3, 4))
    assert calls == ["sin_cos"]
    assert "override" in {row.ran for row in omnicomp.audit().subgraphs}
    (rewrite,) = (rewrite for graph in omnicomp.audit().graphs for rewrite in graph.rewrites)
    assert (rewrite.name, rewrite.kind, rewrite.detail) == ("sin_cos", "search", "2 nodes")


@pytest.mark.parametrize("right", [True, False])
def test_a_place_whose_reference_computes_something_else_is_refuted(right: bool) -> None:
    declare(reference=reference if right else lambda x: torch.sin(torch.cos(x)))
    run(plain, torch.randn(7, 9), certify="always")
    (graph,) = omnicomp.audit().graphs
    (certificate,) = graph.certificates
    assert (certificate.name, certificate.verdict) == ("sin_cos", PROVED if right else REFUTED)
    assert (calls, len(graph.rewrites), len(graph.near_misses)) == (["sin_cos"] * right, right, not right)


def test_what_the_search_does_not_understand_is_told() -> None:
    declare()
    run(lambda x: x.exp().cos(), torch.randn(3))
    assert refusals() == ["it is the cosine of something else"]


def read_twice(x: Tensor) -> Tensor:
    y = x.sin()
    return y.cos() + y


def changed(x: Tensor) -> Tensor:
    x = x * 2
    y = x.sin()
    x.add_(1)
    return y.cos() + x


def only_its_shape(x: Tensor) -> Tensor:
    y = x.sin()
    return y.cos() * y.shape[0]


@pytest.mark.parametrize(("function", "words"), [(read_twice, "also read by"), (changed, "changed in place")])
def test_a_place_that_others_see_is_left(function: Any, words: str) -> None:
    declare()
    run(function, torch.randn(3))
    assert calls == []
    assert words in refusals()[0]


def test_a_shape_may_be_read() -> None:
    declare()
    compiled = torch.compile(only_its_shape, backend="omni", options=EAGER, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), only_its_shape(x))
    assert calls == ["sin_cos"] * 2


def test_without_a_derivative_it_is_for_inference() -> None:
    declare()
    run(plain, torch.randn(3, requires_grad=True))
    assert calls == []
    assert "is for inference" in refusals()[0]


def test_rules_dtypes_and_checks_are_asked() -> None:
    declare(dtypes=(torch.float64,), check=lambda x: 1 / 0)
    run(plain, torch.randn(3))
    assert "no kernel for these arguments" in refusals()[0]
    omnicomp.timeline.clear()
    run(plain, torch.randn(3, dtype=torch.float64))
    assert "check of the override sin_cos raised: division by zero" in refusals()[0]
    omnicomp.timeline.clear()
    unregister("sin_cos")
    declare()
    run(plain, torch.randn(3), lowerings={"*": ["override", "eager"], "Tensor.sin": "eager"})
    assert calls == []
    assert "keeps Tensor.sin off the overrides" in refusals()[0]


def test_a_call_that_is_not_alike_is_taken_back() -> None:
    def half(module: GraphModule) -> Iterator[Found | Ended]:
        for found in search(module):
            assert isinstance(found, Found)
            yield Found(
                output=found.output,
                steps=found.steps,
                arguments=found.arguments,
                write=lambda found=found: insert_call(found.output, torch.Tensor.half, (found.write(),)),
            )

    declare(search=half)
    run(plain, torch.randn(3))
    assert calls == []
    assert refusals() == ["the override sin_cos returns something else"]


def test_a_search_that_raises_costs_only_itself() -> None:
    def broken(module: GraphModule) -> Iterator[Found]:
        raise RuntimeError("planted")

    declare(search=broken)
    run(plain, torch.randn(3), on_error="retreat")
    assert "the search of the override sin_cos raised: planted" in refusals()[0]


def test_the_declaration_is_complete() -> None:
    with pytest.raises(OverrideError, match="reference= and operators="):
        omnicomp.override(name="a", search=search)
    with pytest.raises(OverrideError, match="exactly one"):
        omnicomp.override(name="a", search=search, module="MLP")


def test_one_that_was_found_wrong_is_left_out() -> None:
    declare()
    (item,) = (item for item in registered() if item.name == "sin_cos")
    reason = Reason(code="override_refused", by="sin_cos", sentence="it was found wrong")
    distrust(item, torch.device("cpu"), reason, stored=False)
    run(plain, torch.randn(3))
    assert calls == []
    assert refusals() == ["it was found wrong"]
