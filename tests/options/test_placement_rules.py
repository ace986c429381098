"""Rules of placement: what a selector matches, and that the last match decides."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph, Node

import omnicomp
from omnicomp.errors import OptionError
from omnicomp.options.placement_rules import Rule, last_match, named_subgraphs, parse_environment, parse_rules
from omnicomp.options.policy import LOWERINGS, parse
from omnicomp.timeline import Placement, Ran, current


def node(name: str = "topk_1", target: Any = torch.ops.aten.topk.default, path: str = "") -> Node:
    made = Graph().create_node("call_function", target, name=name)
    if path:
        made.meta["nn_module_stack"] = {"m": (path, nn.Linear)}
    return made


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("aten.topk", True),
        ("aten.topk.default", True),
        ("aten.*", True),
        ("aten.top", False),
        ("topk_1", True),
        ("topk", False),
        ("*", True),
        ("g0", True),
        ("g0.backward", False),
        ("g0.inference", True),
        ("graph0/inference", True),
        ("g1", False),
        ("g0:general", False),
        ("layers.3.mlp", True),
        ("layers.*.mlp", True),
        ("layers.3", True),
        ("model.layers.3.mlp.gate", True),
        ("layers.30", False),
        ("layers.mlp", False),
    ],
)
def test_what_a_selector_matches(selector: str, matches: bool) -> None:
    rule = Rule(selector, ("eager",))
    assert rule.matches(node(path="L['self'].model.layers.3.mlp.gate"), "g0", "inference") is matches


def test_the_last_match_decides() -> None:
    rules = parse_rules({"aten.topk": "eager", "layers.3": ["override", "inductor"], "aten.sort": "eager"}, LOWERINGS)
    found = last_match(rules, node(path="layers.3"), "g0", "forward")
    assert found is not None
    assert found.lowerings == ("override", "inductor")
    assert last_match(rules, node(target=torch.ops.aten.sin.default), "g0", "forward") is None


def test_subgraphs_are_named_by_graph_part_and_number() -> None:
    rules = parse_environment("graph0/3:eager; g0.forward.1 : override, eager ;g1.backward.0:eager", LOWERINGS)
    assert {n: rule.lowerings for n, rule in named_subgraphs(rules, "g0", "forward").items()} == {
        3: ("eager",),
        1: ("override", "eager"),
    }
    assert set(named_subgraphs(rules, "g0", "backward")) == {3}
    assert named_subgraphs(rules, "g1", "forward") == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"aten.topk": "nobody"}, "'aten.topk' can't be 'nobody'; it takes"),
        ({"aten.topk": []}, "it takes a lowering, or a list"),
        ({"aten.topk": ["eager", "eager"]}, "it takes a lowering, or a list"),
        ({"aten.topk": 3}, "it takes a lowering, or a list"),
    ],
)
def test_a_wrong_rule_gets_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse(None, {"lowerings": given})


@pytest.mark.parametrize("text", ["eager", ":eager", "aten.topk:fast"])
def test_a_wrong_environment_gets_one_sentence(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_PLACE", text)
    with pytest.raises(OptionError, match="OMNICOMP_PLACE: "):
        parse(None, None)


def test_the_star_is_the_default_and_the_environment_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_PLACE", "layers.3:inductor")
    policy = parse(None, {"lowerings": {"aten.sort": "inductor", "*": "eager", "aten.topk": "inductor"}})
    assert policy.lowerings == ("eager",)
    assert policy.rules == (Rule("aten.topk", ("inductor",)), Rule("layers.3", ("inductor",)))
    assert policy.digest_parts() != parse(None, {"lowerings": ["eager"]}).digest_parts()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def compiled(options: dict[str, Any]) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 4)
    with torch.no_grad():
        found = torch.compile(model, backend="omni", options=options)(x)
        torch.testing.assert_close(found, model(x))
    assert omnicomp.audit().mismatches == ()
    return [(e.subgraph, e.lowering) for e in current() if isinstance(e, Ran)]


@pytest.mark.inductor
def test_a_module_and_a_subgraph_run_where_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = compiled({"lowerings": {"1.up": "eager"}})
    assert [lowering for _, lowering in ran] == ["inductor", "eager", "inductor"]
    (placement,) = [e for e in current() if isinstance(e, Placement)]
    assert {reason.code for each in placement.declined for reason in each.chain} == {"lowering_excluded"}
    assert "a rule places 1.up on eager" in placement.declined[0].chain[0].sentence
    last = ran[-1][0]
    following = int(last.partition(".")[0].removeprefix("g")) + 1
    omnicomp.timeline.clear()
    torch.compiler.reset()
    monkeypatch.setenv("OMNICOMP_PLACE", f"graph{following}/2:eager; g{following + 1}:eager")
    ran = compiled({"lowerings": {"1.up": "eager"}})
    assert [lowering for _, lowering in ran] == ["inductor", "eager"], "the second and the third, which is one now"


NAMES = st.sampled_from(
    ["eager", "inductor", "g0", "graph0/3", "*", "aten.topk", "layers.[", "g" + "9" * 5000, "", "\x00"]
)
PIECES = st.lists(NAMES | st.text(max_size=6) | st.sampled_from([":", ";", ",", "."]), max_size=12)


@given(PIECES.map("".join))
def test_any_text_in_the_environment_gives_rules_or_one_sentence(text: str) -> None:
    try:
        rules = parse_environment(text, LOWERINGS)
    except ValueError as error:
        sentence = str(error)
    else:
        sentence = ""
        last_match(rules, node(path="layers.0"), "g0", "inference")
        named_subgraphs(rules, "g0", "inference")
        assert all(set(rule.lowerings) <= set(LOWERINGS) for rule in rules)
    assert "\n" not in sentence


@given(st.dictionaries(NAMES | st.integers() | st.none(), NAMES | st.lists(NAMES | st.integers(), max_size=3)))
def test_any_mapping_gives_rules_or_one_sentence(rules: dict[Any, Any]) -> None:
    try:
        found = parse_rules(rules, LOWERINGS)
    except ValueError as error:
        assert_one_line(str(error))
    else:
        assert [rule.selector for rule in found] == list(map(str, rules))


def assert_one_line(sentence: str) -> None:
    assert sentence
    assert "\n" not in sentence


def test_a_graph_that_no_rule_leaves_to_inductor_is_eager() -> None:
    ((_, lowering),) = compiled({"lowerings": {"*": "eager", "aten.topk": "eager"}})
    assert lowering == "eager"
