"""What the option `fallback` takes."""

from typing import Any

import pytest

from omnicomp.errors import OptionError
from omnicomp.options.fallback_limits import FallbackBudget, parse_budget
from omnicomp.options.policy import Policy, effective_options, parse


def test_without_a_bound_nothing_may_fall_back() -> None:
    assert parse_budget("fallback", {}) == FallbackBudget(max_nodes=0)
    assert parse_budget("fallback", {"allow": ["aten.topk"]}) == FallbackBudget(max_nodes=0, allow=("aten.topk",))


def test_a_bound_on_the_share_is_the_only_one_unless_both_are_given() -> None:
    assert parse_budget("fallback", {"max_flops_share": 0.01}) == FallbackBudget(max_nodes=None, max_flops_share=0.01)
    both = parse_budget("fallback", {"max_flops_share": 0, "max_nodes": 3})
    assert both == FallbackBudget(max_nodes=3, max_flops_share=0.0)


def test_no_budget_is_the_default() -> None:
    assert parse(None, None).fallback is None
    assert parse(None, {"fallback": None}).fallback is None


def test_it_is_no_part_of_the_digest_of_generated_code() -> None:
    assert "fallback" not in Policy(fallback=FallbackBudget()).digest_parts()
    assert parse(None, {"fallback": {}}).digest_parts() == Policy().digest_parts()


def test_the_audit_shows_it_as_a_person_would_write_it() -> None:
    given = {"fallback": {"max_nodes": 2, "allow": ["aten.topk", "layers.0"], "on_excess": "error"}}
    values, origins = effective_options(parse(None, given), given)
    assert values["fallback"] == "max_nodes: 2, allow: aten.topk, layers.0, on_excess: error"
    assert origins["fallback"] == "options"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "takes a mapping"),
        ("error", "takes a mapping"),
        ({"max_node": 0}, 'did you mean "max_nodes"'),
        ({3: 0}, "has no key 3"),
        ({"max_nodes": -1}, "can't be -1"),
        ({"max_nodes": True}, "can't be True"),
        ({"max_nodes": 0.5}, "can't be 0.5"),
        ({"max_flops_share": 1.5}, "from 0 to 1"),
        ({"max_flops_share": float("nan")}, "from 0 to 1"),
        ({"max_flops_share": "1 %"}, "from 0 to 1"),
        ({"allow": "aten.topk"}, "takes a list"),
        ({"allow": [3]}, "can't contain 3"),
        ({"allow": [" "]}, "takes names"),
        ({"on_excess": "raise"}, "warn or error"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(value: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(None, {"fallback": value})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
