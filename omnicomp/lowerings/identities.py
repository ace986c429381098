"""What the compilers beside Inductor are known by in the keys of the compile caches: versions, settings and sources.

What a compiler refused is cached with what was built in its place, so that another version of it has to be another key.
"""

import functools
import hashlib
import sys
from pathlib import Path

from omnicomp.devices import Device
from omnicomp.devices.inductor.digest import code_digest
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.lowerings.engines.inputs import engines_of
from omnicomp.options.policy import Policy

__all__ = ["compiler_identities"]


def compiler_identities(policy: Policy, device: Device) -> dict[str, tuple[str, str]]:
    """The engines that a policy names, and the device's own compiler: by name, a version to show and a hash."""
    found = {name: _engine(name) for name in engines_of(policy)}
    if "device" in device.lowerings:
        version = device.compiler_version()
        found["device"] = version, _digest(type(device), version)
    return found


def _engine(name: str) -> tuple[str, str]:
    try:
        engine = resolve_engine(name)
    except EngineError as error:
        return str(error), str(error)
    missing = engine.absence()
    version = missing or engine.version()
    return version, _digest(type(engine), version, "" if missing else engine.state())


def _digest(cls: type, *values: str) -> str:
    return code_digest([cls], [*values, _package_digest(cls.__module__.partition(".")[0])])


@functools.cache
def _package_digest(name: str) -> str:
    """Hash of the sources of a package, as what compiles is often beside the class that calls it."""
    value = hashlib.sha256()
    for folder in getattr(sys.modules.get(name), "__path__", ()) if name != "omnicomp" else ():
        for path in sorted(Path(folder).rglob("*.py")):
            value.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return value.hexdigest()
