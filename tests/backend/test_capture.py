"""Where Dynamo breaks off is in the timeline, with its line and its reason."""

from typing import Any

import pytest
import torch

import omnicomp
from omnicomp._torch.dynamo.control_flow import end_of
from omnicomp.audit.gate import judge
from omnicomp.audit.views.findings import findings
from omnicomp.audit.views.why import why
from omnicomp.timeline import NearMiss

OPTIONS = {"lowerings": ["eager"], "summary": False}


def breaks(function: Any, *inputs: Any) -> list[NearMiss]:
    torch.compile(function, backend="omni", options=OPTIONS)(*inputs)
    return [e for e in omnicomp.timeline.events() if isinstance(e, NearMiss) and e.kind == "graph_break"]


def test_an_operator_whose_output_depends_on_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[x > 0].cos()

    (found,) = breaks(function, torch.ones(4))
    assert (found.name, found.node) == ("dynamo", "aten.nonzero.default")
    assert found.source.startswith(__file__)
    assert found.reason.code == "graph_break"
    assert "depends on" in found.reason.sentence
    assert "capture_dynamic_output_shape_ops" in found.reason.lever
    assert "\n" not in found.reason.sentence + found.reason.lever


def test_a_branch_on_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    (found,) = breaks(function, torch.ones(4))
    assert found.reason.sentence == "a branch depends on the values of a tensor"
    assert "torch.where" in found.reason.lever


def test_something_that_dynamo_does_not_know() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    (found,) = breaks(function, torch.ones(4))
    assert found.reason.sentence
    assert found.source.startswith(__file__)


def test_a_whole_function_has_none() -> None:
    assert breaks(torch.sin, torch.ones(4)) == []
    assert end_of(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("question", ["aten.nonzero", "graph_break", "dynamo"])
def test_the_report_says_where_and_why(question: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin()[x > 0].cos()

    breaks(function, torch.ones(4))
    report = omnicomp.audit()
    text = str(why(report, question))
    assert "graph break\n" in text
    assert "return x.sin()[x > 0].cos()" in text
    (broken,) = findings(report)
    assert broken.title.startswith("graph break at test_capture.py:")
    assert "1 graph break (test_capture.py:" in report.summary()
    assert report.sites.total == 0


def test_a_function_that_dynamo_compiles_no_more_is_a_fallback() -> None:
    @torch.compile(backend="omni", dynamic=False, options={"lowerings": ["toy", "eager"], "summary": False})
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (2, 3):
            function(torch.ones(size))
        before = omnicomp.audit()
        for size in (4, 5):
            function(torch.ones(size))
    audit = omnicomp.audit()
    (found,) = set(audit.fallbacks) - set(before.fallbacks)
    assert (found.graph, found.op, found.ran) == (audit.graphs[-1].id, "function", True)
    assert found.source.startswith(__file__)
    assert "size mismatch" in found.reasons[0].observed
    assert "compiled too often, and eager in further calls: function" in audit.summary()
    assert "function on eager" in str(audit)
    assert "compiles the function no more" in str(audit.why("recompile_limit"))
    assert judge(audit).over


def test_with_fullgraph_that_is_torchs_error() -> None:
    function = torch.compile(torch.sin, backend="omni", dynamic=False, fullgraph=True, options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=1):
        function(torch.ones(2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            function(torch.ones(3))
    assert not any(e.kind == "recompile_limit" for e in omnicomp.timeline.events() if isinstance(e, NearMiss))
