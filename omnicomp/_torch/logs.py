"""torch's registry of loggers, by which `TORCH_LOGS="omnicomp"` and `torch._logging.set_logs` work.

If `TORCH_LOGS` names omnicomp, torch has found the package by itself when it was imported, and set the levels of its
loggers; to know the name beforehand would take an import of omnicomp before torch.
"""

from torch._logging._internal import log_registry, register_log

__all__ = ["register"]


def register(name: str) -> None:
    """Make a logger known to torch by its name: to its help and to its Python interface."""
    if not log_registry.is_log(name):
        register_log(name, name)
