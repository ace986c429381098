"""Which Inductor this is: its version, settings and compilers, and what somebody replaced in it."""

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
import torch._inductor.config
from torch._inductor import cpp_builder
from torch._inductor.codegen.common import get_custom_backend_pass_for_device
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.lowering import lowerings

_TORCH: Final = os.path.dirname(torch.__file__)
# What a build goes through. Whoever replaces one of these has another Inductor.
_STEPS: Final = (
    "torch._inductor.graph:GraphLowering.run_node",
    "torch._inductor.graph:GraphLowering.call_function",
    "torch._inductor.graph:GraphLowering.run",
    "torch._inductor.graph:GraphLowering.codegen",
    "torch._inductor.graph:GraphLowering.compile_to_module",
    "torch._inductor.compile_fx:compile_fx_inner",
    "torch._inductor.compile_fx:fx_codegen_and_compile",
    "torch._inductor.scheduler:Scheduler.__init__",
    "torch._inductor.scheduler:Scheduler.codegen",
    "torch._inductor.codecache:CppCodeCache.load",
    "torch._inductor.codecache:CppCodeCache.load_async",
    "torch._inductor.codecache:CppPythonBindingsCodeCache.load_pybinding_async",
    "torch._inductor.codecache:PyCodeCache.load_by_key_path",
    "torch._inductor.async_compile:AsyncCompile.cpp_pybinding",
    "torch._inductor.async_compile:AsyncCompile.triton",
    "torch._inductor.async_compile:AsyncCompile.wait",
    "torch._inductor.cpp_builder:CppBuilder.build",
    "torch._inductor.cpp_builder:run_compile_cmd",
)


def inductor_identity(operators: Iterable[Any], settings: Mapping[str, Any]) -> str:
    """Text that is the same wherever Inductor would build a graph of these operators to the same end.

    Torch's version, the settings, the lowering of each operator, and functions of Inductor that are not torch's own
    any more.
    """
    config: Any = torch._inductor.config
    defaults, hashed = _default_settings()
    factories = getattr(config, "_cache_config_factory_keys", ())
    found = [torch.__version__, str(torch.version.git_version), str(torch.version.cuda), hashed]
    for name in sorted(defaults.keys() & settings.keys()):
        value = settings[name]
        text = describe(value() if value is not None and name in factories else value)
        if text != defaults[name]:  # torch counts a setting that was changed and changed back
            found.append(f"{name}={text}")
    found += sorted(f"{op}:{describe(lowerings[op])}" for op in set(operators) if op in lowerings)
    found += [f"{step}:{text}" for step in _STEPS if (text := _replaced(step))]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


@functools.cache
def _default_settings() -> tuple[dict[str, str], str]:
    """The settings that torch's own keys have with their defaults, some of which come from the environment; a hash."""
    config: Any = torch._inductor.config
    found = {name: describe(config._config[name].default) for name in sorted(config.save_config_portable())}
    return found, hashlib.sha256(repr(found).encode()).hexdigest()


def _replaced(step: str) -> str:
    module, _, path = step.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    text = describe(value)
    return "" if "#" not in text else text


def describe(value: Any, depth: int = 4) -> str:
    """A value of the settings or a function as text: torch's own functions by name, others by their code, after `#`."""
    if isinstance(value, (str, int, float, bool, bytes)) or value is None:
        return repr(value)
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [describe(item, depth - 1) for item in value]
        return f"[{','.join(sorted(items) if isinstance(value, (set, frozenset)) else items)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{describe(k, 1)}:{describe(v, depth - 1)}' for k, v in value.items())}}}"
    if isinstance(value, functools.partial):
        return f"partial({describe([value.func, value.args, value.keywords], depth)})"
    function = inspect.unwrap(value) if callable(value) else value
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, types.CodeType):
        uuid = getattr(value, "uuid", None)
        return f"{type(value).__module__}.{type(value).__qualname__}{f'({uuid()!r})' if callable(uuid) else ''}"
    name = f"{function.__module__}.{function.__qualname__}"
    if os.path.abspath(code.co_filename).startswith(_TORCH):
        return name
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_full(cell)]
    inside = describe([*cells, getattr(function, "__defaults__", None)], depth - 1)
    return f"{name}#{_code(code)}{inside}"


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises for one that nothing was assigned to
    except ValueError:
        return False
    return True


def _code(code: types.CodeType) -> str:
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]


def compilers(device_type: str) -> str:
    """What compiles for a device: versions of Triton and the C++ compiler, and the classes of a device from outside."""
    try:
        cxx = cpp_builder.get_cpp_compiler()
        version = cpp_builder.get_compiler_version_info(cxx)
        # All of it tells compilers apart; its end is the version, for people.
        found = f"{cxx} {hashlib.sha256(version.encode()).hexdigest()[:12]} {version.strip('_ ')[-40:]}"
    except InvalidCxxCompiler:
        found = "no C++ compiler"
    if device_type == "cpu":
        return found
    own = get_custom_backend_pass_for_device(device_type)
    if own is not None:
        found = f"{describe(own)}; {found}"
    try:
        return f"triton {importlib.metadata.version('triton')}; {found}"
    except importlib.metadata.PackageNotFoundError:
        return f"no triton; {found}"


def keeps_caches() -> bool:
    """Whether compilations are kept on disk here: not if the user switched Inductor's caches off."""
    config = torch._inductor.config
    return bool(config.fx_graph_cache) and not config.force_disable_caches
