"""omnicomp: a torch.compile backend that can say what ran where, and why.

    model = torch.compile(model, backend="omni")

needs no import of this package. `omnicomp.audit()` then tells the whole story of the process, `omnicomp.override`
registers a hand-written kernel, and `omnicomp.timeline` has the events themselves.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

# The package itself, so that `omnicomp.timeline.events()` needs no import.
from omnicomp import timeline as timeline
from omnicomp.errors import (
    AcknowledgeError,
    DeviceError,
    FallbackError,
    LoweringError,
    OmnicompError,
    OptionError,
    OverrideError,
    PassError,
    RanksError,
    ReportError,
    SaveError,
    TimelineError,
)

if TYPE_CHECKING:
    from omnicomp import weights
    from omnicomp.audit import Audit, audit, record
    from omnicomp.backend.artefacts import load, save
    from omnicomp.backend.background import wait
    from omnicomp.backend.package import load_package, package
    from omnicomp.backend.pipeline import omni
    from omnicomp.backend.wrap_module import wrap_module
    from omnicomp.devices import resolve_device
    from omnicomp.lowerings.overrides.registry import override
    from omnicomp.options.dtype_policy import DtypePolicy
    from omnicomp.options.policy import Policy

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
    "RanksError",
    "ReportError",
    "SaveError",
    "TimelineError",
    "__version__",
    "audit",
    "load",
    "load_package",
    "omni",
    "override",
    "package",
    "record",
    "resolve_device",
    "save",
    "timeline",
    "wait",
    "weights",
    "wrap_module",
]

# What needs torch's compiler is imported when it is first used: reading a timeline needs no torch at all. Reports need
# none either, but a program that compiles may never ask for one.
_LAZY: Final = {
    "Audit": "omnicomp.audit",
    "record": "omnicomp.audit",
    "load": "omnicomp.backend.artefacts",
    "save": "omnicomp.backend.artefacts",
    "package": "omnicomp.backend.package",
    "load_package": "omnicomp.backend.package",
    "omni": "omnicomp.backend.pipeline",
    "override": "omnicomp.lowerings.overrides.registry",
    "Policy": "omnicomp.options.policy",
    "DtypePolicy": "omnicomp.options.dtype_policy",
    "resolve_device": "omnicomp.devices",
    "wait": "omnicomp.backend.background",
    "wrap_module": "omnicomp.backend.wrap_module",
}


def __getattr__(name: str) -> Any:
    """Import the part of the public API that needs torch when it is asked for."""
    if name == "__version__":
        try:
            version = importlib.metadata.version("omnicomp")
        except importlib.metadata.PackageNotFoundError:
            version = "checkout"
        globals()["__version__"] = version
        return version
    if name == "weights":
        return importlib.import_module("omnicomp.weights")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'omnicomp' has no attribute {name!r}")


class _Package(ModuleType):
    """The package: `audit` is the function, whichever module of the subpackage of that name was imported."""

    @property
    def audit(self) -> Any:
        """Make a report; see `omnicomp.audit.audit`."""
        return importlib.import_module("omnicomp.audit").audit

    @audit.setter
    def audit(self, module: ModuleType) -> None:
        """The import system names the subpackage here."""


sys.modules[__name__].__class__ = _Package


# Modules that others import by name and that have moved: the former name works for one release, with a warning.
_MOVED: Final = {
    "omnicomp.audit.trace": "omnicomp.audit.views.trace",
    "omnicomp.audit.tree": "omnicomp.audit.views.tree",
    "omnicomp.dtypes": "omnicomp.options.dtype_policy",
    "omnicomp.graphs": "omnicomp.analysis.nodes",
    "omnicomp.progress": "omnicomp.timeline.progress_line",
    "omnicomp.pytest_plugin": "omnicomp.testing.pytest_plugin",
    "omnicomp.rules": "omnicomp.options.placement_rules",
    "omnicomp.speculation": "omnicomp.passes.assumptions",
    "omnicomp.sim": "omnicomp.devices.sim",
    "omnicomp.wrap": "omnicomp.backend.wrap_module",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its former name, and gives the module that it is now."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of a former name, or None for every other name."""
        return importlib.util.spec_from_loader(fullname, self) if self._now(fullname) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Import the module by the name that it has now."""
        now = self._now(spec.name)
        warnings.warn(f"{spec.name} is {now} now; the former name goes in 0.3", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(now)
        self._specs[now] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run; importlib wrote the former name into its spec."""
        module.__spec__ = self._specs.pop(module.__name__)

    @staticmethod
    def _now(name: str) -> str:
        for former, now in _MOVED.items():
            if name == former or name.startswith(former + "."):
                return now + name.removeprefix(former)
        return ""


# Before the finder of files, which would make second copies of the modules inside of a package that moved.
sys.meta_path.insert(0, _MovedModules())
