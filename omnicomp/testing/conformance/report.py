"""Running the checks of a device in processes of their own, and their results."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from omnicomp.errors import OmnicompError, nearest
from omnicomp.testing.conformance.suite import GROUPS
from omnicomp.testing.isolated import Outcome, run_isolated

__all__ = ["Report", "Result", "conformance", "results", "to_text"]

SCHEMA: Final = 1
_SUITE: Final = "omnicomp.testing.conformance.suite:jobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a check found.

    Attributes:
        name: `group.subject`.
        verdict: `passed`, `failed`, `crashed` (the interpreter ended, or did not answer) or `skipped`.
        found: one sentence.
        todo: what to do; empty unless it failed.
        seconds: wall time.
    """

    name: str
    verdict: str
    found: str
    todo: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the device."""
        return self.verdict in ("passed", "skipped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of a device.

    Attributes:
        device: its type.
        quick: whether the small choice was made.
        results: in the order in which they ran.
    """

    device: str
    quick: bool
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed or was left out."""
        return all(result.ok for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """How many checks have each verdict."""
        found = Counter(result.verdict for result in self.results)
        return {verdict: found[verdict] for verdict in ("passed", "failed", "crashed", "skipped")}

    def to_json(self) -> str:
        """`{"schema": 1, "device", "torch", "quick", "ok", "counts", "checks": [{"name", "verdict", ...}]}`."""
        body = {
            "schema": SCHEMA,
            "device": self.device,
            "torch": torch.__version__,
            "quick": self.quick,
            "ok": self.ok,
            "counts": self.counts,
            "checks": [dataclasses.asdict(result) for result in self.results],
        }
        return json.dumps(body, indent=2) + "\n"

    def summary(self) -> str:
        """One line."""
        told = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        return f"{self.device}: {'conforms' if self.ok else 'does not conform'}: {told or 'nothing was checked'}"


def to_text(result: Result) -> str:
    """One line, and one on what to do if there is something to do."""
    text = f"{result.verdict:<8}{result.name:<44} {result.found}"
    return f"{text}\n{'':<8}{'':<44} -> {result.todo}" if result.todo else text


def results(
    device: str,
    *,
    quick: bool = False,
    setup: str = "",
    operators: str = "",
    groups: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    seconds: float = 300.0,
) -> Iterator[Result]:
    """Run the checks; one that crashes the interpreter is a result, and the others still run.

    Args:
        device: a device type.
        quick: a small choice of operators and models.
        setup: `file.py:function` or `module:function` that is called first in the process of the checks.
        operators: names of operators by shell patterns joined by commas, instead of the choice by `quick`.
        groups: which of `contract`, `errors`, `module`, `tensors`, `inductor`, `omni`, `framework`, `models` and
            `operators`; None for all.
        only: names of checks; None for all.
        seconds: that one check may take.

    Raises:
        OmnicompError: the device is unknown or not available, or there is no such group.
    """
    for group in groups or ():
        if group not in (*GROUPS, "operators"):
            known = (*GROUPS, "operators")
            raise OmnicompError(
                f"there is no group {group!r} of checks, only {', '.join(known)}{nearest(group, known)}"
            )
    arguments: dict[str, Any] = {"device": device, "quick": quick, "setup": setup, "operators": operators}
    arguments |= {"groups": _list(groups), "only": _list(only)}
    for outcome in run_isolated(_SUITE, arguments, seconds=seconds):
        yield _result(outcome)


def _list(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else list(values)


def _result(outcome: Outcome) -> Result:
    if outcome.problem:
        verdict, todo = "failed", "see the traceback"
        if outcome.crashed:
            verdict, todo = "crashed", "run it under a debugger; a device must raise an exception instead"
        return Result(name=outcome.name, verdict=verdict, found=outcome.problem, todo=todo, seconds=outcome.seconds)
    body = outcome.result or {}
    return Result(
        name=outcome.name,
        verdict=body["verdict"],
        found=body["found"],
        todo=body["todo"],
        seconds=body.get("seconds", outcome.seconds),
    )


def conformance(
    device: str,
    *,
    quick: bool = False,
    setup: str = "",
    operators: str = "",
    groups: Sequence[str] | None = None,
    say: Callable[[Result], None] | None = None,
) -> Report:
    """Run all checks of a device.

    Raises:
        OmnicompError: as of `results`.
    """
    found: list[Result] = []
    for result in results(device, quick=quick, setup=setup, operators=operators, groups=groups):
        found.append(result)
        if say is not None:
            say(result)
    return Report(device=device, quick=quick, results=tuple(found))
