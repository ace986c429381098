"""Rules that a pass of another package may have: each wrong one is taken back, each right one stays."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pass_rules import RIGHT, WRONG, Rule, accepted, judged


def some(rules: Sequence[Rule]) -> list[Any]:
    """Each sixth rule is in the fast tier, two more in the slow one, and the others in the long one."""
    tiers: tuple[Any, ...] = ((), *[pytest.mark.slow] * 2, *[(pytest.mark.slow, pytest.mark.long)] * 3)
    return [pytest.param(rule, marks=tiers[at % 6]) for at, rule in enumerate(rules)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("rule", some(WRONG), ids=lambda rule: rule.name)
def test_a_wrong_rule_is_taken_back(rule: Rule) -> None:
    assert not accepted(judged(rule))


@pytest.mark.parametrize("rule", some(RIGHT), ids=lambda rule: rule.name)
def test_a_right_rule_stays(rule: Rule) -> None:
    found = judged(rule)
    assert accepted(found), found
