"""The dtypes that the simulated device is declared to have, where it is to play a smaller one."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp._torch.inductor.compile_fx import has_inductor
from omnicomp.devices import sim
from omnicomp.devices.base import Capabilities, Device
from omnicomp.errors import DeviceError

VARIABLE = "OMNICOMP_SIM_DTYPES"


def declared_dtypes() -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]] | None:
    """Dtypes of `OMNICOMP_SIM_DTYPES`: those computed in, then, behind a `/`, those stored besides.

    `float32,bfloat16/int32,int64` computes in two floats and stores two integers too. Booleans are always stored.

    Returns:
        Computed dtypes, and all stored ones, which include them; None if the variable is not set.

    Raises:
        DeviceError: a name is no dtype of torch's.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    computed, _, besides = text.partition("/")
    compute = _parse(computed)
    return compute, tuple(dict.fromkeys((*compute, *_parse(besides), torch.bool)))


def _parse(names: str) -> tuple[torch.dtype, ...]:
    found: list[torch.dtype] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise DeviceError(f"{VARIABLE}: torch has no dtype {name!r}; write as in float32,bfloat16/int32,int64")
        found.append(dtype)
    return tuple(found)


_FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_STORED: Final = (
    *_FLOATS,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class SimDevice(Device):
    """A device in the host's memory that behaves as one of its own; see `omnicomp.devices.sim`."""

    type = "sim"

    def __init__(
        self, compute_dtypes: Sequence[torch.dtype] | None = None, storage_dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Stand for the simulated devices, with all dtypes or with some.

        Args:
            compute_dtypes: the only floating-point and complex dtypes that it computes in; None for what
                `OMNICOMP_SIM_DTYPES` says, or all.
            storage_dtypes: what it stores besides, booleans always; asked only if `compute_dtypes` is given. To have
                torch refuse the others as well, pass them all to `torch.sim.set_dtypes`.
        """
        self._declared: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]] | None = None
        if compute_dtypes is not None:
            compute = tuple(compute_dtypes)
            self._declared = compute, tuple(dict.fromkeys((*compute, *(storage_dtypes or ()), torch.bool)))

    def is_available(self) -> bool:
        """Whether `omnicomp.devices.sim.enable` was called in this process. Builds nothing."""
        return sim.is_enabled()

    def unavailable_reason(self) -> str:
        """What to call, or what building it lacks."""
        return sim.unavailable_reason()

    def capabilities(self) -> Capabilities:
        """All that the host's kernels compute in, or what was declared, which is then exhaustive.

        Raises:
            DeviceError: `OMNICOMP_SIM_DTYPES` names something that is no dtype.
        """
        module: Any = sys.modules["torch.sim"]
        declared = self._declared or declared_dtypes()
        compute, stored = declared or (_FLOATS, _STORED)
        inductor = has_inductor(self.type)
        return Capabilities(
            compute_dtypes=compute,
            storage_dtypes=stored,
            inductor=inductor,
            compiler="C++" if inductor else "",
            memory_bytes=module.get_device_properties().total_memory,
            device_count=module.device_count(),
            name=module.get_device_name(),
            exhaustive=declared is not None,
        )
