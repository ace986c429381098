"""Which releases of torch a repair is for."""

import pytest

from omnicomp._torch.repairs.needed import Needed
from omnicomp.passes import PIPELINE
from omnicomp.passes.repairs import Repair


@pytest.mark.parametrize(
    ("version", "needed"),
    [("2.10.1", False), ("2.11.0+cpu", True), ("2.14.1", True), ("2.15.0.dev20261001+cu130", False), ("3.0", False)],
)
def test_releases(version: str, needed: bool) -> None:
    assert Needed(first="2.11", fixed="2.15").of(version) == needed


def test_a_fault_that_nobody_has_seen_repaired_is_repaired_everywhere() -> None:
    assert Needed(first="2.11").of("9.0")


def test_every_repair_names_an_issue_or_has_a_reproducer() -> None:
    repairs = [item for item in PIPELINE if isinstance(item, Repair)]
    assert repairs
    for repair in repairs:
        assert repair.needed.issue.startswith("https://github.com/pytorch/") or "`torch.compile(" in repair.__doc__
