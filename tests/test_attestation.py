"""The self-test of the audit: planted lies are caught, and it notices if they no longer are."""

import pytest

from omnicomp import attestation
from omnicomp.witness import Witness


def test_every_lie_is_caught_and_no_truth_is_doubted() -> None:
    assert attestation.self_test() == []


def test_an_audit_that_believes_what_it_is_told_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "ran", property(lambda self: self._claim))
    assert attestation.self_test() == [f"not caught: {lie.says}" for lie in attestation.LIES]


def test_an_audit_that_believes_nothing_fails_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "ran", property(lambda _: "unknown"))
    assert attestation.self_test() == [f"a false alarm where it is not so: {lie.says}" for lie in attestation.LIES]
