"""The checks of the device that pytest's option `--device` names; `omnicomp.testing.conformance.plugin` adds it."""

from typing import Any

import pytest

from omnicomp.testing.conformance.collected import Runner, judge

_runners: dict[tuple[Any, ...], Runner] = {}


def _runner(config: Any) -> Runner | None:
    device = config.getoption("device", default=None)
    if device is None:
        return None
    choice = {name: config.getoption(name) for name in ("quick", "setup", "operators")}
    key = (device, *choice.values())
    if key not in _runners:
        _runners[key] = Runner(device, **choice)
    return _runners[key]


def pytest_generate_tests(metafunc: Any) -> None:
    """A test for each check."""
    runner = _runner(metafunc.config)
    metafunc.parametrize("check", ["no device was named"] if runner is None else runner.names())


def test_conformance(check: str, request: pytest.FixtureRequest) -> None:
    """The device keeps what the check asks."""
    del check
    runner = _runner(request.config)
    if runner is None:
        pytest.skip("name a device: pytest -p omnicomp.testing.conformance.plugin --device NAME")
    judge(runner, request)
