"""What is worth measuring for a graph, and what a rule chooses without measuring."""

from collections.abc import Iterator
from typing import Any

import pytest
import rival_engines
import torch
from torch import nn
from torch.fx import GraphModule

from omnicomp.backend.capture import CapturedGraph, capture_graph
from omnicomp.backend.select.candidates import by_rule, check_candidates, options
from omnicomp.backend.select.contest import parts_of
from omnicomp.options.policy import parse


@pytest.fixture(autouse=True)
def rivals() -> Iterator[None]:
    with rival_engines.declared():
        yield


def captured(model: nn.Module, x: torch.Tensor, **given: Any) -> tuple[GraphModule, CapturedGraph]:
    """The graph that Dynamo hands to a backend, and what omnicomp knows of it."""
    found: list[tuple[GraphModule, CapturedGraph]] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, capture_graph(gm, inputs, parse(None, {"lowerings": "measure", **given}), given)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(x)
    return found[0]


def small(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *middle).eval()


def names_of(gm: GraphModule, graph: CapturedGraph, *, weights: bool = True) -> list[str]:
    return [option.name for option in options(gm, graph, weights=weights)[0]]


def test_inductor_comes_first_and_missing_engines_are_told() -> None:
    with torch.no_grad():
        gm, graph = captured(small(), torch.randn(2, 4))
    found, refused = options(gm, graph, weights=True)
    assert found[0].name == "inductor"
    assert {"frozen", "frozen, C++ wrapper", "rival"} <= {option.name for option in found}
    assert refused["absent"] == "install the package absent"
    assert "toy" not in names_of(gm, graph), "it runs torch's own operators"


def test_tanh_is_tried_decomposed_where_there_is_one() -> None:
    with torch.no_grad():
        assert "inductor, tanh decomposed" in names_of(*captured(small(nn.Tanh()), torch.randn(2, 4)))
        assert "inductor, tanh decomposed" in names_of(*captured(small(nn.GELU("tanh")), torch.randn(2, 4)))
        assert "inductor, tanh decomposed" not in names_of(*captured(small(nn.GELU()), torch.randn(2, 4)))


def test_without_weights_nothing_is_frozen() -> None:
    with torch.no_grad():
        gm, graph = captured(nn.ReLU(), torch.randn(2, 4))
    assert "frozen" not in names_of(gm, graph, weights=False)
    assert by_rule(gm, graph, weights=False).name == "inductor"


def test_the_rule() -> None:
    with torch.no_grad():
        gm, graph = captured(small(nn.Tanh()), torch.randn(2, 4))
        assert by_rule(gm, graph, weights=True).name == "frozen"
        assert by_rule(gm, graph, weights=False).name == "inductor, tanh decomposed"
    gm, graph = captured(small(nn.Tanh()), torch.randn(2, 4))
    assert graph.training
    assert by_rule(gm, graph, weights=True).name == "inductor, tanh decomposed"


def test_only_those_that_are_asked_for() -> None:
    with torch.no_grad():
        gm, graph = captured(small(), torch.randn(2, 4), candidates=["eager", "rival", "absent"])
    found, refused = options(gm, graph, weights=True)
    assert [option.name for option in found] == ["eager", "rival"]
    assert found[1].lowerings == ("override", "rival", "eager"), "Inductor was not asked for"
    assert list(refused) == ["absent"]


def test_an_option_changes_the_policy_and_the_key() -> None:
    with torch.no_grad():
        gm, graph = captured(small(), torch.randn(2, 4), candidates=["inductor", "frozen, C++ wrapper"])
    plain, wrapped = (option.graph(graph) for option in options(gm, graph, weights=True)[0])
    assert wrapped.policy.choose == "off"
    assert wrapped.policy.engines["frozen"] == {"cpp_wrapper": True}
    assert plain.record.digest != wrapped.record.digest


def test_all_names_can_be_asked_for() -> None:
    known = ("inductor", "eager", "frozen", "openvino", "rival", "toy")
    assert check_candidates("candidates", known) == known


def test_parts_are_modules_and_layers_that_repeat_are_one() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    with torch.no_grad():
        gm, _ = captured(Deep().eval(), torch.randn(2, 4))
        assert parts_of(gm)[0] == "layers"
        assert set(parts_of(gm)) == {"layers", "stem", "head"}
        gm, _ = captured(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), torch.randn(2, 4))
        assert parts_of(gm) == [], "twenty layers that are alike are one part, and that is the whole"
        gm, _ = captured(nn.ReLU(), torch.randn(2, 4))
        assert parts_of(gm) == []
