"""All checks of a device as jobs for a process of their own."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from omnicomp.devices import Device, device_names, primary_device, resolve_device
from omnicomp.errors import wrong_value
from omnicomp.testing.conformance import compiling, contract, faults, models, module, tensors
from omnicomp.testing.conformance.base import CHECKS, Session, check, expect, run_check
from omnicomp.testing.conformance.operators import check_operator, operator_names
from omnicomp.testing.isolated import Outcome, find_function, run_isolated

# Importing them declares their checks.
_DECLARING: Final = (contract, faults, module, tensors, compiling, models)

GROUPS: Final = ("contract", "errors", "module", "tensors", "inductor", "omni", "framework", "models")
"""The groups of checks beside `operators`, in the order in which they run."""


def ready(name: str, setup: str = "") -> Device:
    """Make a device usable in this process.

    Args:
        name: a device type; `sim` is enabled, and built if it never was.
        setup: `file.py:function` or `module:function` that is called first, for example to import the device's package.

    Returns:
        Its contract; what torch itself offers, if omnicomp has no contract for a type that torch knows.

    Raises:
        DeviceError: it is unknown, or not available here.
    """
    if setup:
        find_function(setup)()
    base = name.split(":", 1)[0]
    if base == "sim":
        import omnicomp.devices.sim

        omnicomp.devices.sim.enable()
    if base in device_names() or base in ("auto", "meta"):
        return resolve_device(name)
    try:
        torch.device(base)
        torch.empty(1, device=base)
    except (RuntimeError, NotImplementedError, AssertionError):
        return resolve_device(name)  # raises, and says what is known
    return primary_device([base])


def check_names(quick: bool = True, operators: str = "", groups: Sequence[str] | None = None) -> list[str]:
    """Names of the checks of a choice, in the order in which they run; the arguments are those of `jobs`."""
    chosen = (*GROUPS, "operators") if groups is None else groups
    found = [
        each.name
        for group in GROUPS
        for each in CHECKS.values()
        if group in chosen and each.name.startswith(f"{group}.") and (each.quick or not quick)
    ]
    if "operators" in chosen:
        found += [f"operators.{name}" for name in operator_names(quick, operators)]
    return found


def jobs(
    device: str,
    quick: bool = True,
    setup: str = "",
    operators: str = "",
    groups: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Callable[[], dict[str, Any]]]:
    """The checks of a device.

    Raises:
        DeviceError: as of `ready`.
    """
    session = Session(device=ready(device, setup), quick=quick)
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in check_names(quick, operators, groups):
        if only is not None and name not in only:
            continue
        why = session.device.expectations().skip(name)
        if why:
            found[name] = _timed(lambda why=why: _left_out(why))
        elif name in CHECKS:
            found[name] = _timed(lambda name=name: run_check(CHECKS[name], session))
        else:
            found[name] = _timed(lambda name=name: check_operator(session, name.removeprefix("operators.")))
    return found


def _left_out(why: str) -> dict[str, Any]:
    return {"verdict": "skipped", "found": f"the device asks so: {why}", "todo": ""}


@check("contract.expectations", "correct what Device.expectations() returns")
def _expectations(session: Session) -> str:
    given = session.device.expectations()
    if given.tolerances or given.skips:
        wrong = given.problems(tuple(check_names(quick=False)))
        expect(not wrong, "; ".join(wrong))
    skipped = [f"{pattern} ({why})" for pattern, why in given.skips.items()]
    return f"left out: {', '.join(skipped)}" if skipped else "no check is left out"


def _timed(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def timed() -> dict[str, Any]:
        start = time.perf_counter()
        torch.manual_seed(0)
        return {**run(), "seconds": round(time.perf_counter() - start, 3)}

    return timed


SCHEMA: Final = 1
_SUITE: Final = "omnicomp.testing.conformance.suite:jobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a check found."""

    name: str  # `group.subject`
    verdict: str  # `passed`, `failed`, `crashed` (the interpreter ended, or did not answer) or `skipped`
    found: str  # one sentence
    todo: str = ""  # what to do; empty unless it failed
    seconds: float = 0.0  # wall time

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the device."""
        return self.verdict in ("passed", "skipped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All checks of a device."""

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
            raise wrong_value("group", group, known=known)
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
