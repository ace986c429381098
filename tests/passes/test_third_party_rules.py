"""Rules that a pass of another package may have: each wrong one is taken back, each right one stays."""

from pathlib import Path

import pytest
from pass_rules import RIGHT, WRONG, Rule, accepted, judged
from tiers import fast


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("rule", fast(WRONG, WRONG[::6].__contains__), ids=lambda rule: rule.name)
def test_a_wrong_rule_is_taken_back(rule: Rule) -> None:
    assert not accepted(judged(rule))


@pytest.mark.parametrize("rule", fast(RIGHT, RIGHT[::6].__contains__), ids=lambda rule: rule.name)
def test_a_right_rule_stays(rule: Rule) -> None:
    found = judged(rule)
    assert accepted(found), found
