"""Options of pytest for `omnicomp.testing.conformance.test_device`: `pytest -p omnicomp.testing.conformance.plugin`."""

from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Options: which device, and how much of it."""
    group = parser.getgroup("omnicomp conformance")
    group.addoption("--device", metavar="NAME", help="The device type that is checked.")
    group.addoption("--quick", action="store_true", help="A small choice of operators and models.")
    group.addoption("--setup", default="", metavar="MODULE:FUNCTION", help="Called first where the checks run.")
    group.addoption("--operators", default="", metavar="PATTERNS", help="Operators by shell patterns.")
