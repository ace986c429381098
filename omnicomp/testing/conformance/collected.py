"""Conformance checks as pytest tests: one test per check."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omnicomp.testing.conformance.suite import Result, check_names, results


class Runner:
    """Runs the checks that were selected, when the first one's result is asked for."""

    def __init__(self, device: str, **choice: Any) -> None:
        """Run on a device."""
        self._device, self._choice = device, choice
        self._found: dict[str, Result] = {}
        self._running: Iterator[Result] | None = None

    def names(self) -> list[str]:
        """All checks of the choice; needs no device."""
        known = ("quick", "operators", "groups")
        return check_names(**{key: value for key, value in self._choice.items() if key in known})

    def result(self, name: str, selected: Sequence[str]) -> Result:
        """What a check found."""
        if self._running is None:
            self._running = results(self._device, only=selected, **self._choice)
        while name not in self._found:
            result = next(self._running)
            self._found[result.name] = result
        return self._found[name]


def judge(runner: Runner, request: Any) -> None:
    """Fail or skip the test that asks, as its check says; the test has a parameter `check`."""
    import pytest

    function = request.function
    selected = [
        item.callspec.params["check"] for item in request.session.items if getattr(item, "function", None) is function
    ]
    result = runner.result(request.node.callspec.params["check"], selected)
    if result.verdict == "skipped":
        pytest.skip(result.found)
    if not result.ok:
        pytest.fail(f"{result.found}; to do: {result.todo}", pytrace=False)


def pytest_checks(
    device: str, *, quick: bool = True, setup: str = "", operators: str = "", groups: Sequence[str] | None = None
) -> Callable[..., None]:
    """A test function with a parameter for each check; give it a name that starts with `test`.

    Args:
        device: a device type.
        quick: the small choice of operators and models.
        setup: `module:function` that is called first in the process of the checks.
        operators: names of operators by shell patterns joined by commas, instead of the choice by `quick`.
        groups: as of `omnicomp.testing.conformance.results`.
    """
    import pytest

    runner = Runner(device, quick=quick, setup=setup, operators=operators, groups=groups)

    @pytest.mark.parametrize("check", runner.names())
    def test_conformance(check: str, request: Any) -> None:
        del check
        judge(runner, request)

    return test_conformance
