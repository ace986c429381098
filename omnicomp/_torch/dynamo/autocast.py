"""Autocast as Dynamo writes it into a graph: two calls, of which the second takes the first's result."""

from typing import Final

from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

__all__ = ["ENTER", "EXIT"]

ENTER: Final = _enter_autocast
"""Called with the device type, the dtype or None, whether it is on, and whether it caches casts."""

EXIT: Final = _exit_autocast
"""Called with what `ENTER` returned."""
