"""Conformance checks: functions of a session with the device, which return what they found, or raise."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from omnicomp._torch.devices.dispatcher import kernel_of
from omnicomp.devices import Device
from omnicomp.errors import first_line


class CheckFailed(Exception):
    """A device does not keep what was checked."""

    def __init__(self, found: str, todo: str = "") -> None:
        super().__init__(found)
        self.found, self.todo = found, todo


class CheckSkipped(Exception):
    """A check does not apply to this device; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A device under check."""

    device: Device
    quick: bool = True
    check: str = ""

    @property
    def type(self) -> str:
        """The device type, for example `cuda`."""
        return self.device.type

    @property
    def module(self) -> Any:
        """`torch.<type>`, or None."""
        return getattr(torch, self.type, None)

    @property
    def is_host(self) -> bool:
        """Whether it is the CPU itself, which is what the others are compared with."""
        return self.type == "cpu"

    @property
    def count(self) -> int:
        """How many devices there are."""
        return max(1, self.device.capabilities().device_count)

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return tensor.detach().clone() if self.is_host else tensor.detach().to(self.type)

    def close(self, got: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str = "") -> None:
        """Check that a result is the CPU's, within the suite's tolerance or the one that the device declares.

        Raises:
            AssertionError: it is not; the message begins with `what`.
        """
        atol, rtol = self.device.expectations().tolerance(self.check) or (tolerance, tolerance)
        told: Any = (lambda text: f"{what}: {text}") if what else None
        torch.testing.assert_close(got.cpu(), wanted, atol=atol, rtol=rtol, equal_nan=True, msg=told)

    @property
    def declared(self) -> str:
        """The tolerance that the device declares for the check, to be shown; empty if none."""
        bounds = self.device.expectations().tolerance(self.check)
        return (
            "" if bounds is None else f"; within atol {bounds[0]:g} and rtol {bounds[1]:g}, which the device declares"
        )

    def require(self, name: str) -> Any:
        """A member of the device module; the check is left out where there is none."""
        found = getattr(self.module, name, None)
        if found is None:
            raise CheckSkipped(f"torch.{self.type} has no {name}")
        return found

    def usable(self, after: str) -> None:
        """Check that the device still computes.

        Raises:
            CheckFailed: it does not.
        """
        try:
            got = (torch.arange(8.0, device=self.type) + 1).sum().item()
        except Exception as error:
            raise CheckFailed(
                f"after {after} nothing runs any more: {first_line(error)}", "leave the driver's state as it was"
            ) from error
        expect(got == 36.0, f"after {after}, 1 + ... + 8 is {got}", "leave the driver's state as it was")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A check."""

    name: str
    todo: str
    run: Callable[[Session], str]
    quick: bool = True


CHECKS: Final[dict[str, Check]] = {}
"""All checks but those of single operators, in the order in which the modules declare them."""


def check(
    name: str, todo: str, *, quick: bool = True
) -> Callable[[Callable[[Session], str]], Callable[[Session], str]]:
    """Declare a check: a function of a `Session` that returns what it found."""

    def declare(run: Callable[[Session], str]) -> Callable[[Session], str]:
        CHECKS[name] = Check(name=name, todo=todo, run=run, quick=quick)
        return run

    return declare


def expect(holds: Any, found: str, todo: str = "") -> None:
    """Fail the check unless something holds.

    Raises:
        CheckFailed: it does not.
    """
    if not holds:
        raise CheckFailed(found, todo)


def run_check(found: Check, session: Session) -> dict[str, Any]:
    """Run one check.

    Returns:
        `verdict` (`passed`, `failed` or `skipped`), `found` and `todo`.
    """
    session = dataclasses.replace(session, check=found.name)
    try:
        return {"verdict": "passed", "found": found.run(session) + session.declared, "todo": ""}
    except CheckSkipped as skipped:
        return {"verdict": "skipped", "found": str(skipped), "todo": ""}
    except CheckFailed as failed:
        return {"verdict": "failed", "found": failed.found, "todo": failed.todo or found.todo}
    except Exception as error:  # noqa: BLE001 - becomes what was found
        return {"verdict": "failed", "found": first_line(error), "todo": found.todo}


def on_device(session: Session, value: Any) -> None:
    """Check that every tensor of a structure is on the device.

    Raises:
        CheckFailed: one is not.
    """
    found = {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    expect(found <= {session.type}, f"results are on {', '.join(sorted(found))}", "return results on the device")


def claimed_natively(session: Session, counted: Mapping[str, int]) -> list[str]:
    """Operators that ran on the CPU though the dispatcher has a kernel of the device's for them."""
    return [name for name in counted if kernel_of(name, session.type).kernel == "native"]
