"""`verify="inductor"`: passes that are wrong on purpose, put into Inductor by torch's own hooks, and right ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch.fx import Graph

import omnicomp
from omnicomp import timeline
from omnicomp.analysis.certify import PROVED, PROVED_FOR_SIZES, REFUTED, TESTED
from omnicomp.timeline import Certified

aten: Any = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def compiled(function: Any, *inputs: torch.Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="omni", options={"verify": "inductor"})(*inputs)


def found() -> list[Certified]:
    return [event for event in timeline.events() if isinstance(event, Certified)]


def calls(graph: Graph, target: Any) -> list[Any]:
    return graph.find_nodes(op="call_function", target=target)


def without_scale(graph: Graph) -> None:
    for node in calls(graph, aten.mul.Tensor):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def swapped_difference(graph: Graph) -> None:
    for node in calls(graph, aten.sub.Tensor):
        node.args = node.args[::-1]


def late_reading(graph: Graph) -> None:
    (write,) = calls(graph, aten.copy_.default)
    for node in calls(graph, aten.cos.default):
        write.append(node)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * 0.3).softmax(-1)


def difference(x: torch.Tensor) -> torch.Tensor:
    return x.exp() - x.sin()


def written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + 1
    z = x.cos()
    x.copy_(y)
    return z


@pytest.mark.parametrize(
    ("function", "wrong", "hook"),
    [
        (scaled, without_scale, "joint_custom_pre_pass"),
        (scaled, without_scale, "post_grad_custom_pre_pass"),
        (difference, swapped_difference, "post_grad_custom_post_pass"),
        (written, late_reading, "post_grad_custom_post_pass"),
    ],
)
def test_what_a_wrong_pass_does_is_put_back(function: Any, wrong: Any, hook: str):
    x = torch.randn(4, 6)
    mine, own = x.clone(), x.clone()
    with config.patch({hook: wrong}):
        torch.testing.assert_close(compiled(function, mine), function(own))
    torch.testing.assert_close(mine, own)
    refuted = [event for event in found() if event.verdict == REFUTED]
    assert {event.name.rpartition(".")[2] for event in refuted} == {hook}
    (graph,) = omnicomp.audit().graphs
    assert not graph.retreats


def test_two_draws_that_become_one_are_put_back():
    def merge(graph: Graph) -> None:
        first, second = calls(graph, aten.rand.default)
        second.replace_all_uses_with(first)
        graph.erase_node(second)

    with config.patch(joint_custom_pre_pass=merge):
        result = compiled(lambda x: x * torch.rand(64) - x * torch.rand(64), torch.ones(64))
    assert result.count_nonzero() > 32
    assert [e.name.rpartition(".")[2] for e in found() if e.verdict == REFUTED] == ["joint_custom_pre_pass"]


def test_right_passes_that_look_wrong_stay():
    def swap(graph: Graph) -> None:
        for node in calls(graph, aten.add.Tensor):
            node.args = node.args[::-1]
        for node in calls(graph, aten.view.default):
            if node.args[0].target is aten.view.default:
                node.args = (node.args[0].args[0], node.args[1])

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x.sin() + y.cos()).view(2, 12)
        return z.view(24) * 2 - z.sum()

    x, y = torch.randn(2, 4, 6)
    with config.patch(post_grad_custom_pre_pass=swap):
        torch.testing.assert_close(compiled(function, x, y), function(x, y))
    events = [e for e in found() if e.name.endswith("custom_pre_pass")]
    assert events
    assert {event.verdict for event in events} <= {PROVED, PROVED_FOR_SIZES, TESTED}


def test_the_reproducer_is_of_torch_alone():
    x = torch.randn(4, 6)
    with config.patch(post_grad_custom_pre_pass=swapped_difference):
        compiled(difference, x)
        (script, *_) = [event.reproducer for event in found() if event.reproducer]
        text = Path(script).read_text()
        assert "omnicomp" not in text.partition("\n")[2]
        with pytest.raises(AssertionError, match="not close"):
            exec(compile(text, script, "exec"), {"__name__": "__main__"})
    exec(compile(text, script, "exec"), {"__name__": "__main__"})


def test_inductors_own_passes_hold_in_training():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    x = torch.randn(4, 6, requires_grad=True)
    compiled(lambda x: (model(x).float() * 1 + 0).view(2, 4).view(8), x).sum().backward()
    assert {"inductor.joint_graph_passes.remove_noop_ops"} < {event.name for event in found()}
    assert {event.verdict for event in found()} <= {PROVED, PROVED_FOR_SIZES, TESTED}
