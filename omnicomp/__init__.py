"""omnicomp: a torch.compile backend that can say what ran where, and why.

    model = torch.compile(model, backend="omni")

needs no import of this package. `omnicomp.audit()` then tells the whole story of the process, `omnicomp.override`
registers a hand-written kernel, and `omnicomp.timeline` has the events themselves.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, Final

from omnicomp import timeline as timeline  # the package itself, so that `omnicomp.timeline.events()` needs no import
from omnicomp.audit import Audit, audit
from omnicomp.errors import (
    AcknowledgeError,
    DeviceError,
    FallbackError,
    LoweringError,
    OmnicompError,
    OptionError,
    OverrideError,
    PassError,
    ReportError,
    TimelineError,
)

if TYPE_CHECKING:
    from omnicomp import weights
    from omnicomp.backend import omni
    from omnicomp.devices import resolve_device
    from omnicomp.dtypes import DtypePolicy
    from omnicomp.lowerings.overrides.registry import override
    from omnicomp.options import Policy
    from omnicomp.wrap import wrap_module

    __version__: str

__all__ = [
    "AcknowledgeError",
    "Audit",
    "DeviceError",
    "DtypePolicy",
    "FallbackError",
    "LoweringError",
    "OmnicompError",
    "OptionError",
    "OverrideError",
    "PassError",
    "Policy",
    "ReportError",
    "TimelineError",
    "__version__",
    "audit",
    "omni",
    "override",
    "resolve_device",
    "timeline",
    "weights",
    "wrap_module",
]

# What needs torch's compiler is imported when it is first used: reading a timeline needs no torch at all.
_LAZY: Final = {
    "omni": "omnicomp.backend",
    "override": "omnicomp.lowerings.overrides.registry",
    "Policy": "omnicomp.options",
    "DtypePolicy": "omnicomp.dtypes",
    "resolve_device": "omnicomp.devices",
    "wrap_module": "omnicomp.wrap",
}


def __getattr__(name: str) -> Any:
    """Import the part of the public API that needs torch when it is asked for."""
    if name == "__version__":
        try:
            return importlib.metadata.version("omnicomp")
        except importlib.metadata.PackageNotFoundError:
            return "checkout"
    if name == "weights":
        return importlib.import_module("omnicomp.weights")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'omnicomp' has no attribute {name!r}")
