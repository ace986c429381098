"""What the compilers beside Inductor are known by in the keys of the compile caches: versions, settings and sources.

What a compiler refused is cached with what was built in its place, so that another version of it has to be another key.
"""

from omnicomp.devices import Device
from omnicomp.errors import EngineError
from omnicomp.options.policy import Policy, engines_of


def compiler_identities(policy: Policy, device: Device) -> dict[str, tuple[str, str]]:
    """The engines that a policy names, and the device's own compiler: by name, a version to show and a hash."""
    found = {name: _engine(name) for name in engines_of(policy)}
    if "device" in device.lowerings:
        version = device.compiler_version()
        found["device"] = version, _digest(type(device), version)
    return found


def _engine(name: str) -> tuple[str, str]:
    from omnicomp.lowerings.engines import resolve_engine

    try:
        engine = resolve_engine(name)
    except EngineError as error:
        return str(error), str(error)
    missing = engine.absence()
    version = missing or engine.version()
    return version, _digest(type(engine), version, "" if missing else engine.state())


def _digest(cls: type, *values: str) -> str:
    from omnicomp.devices.inductor.spec import code_digest, package_sources

    return code_digest([cls], [*values, package_sources(cls.__module__.partition(".")[0])])
