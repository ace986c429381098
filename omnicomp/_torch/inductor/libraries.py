"""C++ libraries that Inductor built, under names that another machine of the same kind finds them by.

Inductor names a library by a hash of its source and of the compiler's command line, with the folders of torch and
Python in it. A machine without a compiler can't write that line, and another environment writes another one. So each
library gets a second name, `identity`: source, settings, and `machine`. A library that came with an artefact is loaded
by it, before Inductor looks for a compiler or asks it what the processor can do.

A library is also written under another name and renamed: a process that is killed while its compiler writes would leave
half of a file, which Inductor loads, or takes for a processor without vector instructions.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch._inductor.config
from torch._inductor import cpp_builder
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, CppWrapperCodeCache
from torch._inductor.remote_cache import create_cache
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import should_use_remote_fx_graph_cache as _uses_remote

from omnicomp._torch.inductor import linking, store
from omnicomp._torch.inductor.store import JsonStore
from omnicomp.safety.privacy import logger

log = logger("omnicomp.libraries")

_KINDS: Final = (CppCodeCache, CppPythonBindingsCodeCache, CppWrapperCodeCache)
_MOST: Final = 4096
IDENTITY: Final = re.compile(r"[0-9a-f]{64}")

INDEX: Final = JsonStore[str]("libraries", str, str, files=_MOST)
"""By identity, where Inductor put the library that it built, relative to its cache folder."""

_used: Final[dict[str, Path]] = {}
_sent: Final[set[str]] = set()


def watch() -> None:
    """Have Inductor's libraries named, found by name, and written as a whole; once a process."""
    if not hasattr(_watched, "before"):
        _watched.before = CppCodeCache.load_async.__func__  # type: ignore[attr-defined]
        CppCodeCache.load_async = classmethod(_watched)  # type: ignore[assignment, method-assign]
        cpp_builder.CppBuilder.build = _whole(cpp_builder.CppBuilder.build)  # type: ignore[method-assign]


def built_here(device: str) -> contextlib.AbstractContextManager[None]:
    """Inside, C++ is built in this process and not in Inductor's compile workers, as `watch` has it written."""
    return torch._inductor.config.patch({"compile_threads": 1} if device == "cpu" else {})  # type: ignore[attr-defined]


def used() -> dict[str, Path]:
    """The libraries that this process loaded, by identity."""
    return {name: path for name, path in _used.items() if path.is_file()}


def kept() -> dict[str, Path]:
    """The libraries in the cache folder, by identity: those built here, and those that came with an artefact."""
    found = {name: Path(cache_dir()) / value for name, value in INDEX.all() if IDENTITY.fullmatch(name)}
    found.update((path.stem, path) for path in INDEX.folder.glob("*.so"))
    return {name: path for name, path in found.items() if path.is_file()}


def put(name: str, content: bytes) -> None:
    """Keep a library that came with an artefact.

    Raises:
        OSError: it can't be written.
    """
    store.write_whole(INDEX.folder / f"{name}.so", content, _MOST)


@functools.cache
def machine() -> dict[str, str]:
    """What compiled code depends on besides torch: Python, the platform, and the instructions that torch may use."""
    return {
        "python": f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}",
        "triton": _version("triton"),
        "platform": f"{sys.platform} {platform.machine()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _settings() -> tuple[str, ...]:
    """The names of Inductor's settings that decide how C++ is built, but for those that Inductor leaves out of keys."""
    config = torch._inductor.config.save_config_portable()  # type: ignore[attr-defined]
    return tuple(sorted(name for name in config if name.startswith(("cpp.", "aot_inductor."))))


def identity(kind: type[CppCodeCache], main: str, optimized: str | None, device: str, flags: Sequence[str]) -> str:
    """The name of a library.

    Args:
        kind: the class of Inductor's that loads it.
        main: its source.
        optimized: a second source, or None.
        device: the device type.
        flags: of the compiler, beside Inductor's own.
    """
    settings = {name: getattr(torch._inductor.config, name) for name in _settings()}
    own = (kind.__name__, main, optimized or "", device, tuple(flags), torch.__version__, torch.version.git_version)
    text = repr((own, sorted(settings.items()), sorted(machine().items())))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def _watched(
    kind: type[CppCodeCache],
    main_code: str,
    device_type: str = "cpu",
    submit_fn: Any = None,
    extra_flags: Sequence[str] = (),
    optimized_code: str | None = None,
    **more: Any,
) -> Callable[[], Any]:
    """`CppCodeCache.load_async`, which looks for a library by its identity first."""
    before: Callable[..., Callable[[], Any]] = _watched.before  # type: ignore[attr-defined]
    name = "" if kind not in _KINDS else identity(kind, main_code, optimized_code, device_type, extra_flags)
    remote = _remote() if name else None
    if remote is not None and name not in _used:  # else it is being built
        _fetch(remote, name)
    library = _known(kind, name) if name else None
    if library is not None:
        return lambda: library
    load = before(kind, main_code, device_type, submit_fn, extra_flags, optimized_code, **more)
    path = inspect.getclosurevars(load).nonlocals.get("binary_path") if name else None
    if path:
        _used[name] = Path(path)
        load = _indexing(load, name, Path(path))
    return load if remote is None else _sending(load, remote, name)


def _indexing(load: Callable[[], Any], name: str, path: Path) -> Callable[[], Any]:
    """`load`, which notes where the library is: once it was loaded, as it may still be written before."""

    def load_and_note() -> Any:
        library = load()
        if not INDEX.path(name).exists() and path.is_relative_to(cache_dir()):
            INDEX.write(name, os.path.relpath(path, cache_dir()))  # a failure is logged, and the library not exported
        return library

    return load_and_note


def _remote() -> Any:
    """The remote cache that has libraries beside Inductor's graphs, where Inductor uses one."""
    return create_cache("omnicomp-libraries-v1", False, "", "RemoteFxGraphCache") if _uses_remote() else None


def _fetch(remote: Any, name: str) -> None:
    try:
        found = None if (INDEX.folder / f"{name}.so").exists() else remote.get(name)
        if found is not None:
            put(name, base64.b64decode(found["data"]))
    except Exception as error:  # noqa: BLE001 - it is built here
        log.warning("omni: no library from the remote cache: %s: %s", type(error).__name__, error)


def _sending(load: Callable[[], Any], remote: Any, name: str) -> Callable[[], Any]:
    """`load`, which gives the library to the remote cache once it is built."""

    def load_and_send() -> Any:
        library = load()
        if name not in _sent:
            _sent.add(name)
            try:
                remote.put(name, {"data": base64.b64encode(_used[name].read_bytes()).decode()})
            except Exception as error:  # noqa: BLE001 - the others build it, too
                log.warning("omni: no library to the remote cache: %s: %s", type(error).__name__, error)
        return library

    return load_and_send


def _known(kind: type[CppCodeCache], name: str) -> Any:
    """A library that came with an artefact, or one that was built here."""
    path = INDEX.folder / f"{name}.so"
    try:
        if path.exists():
            for each in (path, path.parent):
                store.check_trusted(each.lstat(), each)
        else:
            place, _ = INDEX.read(name)
            path = Path(cache_dir()) / (place or "")
            if not path.is_file():
                return None
        library = kind._load_library(str(path), name)
    except (OSError, ImportError, RuntimeError) as error:
        log.warning("omni: the library %s can't be used, so it is built here: %s", path.name, error)
        return None
    with contextlib.suppress(OSError):  # only its age is lost
        os.utime(path)
    _used[name] = path
    return library


_numbers: Final = itertools.count()


def _whole(build: Callable[[cpp_builder.CppBuilder], None]) -> Callable[[cpp_builder.CppBuilder], None]:
    """`CppBuilder.build`, which writes under another name and renames, and links kernels against names."""

    def whole(self: cpp_builder.CppBuilder) -> None:
        target, output, named = self._target_file, self._output, self._libraries_args
        # Elsewhere the name of the output says what it is, or is part of a command that is sent away.
        if sys.platform != "linux" or self._use_relative_path or not output.endswith(f" {target}"):
            build(self)
            return
        made = f"{target}.{os.getpid()}.{next(_numbers)}.tmp"
        self._output = f"{output.removesuffix(target)}{shlex.quote(made)}"
        # What has Inductor's header is a kernel for this process: no test of the processor, and no package.
        if self._include_dirs_args.startswith("-include ") and not self._aot_mode:
            self._libraries_args = linking.linked(named, self._compiler)
        try:
            build(self)
            os.replace(made, target)
        finally:
            self._output, self._libraries_args = output, named
            Path(made).unlink(missing_ok=True)

    return whole
