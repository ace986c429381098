"""A plug-in for pytest: tests that nothing they compile falls back to eager, and a summary of what did.

pytest finds it by the entry point `omnicomp` (`-p no:omnicomp` leaves it out). Neither torch nor the compiler is
imported by it, so it costs a test suite that compiles nothing no more than its own import.

    def test_my_model(omni_audit):
        torch.compile(model, backend="omni")(x)
        omni_audit.assert_no_fallback(allow=["aten.topk"])

    @pytest.mark.omni_no_fallback(allow=["layers.0"])
    def test_another(): ...
"""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from omnicomp.audit import Audit
    from omnicomp.audit.gate.verdict import Verdict

_MARKER: Final = "omni_no_fallback"
_FOUND: Final = "omnicomp_fallbacks"
_SHOWN: Final = 20
_TAKEN: Final = ("allow", "max_nodes", "allow_unfinished")


class OmniAudit:
    """What a test compiled, from its set-up on; what was compiled before and is only called again is not in it."""

    def __init__(self) -> None:
        self._since = time.time()

    @property
    def audit(self) -> "Audit":
        """The report of the graphs that were captured since the test began."""
        from omnicomp.audit.source import of_this_process
        from omnicomp.timeline import current

        events = current().events()
        older = {event.graph for event in events if event.time < self._since}
        return of_this_process([event for event in events if event.graph not in older])

    def verdict(
        self, *, allow: Sequence[str] = (), max_nodes: int | None = 0, allow_unfinished: bool = False
    ) -> "Verdict":
        """Judge what the test compiled; what the project acknowledges in its `pyproject.toml` does not count.

        Args:
            allow: selectors of operators and modules that may fall back.
            max_nodes: how many operators may; None for no bound.
            allow_unfinished: whether parts may have been built and never called.

        Raises:
            AcknowledgeError: the project's `pyproject.toml` can't be read.
        """
        from omnicomp.audit.gate import judge
        from omnicomp.options.acknowledged import load
        from omnicomp.options.fallback_limits import FallbackBudget

        budget = FallbackBudget(max_nodes=max_nodes, allow=tuple(allow))
        return judge(self.audit, budget, acknowledged=load(), allow_unfinished=allow_unfinished)

    def assert_no_fallback(
        self, *, allow: Sequence[str] = (), max_nodes: int = 0, allow_unfinished: bool = False
    ) -> None:
        """Check that what the test compiled does not fall back to eager.

        Args:
            allow: selectors of operators and modules that may.
            max_nodes: how many other operators may.
            allow_unfinished: whether parts may have been built and never called.

        Raises:
            AssertionError: more does; the message names operators, lines and levers. Also if nothing was compiled, or
                something was and never called, as then nothing was seen.
            TypeError: an argument is wrong.
        """
        __tracebackhide__ = True  # what failed is the test, and its lines are what pytest shows
        from omnicomp.audit.gate.verdict import to_text
        from omnicomp.errors import OptionError
        from omnicomp.options.fallback_limits import parse_budget

        allow = sorted(allow) if isinstance(allow, (set, frozenset)) else allow
        try:
            parse_budget("assert_no_fallback", {"allow": allow, "max_nodes": max_nodes})
        except OptionError as error:
            raise TypeError(str(error)) from None
        verdict = self.verdict(allow=allow, max_nodes=max_nodes, allow_unfinished=allow_unfinished)
        if not verdict.audit.graphs:
            raise AssertionError(
                "omni compiled nothing in this test, so it can't be told whether anything falls back; "
                "call torch.compiler.reset() first where an earlier test compiled the same function"
            )
        if verdict.failed:
            raise AssertionError(to_text([verdict]).rstrip())


_KEY: Final = pytest.StashKey[OmniAudit]()


@pytest.fixture
def omni_audit(request: pytest.FixtureRequest) -> OmniAudit:
    """What this test compiled: `omni_audit.audit`, `omni_audit.assert_no_fallback(allow=[...])`."""
    return request.node.stash[_KEY]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    text = "what the test compiles must not fall back to eager, but for the operators and modules in `allow`"
    config.addinivalue_line("markers", f"{_MARKER}(allow=(), max_nodes=0): {text}")
    config.pluginmanager.register(_Summary(), "omnicomp-summary")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin before the fixtures, which may compile what the test calls."""
    item.stash[_KEY] = OmniAudit()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check what a marked test compiled, once it has passed; of several markers the closest one counts."""
    __tracebackhide__ = True
    result = yield
    mark = item.get_closest_marker(_MARKER)
    if mark is not None:
        wrong = [*mark.args, *(name for name in mark.kwargs if name not in _TAKEN)]
        if wrong:
            raise pytest.UsageError(f"{_MARKER} takes allow=[...] and max_nodes=N by name, not {wrong[0]!r}")
        item.stash[_KEY].assert_no_fallback(**mark.kwargs)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what fell back into the test's report, which reaches the terminal from other processes, too."""
    report = yield
    if call.when == "call" and _KEY in item.stash:
        found = _fallbacks(item.stash[_KEY])
        if found:
            setattr(report, _FOUND, found)
    return report


def _fallbacks(seen: OmniAudit) -> list[str]:
    """A line for each fallback that counts; nothing is imported where nothing can have been compiled."""
    from omnicomp.timeline import current

    if not len(current()):
        return []
    from omnicomp.audit.gate.verdict import lines, what_and_where

    try:
        return [what_and_where(line) for line in lines(seen.verdict().counted)]
    except Exception as error:  # noqa: BLE001 - told in the summary; an exception here would end the whole run
        return [f"what fell back can't be told: {type(error).__name__}: {error}"]


class _Summary:
    """Collects what fell back in all tests."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.tests: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test reports."""
        for line in getattr(report, _FOUND, ()):
            self.lines[line] += 1
            self.tests[report.nodeid] = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show it, the most frequent first."""
        if not self.lines:
            return
        terminalreporter.section("omni: fallbacks to eager")
        for line, count in self.lines.most_common(_SHOWN):
            tests = "test" if count == 1 else "tests"
            terminalreporter.line(f"{line} ({count} {tests})")
        if len(self.lines) > _SHOWN:
            terminalreporter.line(f"and {len(self.lines) - _SHOWN} more lines, from {len(self.tests)} tests in all")
