"""Suites of jobs for processes of their own, and kernels of torch that misbehave."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from omnicomp.errors import OmnicompError

_kept: list[Any] = []


def jobs(hang: float = 0.0) -> dict[str, Callable[[], dict[str, Any]]]:
    def crash() -> dict[str, Any]:
        os.write(2, b"the driver says good-bye\n")
        ctypes.string_at(0)
        return {}

    def fail() -> dict[str, Any]:
        raise ValueError("no such thing")

    def wait() -> dict[str, Any]:
        time.sleep(hang)
        return {"pid": os.getpid()}

    def fine() -> dict[str, Any]:
        return {"pid": os.getpid()}

    return {"first": fine, "fail": fail, "crash": crash, "wait": wait, "last": fine}


def refused() -> dict[str, Any]:
    raise OmnicompError("there is no suite today")


def crash_in_exp() -> None:
    """Let `exp` on the CPU end the interpreter."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp.out", lambda x, *, out: os.abort(), "CPU", allow_override=True)
    _kept.append(library)


def crash_in_exp_of_sim() -> None:
    """Let `exp` on the simulated device end the interpreter."""
    import omnicomp.devices.sim

    omnicomp.devices.sim.enable()
    library = torch.library.Library("aten", "IMPL")
    library.impl("exp.out", lambda x, *, out: os.abort(), "PrivateUse1", allow_override=True)
    _kept.append(library)
