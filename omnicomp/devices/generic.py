"""A device that torch knows and omnicomp has no file for: it runs on what torch itself offers for it."""

import torch

from omnicomp._torch.inductor.compile_fx import has_inductor
from omnicomp.devices.base import Capabilities, Device

__all__ = ["GenericDevice"]


class GenericDevice(Device):
    """Inductor if a code generator is registered for the device type, else eager."""

    def __init__(self, type: str) -> None:
        """Stand for a device type.

        Args:
            type: as torch names it.
        """
        self.type = type

    def is_available(self) -> bool:
        """A tensor of that type exists, or it would not have been asked for."""
        return True

    def capabilities(self) -> Capabilities:
        """Only float32 is certain."""
        return Capabilities(
            compute_dtypes=(torch.float32,),
            storage_dtypes=(torch.float32,),
            inductor=has_inductor(self.type),
            device_count=1,
            name=self.type,
        )
