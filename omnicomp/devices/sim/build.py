"""Builds the driver of the simulated device on first use, and caches it."""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from omnicomp._torch.inductor import store
from omnicomp.errors import DeviceError

SOURCES: Final = Path(__file__).parent / "csrc"
_FLAGS: Final = ("-O1", "-g0", "-w")
_LEVER: Final = "make it yours and writable for you alone, or name another folder in OMNICOMP_CACHE_DIR"
_HINT: Final = "the simulated device is built on first use, which needs a C++ compiler, Python's headers and ninja"


def _sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def _compiler() -> str:
    """The compiler that torch will call, with its version."""
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        return name
    result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return f"{path} {result.stdout.splitlines()[0] if result.stdout else ''}"


def build_folder() -> Path:
    """Where the driver is kept for this torch, these sources, this compiler and this Python."""
    digest = hashlib.sha256()
    for part in (torch.__version__, str(torch.version.git_version), _compiler(), sys.version, *_FLAGS):
        digest.update(part.encode() + b"\0")
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return store.folder() / "sim" / digest.hexdigest()[:16]


def _name(folder: Path) -> str:
    return f"omnicomp_sim_{folder.name}"


def _library(folder: Path) -> Path:
    return folder / f"{_name(folder)}.so"


def _complete(folder: Path) -> bool:
    return (folder / "complete").exists() and _library(folder).exists()


def is_built() -> bool:
    """Whether the driver is there, so that loading it takes no compiler and no time."""
    return _complete(build_folder())


def missing() -> tuple[str, ...]:
    """What building needs and this machine does not have, each with what to do about it."""
    found: list[str] = []
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        found.append(f"no C++ compiler: {compiler!r} is not in PATH; install one (g++ or clang++), or name it in CXX")
    if shutil.which("ninja", path=_path()) is None:
        found.append("no ninja in PATH; `pip install omnicomp[sim]`")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        found.append(f"no headers of Python: {headers} is not there; install Python's development package")
    return tuple(found)


def _path() -> str:
    """Where programs are looked for: also beside Python, as a virtual environment need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def load_driver(say: Callable[[str], object] | None = None) -> ModuleType:
    """Build the driver if it is not there yet, and load it.

    Safe against several processes that build at once: the others wait for the first one. A build that was killed is
    made again.

    Raises:
        DeviceError: something needed for the build is missing, or the compiler refused the sources.
    """
    folder = build_folder()
    if not _complete(folder):
        say = say or _to_stderr
        try:
            store.make_folder(folder)
            _check(folder)
            with open(folder / "building", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _complete(folder):
                    _build(folder, say)
                    _library(folder).chmod(0o700)
        except OSError as error:
            raise DeviceError(f"the simulated device can't be built in {folder}: {error}; {_LEVER}") from error
    try:
        _check(folder, _library(folder))
    except OSError as error:
        raise DeviceError(f"the simulated device can't be loaded from {folder}: {error}; {_LEVER}") from error
    return _import(folder)


def _check(folder: Path, *files: Path) -> None:
    """Refuse a folder in which another user may have put code, or may before it is loaded.

    Raises:
        OSError: one of the files, or a folder on the way to them, is not trusted or not there.
    """
    own = (*files, folder, *folder.parents[:2])
    for path in (*own, *folder.absolute().parents[2:]):
        store.check_trusted(path.stat(), path, group=path in own)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _build(folder: Path, say: Callable[[str], object]) -> None:
    lacking = missing()
    if lacking:
        raise DeviceError(f"{_HINT}: {'; '.join(lacking)}")
    from torch.utils import cpp_extension

    say(f"omnicomp.devices.sim: building the simulated device in {folder} (once; about half a minute)")
    start = time.perf_counter()
    (folder / "lock").unlink(missing_ok=True)  # torch's own lock, left by a build that was killed; we hold another one
    try:
        with _programs_found():
            cpp_extension.load(
                name=_name(folder),
                sources=[str(SOURCES / "all.cpp")],
                extra_cflags=list(_FLAGS),
                build_directory=str(folder),
            )
    except (RuntimeError, subprocess.CalledProcessError, ImportError) as error:
        raise DeviceError(f"the simulated device can't be built: {error}") from error
    (folder / "complete").write_text(f"{torch.__version__}\n{_compiler()}\n", encoding="utf-8")
    say(f"omnicomp.devices.sim: built in {time.perf_counter() - start:.0f} s")


@contextlib.contextmanager
def _programs_found() -> Generator[None]:
    """Inside, programs beside Python are found; what another thread sets of the environment meanwhile stays."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = _path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before


def _import(folder: Path) -> ModuleType:
    name = _name(folder)
    if name in sys.modules:
        return sys.modules[name]
    loader = importlib.machinery.ExtensionFileLoader(name, str(_library(folder)))
    spec = importlib.util.spec_from_file_location(name, str(_library(folder)), loader=loader)
    if spec is None:
        raise DeviceError(f"the simulated device can't be loaded from {folder}")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"the simulated device can't be loaded from {folder}: {error}") from error
    sys.modules[name] = module
    return module
