"""What a user may ask for: options of the backend, dtype policies, placement rules, fallback limits."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from omnicomp.options.dtype_policy import DtypePolicy
    from omnicomp.options.policy import Policy

__all__ = ["DtypePolicy", "Policy"]

_LAZY: Final = {"DtypePolicy": "omnicomp.options.dtype_policy", "Policy": "omnicomp.options.policy"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: the audit reads limits without torch."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'omnicomp.options' has no attribute {name!r}")
