"""The self-test of the audit: planted lies are caught, and it notices if they no longer are."""

import pytest

from omnicomp.runtime.evidence import FirstCallObserver
from omnicomp.testing import audit_self_test


def test_every_lie_is_caught_and_no_truth_is_doubted() -> None:
    assert audit_self_test.self_test() == []


def test_an_audit_that_believes_what_it_is_told_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstCallObserver, "ran", property(lambda self: self._claim))
    assert audit_self_test.self_test() == [f"not caught: {lie.says}" for lie in audit_self_test.LIES]


def test_an_audit_that_believes_nothing_fails_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FirstCallObserver, "ran", property(lambda _: "unknown"))
    assert audit_self_test.self_test() == [
        f"a false alarm where it is not so: {lie.says}" for lie in audit_self_test.LIES
    ]
