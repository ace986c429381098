"""`omnicomp doctor`: one line for each thing that omni needs on this machine, with what to do about it."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

import omnicomp
from omnicomp import passes
from omnicomp._torch.devices import privateuse
from omnicomp._torch.dynamo import registrations
from omnicomp._torch.inductor import store
from omnicomp._torch.inductor.compile_fx import cache_dir
from omnicomp.devices import GROUP, Device, device_names, load_errors, resolve_device
from omnicomp.devices.cpu import instruction_set
from omnicomp.errors import DeviceError, first_line
from omnicomp.lowerings.engines import Engine, resolve_engine
from omnicomp.options.checks import engine_names
from omnicomp.options.dtype_policy import PRESET_OF, short
from omnicomp.options.policy import Policy
from omnicomp.passes.dtypes.resolve import measured, slowness
from omnicomp.safety.escapes import one_line
from omnicomp.timeline.sinks.jsonl import ENVIRONMENT_VARIABLE, expand, opened

OLDEST_TORCH: Final = (2, 11)
OLDEST_PYTHON: Final = (3, 10)
_BACKENDS: Final = "torch_dynamo_backends"
# What most readers are here for: each says by itself why it is not available.
_ALWAYS: Final = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    status: str
    found: str
    todo: str = ""


def enable_simulated(device: str | None) -> None:
    """Enable `sim`, building it if it never was, if that is the device to check and the machine can build it.

    For a process that looks at nothing else: it makes `sim` torch's accelerator. What is missing to build it is told by
    the checks.

    Raises:
        DeviceError: it can't be built for another reason.
    """
    if device is None or device.split(":", 1)[0] != "sim":
        return
    import omnicomp.devices.sim
    from omnicomp.devices.sim import build

    if build.is_built() or not build.missing():
        omnicomp.devices.sim.enable()


def examine(device: str | None = None) -> list[Check]:
    """Run all checks.

    Args:
        device: check this device only, and require it; None checks every device that omnicomp knows.

    Raises:
        DeviceError: omnicomp knows no such device.
    """
    names = device_names()
    base = "" if device is None else device.split(":", 1)[0]
    if device is not None and base not in names and not privateuse.is_known(base):
        resolve_device(device)  # raises, and says what is known
    chosen = names if device is None else (base,)
    checks: list[Callable[[], Iterator[Check]]] = [_python, _torch, _omnicomp, _entry_point]
    if device is None:
        checks += [_device_check(name) for name in chosen if name in _ALWAYS]
        checks.append(lambda: _other_devices([name for name in chosen if name not in _ALWAYS]))
    else:
        checks.append(_device_check(base, required=True))
        checks.append(lambda: _pieces(base))
    checks += [_device_plugins, lambda: _triton(chosen), lambda: _compiler(chosen)]
    checks += [_passes, _overrides, _engines, _cache, _timeline, _attestation, _clash]
    return [check for run in checks for check in run()]


def to_text(checks: list[Check]) -> str:
    """One line per check, and one with what to do, if there is something."""
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.status:<8}{check.name:<{width}}  {check.found}")
        if check.todo:
            lines.append(f"{'':<8}{'':<{width}}  -> {check.todo}")
    return "\n".join(lines) + "\n"


def to_json(checks: list[Check]) -> str:
    """`{"schema": 1, "ok": bool, "checks": [{"name", "status", "found", "todo"}, ...]}`."""
    ok = all(check.status != "missing" for check in checks)
    return json.dumps({"schema": 1, "ok": ok, "checks": [dataclasses.asdict(c) for c in checks]}, indent=2) + "\n"


def _required(name: str, found: str, todo: str = "") -> Check:
    """A check of what omni can't do without: it is missing if there is something to do."""
    return Check(name=name, status="missing" if todo else "ok", found=found, todo=todo)


def _python() -> Iterator[Check]:
    old = sys.version_info[:2] < OLDEST_PYTHON
    found = f"{platform.python_version()} ({sys.executable})"
    yield _required("python", found, "use Python 3.10 or newer" if old else "")


def _torch() -> Iterator[Check]:
    parts = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield _required("torch", torch.__version__, "install torch 2.11 or newer" if parts < OLDEST_TORCH else "")


def _omnicomp() -> Iterator[Check]:
    version = omnicomp.__version__
    where = Path(omnicomp.__file__).parent
    if version == "checkout":
        todo = "install it with pip install -e ."
        yield Check(name="omnicomp", status="note", found=f"not installed, run from {where}", todo=todo)
    else:
        yield Check(name="omnicomp", status="ok", found=f"{version} ({where})")


def _entry_point() -> Iterator[Check]:
    name = 'backend "omni"'
    entries = list(importlib.metadata.entry_points(group=_BACKENDS, name="omni"))
    ours = [entry for entry in entries if entry.value == "omnicomp.backend.pipeline:omni"]
    others = ", ".join(sorted({entry.value for entry in entries} - {entry.value for entry in ours}))
    if not ours:
        found = f"the entry point omni of {_BACKENDS} is {others or 'not there'}"
        yield _required(name, found, "install omnicomp with pip install -e .")
        return
    try:
        ours[0].load()
    except Exception as error:  # noqa: BLE001 - that it can't be loaded is the answer
        found = f"{ours[0].value} can't be loaded ({first_line(error)})"
        yield _required(name, found, "install omnicomp's dependencies again")
        return
    if others:
        todo = "uninstall the other package: torch takes whichever it sees first"
        yield Check(name=name, status="note", found=f"also claimed by {others}", todo=todo)
    else:
        yield _required(name, f"entry point resolves to {ours[0].value}")


def _other_devices(names: Sequence[str]) -> Iterator[Check]:
    """Those that are there, each as by itself, and one line for all that are not."""
    absent: list[str] = []
    for name in names:
        found = list(_device_check(name)())
        if found[0].status == "note":
            absent.append(name)
        else:
            yield from found
    if absent:
        todo = "`omnicomp doctor --device NAME` says what is missing"
        yield Check(name="other devices", status="note", found=f"not available: {', '.join(absent)}", todo=todo)


def _device_check(name: str, *, required: bool = False) -> Callable[[], Iterator[Check]]:
    def check() -> Iterator[Check]:
        label = f"device {name}"
        if name not in device_names():
            found = "torch knows it, and omnicomp has no contract for it"
            broken = "".join(f" ({entry}: {why})" for entry, why in load_errors().items() if name in entry)
            todo = f"install the package that declares it in the entry-point group {GROUP}, or repair it{broken}"
            yield Check(name=label, status="missing", found=found, todo=todo)
            return
        try:
            device = resolve_device(name)
        except DeviceError as error:
            reason = str(error).split(": ", 1)[-1]
            yield Check(name=label, status="missing" if required else "note", found="not available", todo=reason)
            return
        try:
            can = _capabilities(device)
        except Exception as error:  # noqa: BLE001 - someone else's class, and a finding like any other
            found = f"{type(device).__name__}.capabilities() raises {first_line(error)}"
            yield Check(name=label, status="missing", found=found, todo="correct Device.capabilities()")
            return
        yield Check(name=label, status="ok", found=can)
        yield from _dtypes(device)
        yield from _limits(device)
        yield _registered(device)

    return check


def _capabilities(device: Device) -> str:
    can = device.capabilities()
    fast = ", ".join(str(dtype).removeprefix("torch.") for dtype in can.fast_dtypes)
    return "; ".join(
        [
            f"{can.device_count} x {can.name}" if can.name else str(can.device_count),
            f"fast dtypes: {fast or 'none beside float32'}",
            f"attention kernels: {', '.join(can.attention_kernels) or 'none'}",
            f"triton: {'yes' if can.triton else 'no'}",
            f"graph mode: {'yes' if can.graph_mode else 'no'}",
            f"lowerings: {', '.join(device.lowerings)}",
        ]
    )


def _dtypes(device: Device) -> Iterator[Check]:
    """What a low-precision `dtype_policy` brings: by the instructions of a CPU and a measured product."""
    if device.type != "cpu":
        return
    label = "dtypes on cpu"
    for dtype in (torch.bfloat16, torch.float16):
        slow, speed = slowness(dtype, device), measured(dtype)
        found = f"{short(dtype)}: {instruction_set(dtype)}; {speed}, {speed.ratio:.2g} times as fast"
        todo = f'keep dtype_policy="keep" or "auto" here, rather than "{PRESET_OF[dtype]}"' if slow else ""
        yield Check(name=label, status="note" if slow else "ok", found=found, todo=todo)


def _limits(device: Device) -> Iterator[Check]:
    """What a device's memory and its units for products reach, measured once."""
    if device.type not in ("cuda", "cpu"):
        return
    from omnicomp.devices.limits import limits

    label = f"limits of {device.type}"
    try:
        yield Check(name=label, status="ok", found=str(limits(device.type)))
    except RuntimeError as error:
        todo = "run this again while nothing else uses the device"
        yield Check(name=label, status="note", found=f"can't be measured ({first_line(error)})", todo=todo)


def _registered(device: Device) -> Check:
    label = f"inductor on {device.type}"
    found = registrations.inductor_registrations(device.type)
    absent = [name for name, value in found.items() if not value]
    text = ", ".join(f"{name} {value.rsplit('.', 1)[-1]}" for name, value in found.items() if value)
    if not absent:
        return Check(name=label, status="ok", found=text)
    needed = device.capabilities().inductor
    todo = "register the device with Inductor, or leave inductor out of its lowerings" if needed else ""
    missing = f"without {', '.join(absent)}" + (f" ({text})" if text else "")
    return Check(name=label, status="missing" if needed else "note", found=missing, todo=todo)


# Without these there is no device; the others are needed where Inductor is.
_ALWAYS_NEEDED: Final = ("device type", "device module", "device count")


def _pieces(name: str) -> Iterator[Check]:
    """What torch and Inductor have of one device, piece by piece."""
    from omnicomp.devices.inductor import registration

    try:
        compiled = resolve_device(name).capabilities().inductor
    except Exception:  # noqa: BLE001 - what is wrong with the device is a line of its own
        compiled = False
    for piece in registration(name):
        needed = compiled or piece.name in _ALWAYS_NEEDED
        status = "ok" if piece.ok else "missing" if needed else "note"
        yield Check(name=f"{name} {piece.name}", status=status, found=piece.found, todo=piece.lever)


def _device_plugins() -> Iterator[Check]:
    for name, reason in load_errors().items():
        todo = "repair or uninstall the package that declares it"
        yield Check(name=f"device plug-in {name}", status="note", found=f"can't be loaded: {reason}", todo=todo)


def _uses(names: tuple[str, ...], *, triton: bool) -> bool:
    """Whether an available device of `names` is compiled for by Triton, or by C++."""
    for name in names:
        try:
            can = resolve_device(name).capabilities()
        except Exception:  # noqa: BLE001, S112 - what is wrong with the device is a line of its own
            continue
        if can.inductor and triton != can.compiler.startswith("C++"):
            return True
    return False


def _triton(names: tuple[str, ...]) -> Iterator[Check]:
    needed = _uses(names, triton=True)
    if importlib.util.find_spec("triton") is None:
        todo = "install triton, the version that this torch asks for" if needed else "only needed for GPUs"
        yield Check(name="triton", status="missing" if needed else "note", found="not installed", todo=todo)
        return
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # noqa: BLE001 - that it can't be imported is the answer
        found = f"can't be imported ({first_line(error)})"
        todo = "install triton, the version that this torch asks for"
        yield Check(name="triton", status="missing" if needed else "note", found=found, todo=todo)
        return
    yield Check(name="triton", status="ok", found=str(triton.__version__))


def _compiler(names: tuple[str, ...]) -> Iterator[Check]:
    needed = _uses(names, triton=False)
    bad = "missing" if needed else "note"
    todo = "install g++ or clang, or name a compiler in the environment variable CXX"
    compiler = registrations.cpp_compiler()
    if not compiler:
        yield Check(name="C++ compiler", status=bad, found="none found", todo=todo)
        return
    try:
        result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(name="C++ compiler", status=bad, found=f"{compiler} does not run ({error})", todo=todo)
        return
    where = shutil.which(compiler) or compiler
    yield Check(name="C++ compiler", status="ok", found=f"{result.stdout.splitlines()[0]} ({where})")


def _passes() -> Iterator[Check]:
    """Those that other packages declare, each with its place in the order."""
    line, unusable = passes.pipeline(Policy())
    names = [item.name for item in line]
    for plugin in passes.plugins():
        if plugin.item is not None and plugin.item.name in names:
            index = names.index(plugin.item.name)
            text = (inspect.getdoc(type(plugin.item)) or "").split("\n", 1)[0]
            found = f"{plugin.origin}; runs behind {names[index - 1] if index else 'none'}; {text}".rstrip("; ")
            yield Check(name=f"pass {plugin.item.name}", status="ok", found=found)
    for plugin in unusable:
        todo = "repair or uninstall the package that declares it"
        yield Check(name=f"pass {plugin.name}", status="note", found=f"{plugin.origin}; {plugin.error}", todo=todo)


def _overrides() -> Iterator[Check]:
    from omnicomp.lowerings.overrides.registry import broken, registered

    for name, error in broken().items():
        todo = "repair or uninstall the package that declares it"
        yield Check(name=f"override plug-in {name}", status="note", found=f"can't be loaded: {error}", todo=todo)
    found = registered()
    if not found:
        yield Check(name="overrides", status="note", found="none registered", todo="")
    for item in found:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in item.dtypes) or "any dtype"
        where = f"{', '.join(item.devices) or 'any device'}; {dtypes}"
        yield Check(name=f"override {item.name}", status="ok", found=f"{where}; {item.doc}".rstrip("; "))


def _engines() -> Iterator[Check]:
    for name in engine_names():
        try:
            engine = resolve_engine(name)
            missing = engine.missing()
            found = missing or ", ".join([engine.version(), *_kind(engine)])
        except Exception as error:  # noqa: BLE001 - someone else's code, and a finding like any other
            missing, found = "broken", first_line(error)
        yield Check(name=f"engine {name}", status="note" if missing else "ok", found=found)


def _kind(engine: Engine) -> Iterator[str]:
    if len(engine.operators):  # some libraries say it themselves
        yield f"{len(engine.operators)} operators"
    yield "/".join(engine.clustering.devices)
    yield "training and inference" if engine.clustering.training else "inference"


def _cache() -> Iterator[Check]:
    folder = Path(cache_dir())
    problem = _unwritable(folder / "omnicomp-doctor")
    if problem:
        todo = "name a writable folder in TORCHINDUCTOR_CACHE_DIR"
        yield _required("cache", f"{folder} can't be written ({problem})", todo)
    else:
        yield _required("cache", f"{folder}, {_size(folder) / 2**20:.1f} MiB")
    for path in dict.fromkeys((folder, store.folder())):
        try:
            if path.exists():
                store.check_trusted(path.stat(), path)
        except PermissionError as error:
            todo = (
                "what is in it is run as code: name a folder of your own in TORCHINDUCTOR_CACHE_DIR, or chmod go-w it"
            )
            yield Check(name="cache", status="note", found=str(error), todo=todo)


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # another process cleans up; what is gone has no size
    return total


def _timeline() -> Iterator[Check]:
    pattern = os.environ.get(ENVIRONMENT_VARIABLE, "")
    found = f"{ENVIRONMENT_VARIABLE}={pattern}"
    if not pattern:
        yield _required("timeline", f"{ENVIRONMENT_VARIABLE} is not set; events stay in memory")
        return
    try:
        problem = _unwritable(expand(pattern))
    except RuntimeError as error:  # a user who does not exist
        problem = str(error)
    if problem:
        yield _required("timeline", one_line(f"{found} can't be written ({problem})"), "name a writable path")
    else:
        yield _required("timeline", one_line(found))


def _attestation() -> Iterator[Check]:
    """Whether the audit catches executables that lie about what they run."""
    from omnicomp.testing.audit_self_test import LIES, self_test

    wrong = self_test()
    if wrong:
        profiled = "; it can't see into a process that is profiled" if sys.getprofile() is not None else ""
        todo = "report this to omnicomp, with the versions above"
        yield Check(name="attestation", status="note", found="; ".join(wrong) + profiled, todo=todo)
    else:
        yield Check(name="attestation", status="ok", found=f"{len(LIES)} of {len(LIES)} planted lies were caught")


def _unwritable(path: Path) -> str:
    """Why a file can't be written, or empty; leaves no new file behind."""
    try:
        new = not path.exists()
        store.make_folder(path.parent)
        opened(path).close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # a name with a NUL
        return getattr(error, "strerror", None) or str(error)
    return ""


def _clash() -> Iterator[Check]:
    """A checkout's root has links `passes` and `lowerings`; imported by those names they are second copies."""
    package = Path(omnicomp.__file__).resolve().parent
    for name in ("passes", "lowerings"):
        spec: Any = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec is not None else []
        if any(Path(place).resolve() == package / name for place in places):
            yield Check(
                name=f"module {name}",
                status="note",
                found=f"import {name} would load a second copy of omnicomp.{name} from {places[0]}",
                todo=f"import omnicomp.{name} instead, or leave the checkout's root out of sys.path",
            )
