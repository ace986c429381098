"""Checks of errors: what a device refuses comes as a Python exception, and the process goes on."""

from collections.abc import Callable

import torch

from omnicomp.errors import first_line
from omnicomp.testing.conformance.base import CheckSkipped, Session, check, expect

__all__: list[str] = []


def _refused(session: Session, what: str, call: Callable[[], object], *kinds: type[Exception]) -> str:
    try:
        call()
        session.device.synchronize()
    except kinds as error:
        session.usable(what)
        return first_line(error)
    except Exception as error:  # noqa: BLE001 - becomes the failure
        expect(False, f"{what} raises {first_line(error)} instead of {kinds[0].__name__}")
    expect(False, f"{what} raises nothing")
    return ""


@check("errors.unknown_index", "raise RuntimeError for a device index that is not there")
def _unknown_index(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("torch takes any index for the host")
    index = session.count + 7
    what = f"a tensor on {session.type}:{index}"
    return _refused(session, what, lambda: torch.empty(1, device=f"{session.type}:{index}"), RuntimeError)


@check("errors.out_of_memory", "throw c10::OutOfMemoryError (OutOfMemoryError in ATen) from the allocator")
def _out_of_memory(session: Session) -> str:
    # The host's allocator throws a plain error; that is torch's own, not the device's.
    kind = RuntimeError if session.is_host else torch.OutOfMemoryError
    return _refused(
        session,
        "an allocation of 2**55 bytes",
        lambda: torch.empty(1 << 53, dtype=torch.float32, device=session.type),
        kind,
    )


@check("errors.mixed_devices", "check in kernels and in the fallback that all tensors are on the device")
def _mixed(session: Session) -> str:
    if session.is_host:
        raise CheckSkipped("the host has no other device to mix with")
    here, there = session.on(torch.ones(3, 3)), torch.ones(3, 3)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: here + there,
        "mm": lambda: here @ there,
        "where": lambda: torch.where(here > 0, here, there),
        "cdist": lambda: torch.cdist(here, there),
        "cat": lambda: torch.cat([here, there]),
        "linear": lambda: torch.nn.functional.linear(here, there),
    }
    for name, call in calls.items():
        _refused(session, f"{name} of a tensor on {session.type} and one on the CPU", call, RuntimeError)
    torch.testing.assert_close((here + torch.tensor(2.0)).cpu(), torch.full((3, 3), 3.0))
    return f"{len(calls)} operators refuse it; a number on the CPU is taken"


@check("errors.bad_arguments", "check arguments as torch's own kernels do, and throw")
def _bad_arguments(session: Session) -> str:
    a, b = session.on(torch.ones(2, 3)), session.on(torch.ones(2, 3))
    _refused(session, "a product of 2x3 and 2x3", lambda: a @ b, RuntimeError)
    _refused(session, "a view of 6 elements as 4", lambda: a.view(4), RuntimeError)
    _refused(session, "a reduction over dimension 5", lambda: a.sum(5), IndexError)
    return _refused(session, "an index out of bounds", lambda: a[5], IndexError)


def _fault(session: Session, kind: str, call: Callable[[], object], *kinds: type[Exception]) -> str:
    inject, clear = session.require("inject_fault"), session.require("clear_faults")
    call()
    inject(kind)
    try:
        return _refused(session, f"a fault of the driver in {kind}", call, *kinds)
    finally:
        clear()


@check("errors.fault_allocate", "throw OutOfMemoryError when the driver gives no memory")
def _fault_allocate(session: Session) -> str:
    return _fault(session, "allocate", lambda: torch.empty(1 << 20, device=session.type), torch.OutOfMemoryError)


@check("errors.fault_copy", "throw when the driver's copy fails, and free what was made for it")
def _fault_copy(session: Session) -> str:
    return _fault(session, "copy", lambda: torch.ones(8).to(session.type), RuntimeError)


@check("errors.fault_kernel", "throw when a kernel fails, at the latest at the next synchronize()")
def _fault_kernel(session: Session) -> str:
    x = session.on(torch.ones(8))
    return _fault(session, "kernel", lambda: x + x, RuntimeError)


@check("errors.fault_synchronize", "throw from synchronize() when the driver's fails")
def _fault_synchronize(session: Session) -> str:
    return _fault(session, "synchronize", session.device.synchronize, RuntimeError)
