"""A device that torch knows and omnicomp has no file for: it runs on what torch itself offers for it."""

import dataclasses
from typing import Any

import torch

from omnicomp._torch.inductor import has_inductor
from omnicomp.devices.base import Capabilities

__all__ = ["GenericDevice"]


@dataclasses.dataclass(frozen=True)
class GenericDevice:
    """Inductor if a code generator is registered for the device type, else eager."""

    type: str

    @property
    def lowerings(self) -> tuple[str, ...]:
        """`inductor` only where it has a code generator."""
        return ("override", "inductor", "eager") if has_inductor(self.type) else ("override", "eager")

    def is_available(self) -> bool:
        """A tensor of that type exists, or it would not have been asked for."""
        return True

    def unavailable_reason(self) -> str:
        """Never unavailable."""
        return ""

    def capabilities(self) -> Capabilities:
        """Only what is certain: float32."""
        return Capabilities(
            compute_dtypes=(torch.float32,),
            storage_dtypes=(torch.float32,),
            inductor=has_inductor(self.type),
            device_count=1,
            name=self.type,
        )

    def synchronize(self) -> None:
        """Through the device's module, where it has one."""
        module: Any = getattr(torch, self.type, None)
        if module is not None and hasattr(module, "synchronize"):
            module.synchronize()

    def memory(self) -> dict[str, int]:
        """Unknown."""
        return {}
