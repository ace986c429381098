"""Tolerances, skips and dtypes that a device declares."""

from typing import Any

import pytest
import torch

from omnicomp.devices import Expectations
from omnicomp.devices.cpu import CpuDevice
from omnicomp.testing.conformance import operators, suite
from omnicomp.testing.conformance.base import CHECKS, Session, run_check
from omnicomp.testing.conformance.operators import check_operator


class Declares(CpuDevice):
    def __init__(self, declared: Expectations) -> None:
        self.declared = declared

    def expectations(self) -> Expectations:
        return self.declared


def session(**declared: object) -> Session:
    return Session(device=Declares(Expectations(**declared)))  # type: ignore[arg-type]


def test_a_tolerance_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = operators._message

    def half_a_percent_off(session: Session, got: Any, wanted: Any, *, valued: bool) -> str:
        return compare(session, got * 1.005, wanted, valued=valued)

    monkeypatch.setattr(operators, "_message", half_a_percent_off)
    strict = check_operator(session(), "exp", samples=1)
    assert strict["verdict"] == "failed"
    wide = check_operator(session(tolerances={"operators.*": (1e-2, 1e-2)}), "exp", samples=1)
    assert wide["verdict"] == "passed"
    assert wide["found"].endswith("within atol 0.01 and rtol 0.01, which the device declares")


def test_the_last_pattern_holds() -> None:
    declared = Expectations(
        tolerances={"operators.*": (1, 1), "operators.exp": (0, 0)}, skips={"operators.*": "a", "operators.exp": "b"}
    )
    assert declared.tolerance("operators.exp") == (0, 0)
    assert declared.tolerance("operators.add") == (1, 1)
    assert declared.tolerance("models.bert_forward") is None
    assert (declared.skip("operators.exp"), declared.skip("contract.known")) == ("b", "")


def test_a_skip_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Declares(Expectations(skips={"operators.linalg*": "the card has no float64"}))
    monkeypatch.setattr(suite, "ready", lambda *args: device)
    found = suite.jobs("cpu", operators="linalg.det,add", groups=["operators"])
    assert found["operators.linalg.det"]()["found"] == "the device asks so: the card has no float64"
    assert found["operators.linalg.det"]()["verdict"] == "skipped"
    assert found["operators.add"]()["verdict"] == "passed"


def test_a_dtype_of_the_device() -> None:
    found = check_operator(session(dtypes=(torch.bfloat16,)), "add", samples=1)
    assert (found["verdict"], found["found"].endswith("in bfloat16")) == ("passed", True)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"skips": {"operators.lianlg.*": "why"}}, "skips has 'operators.lianlg.*', which is no check"),
        ({"skips": {"models.*": ""}}, "the skip of 'models.*' has no reason"),
        ({"skips": {"contract.memory": "why"}}, "'contract.memory': the contract is not left out"),
        ({"tolerances": {"models.*": (1e-2,)}}, "the tolerance of 'models.*' is (atol, rtol)"),
    ],
)
def test_what_is_declared_wrongly(declared: dict[str, object], told: str) -> None:
    found = run_check(CHECKS["contract.expectations"], session(**declared))
    assert found["verdict"] == "failed"
    assert told in found["found"]


def test_what_is_left_out_is_told() -> None:
    found = run_check(CHECKS["contract.expectations"], session(skips={"models.*": "no memory"}))
    assert (found["verdict"], found["found"]) == ("passed", "left out: models.* (no memory)")
