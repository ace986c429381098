"""What torch's compile caches were asked, what they answered, and what the key of a miss was made of.

`counters` tell only how often. The functions that look up are wrapped inside a block instead; Dynamo's compile lock,
which is held there, keeps other compilations out. The parts of a key cost nothing on a hit.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.config_comms
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.codecache import FxGraphCache

__all__ = ["Lookup", "autograd_lookups", "graph_lookups", "read_parts"]

_LINE: Final = re.compile(r"\[(\w+)\] (\w+)(?:\[(.*?)\])?: (.*)", re.DOTALL)
_TENSOR: Final = re.compile(r"dtype=torch\.(\w+), shape=torch\.Size\(\[(.*?)\]\)", re.DOTALL)
_SIZE: Final = re.compile(r"^\('(.*)',\)$")
_CONFIGS: Final[dict[str, Any]] = {
    "inductor_config": torch._inductor.config,
    "inductor_config_comms": torch._inductor.config_comms,
}
_NAMES: Final = {
    "gm": "the graph",
    "aot_config": "AOTAutograd's view of the inputs",
    "fx_kwargs[omnicomp]": "omnicomp's decisions",
    "system_info[hash]": "the machine",
}
_HASH: Final = 12
# A key has one line for each input; beyond these they are one part together.
_INPUTS: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """One question to a cache.

    Attributes:
        cache: `aot_autograd` or `fx_graph`.
        verdict: `hit`, `miss` or `bypass`.
        key: what was looked up; empty if there was no key.
        note: why there was none.
        parts: what the key of a miss was made of: by name, a text to show and a hash.
    """

    cache: str
    verdict: str
    key: str = ""
    note: str = ""
    parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict[str, tuple[str, str]])


@contextlib.contextmanager
def graph_lookups(found: list[Lookup]) -> Generator[None]:
    """Inside, the lookups of Inductor's graph cache are collected in the list."""
    prepare, load = FxGraphCache.prepare_key, FxGraphCache.load_with_key

    def prepare_key(*args: Any, **kwargs: Any) -> Any:
        key, info = prepare(*args, **kwargs)
        if key is None:
            found.append(Lookup(cache="fx_graph", verdict="bypass", note=str(info.get("cache_bypass_reason", ""))))
        return key, info

    def load_with_key(key: str, lines: list[str], *args: Any, **kwargs: Any) -> Any:
        graph, info = load(key, lines, *args, **kwargs)
        if graph is None:
            found.append(Lookup(cache="fx_graph", verdict="miss", key=key, parts=read_parts(lines)))
        else:
            found.append(Lookup(cache="fx_graph", verdict="hit", key=key))
        return graph, info

    with (
        mock.patch.object(FxGraphCache, "prepare_key", staticmethod(prepare_key)),
        mock.patch.object(FxGraphCache, "load_with_key", staticmethod(load_with_key)),
    ):
        yield


@contextlib.contextmanager
def autograd_lookups(found: list[Lookup]) -> Generator[None]:
    """Inside, misses and bypasses of AOTAutograd's cache are collected in the list; what it restores says so itself."""
    make_key, lookup = autograd_cache.autograd_cache_key, autograd_cache.AOTAutogradCache._lookup
    get_hash = autograd_cache.AOTAutogradCachePickler.get_hash
    details: list[Any] = []
    before = counters["aot_autograd"]["autograd_cache_miss"]
    known: list[str] = []

    def remember(pickler: Any, value: Any) -> str:
        if isinstance(value, autograd_cache.AOTAutogradCacheDetails):
            details[:] = [value]
        return get_hash(pickler, value)

    def autograd_cache_key(*args: Any, **kwargs: Any) -> Any:
        try:
            with mock.patch.object(autograd_cache.AOTAutogradCachePickler, "get_hash", remember):
                key, lines = make_key(*args, **kwargs)
        except Exception as error:
            found.append(Lookup(cache="aot_autograd", verdict="bypass", note=str(error).split("\n", maxsplit=1)[0]))
            raise
        known[:] = lines
        return key, lines

    def looked_up(key: str, *args: Any, **kwargs: Any) -> Any:
        result = lookup(key, *args, **kwargs)
        if result is None:
            # torch 2.11 hands the lines over; torch 2.13 makes them only for its log.
            lines = known or (_key_lines(details[0]) if details else [])
            found.append(Lookup(cache="aot_autograd", verdict="miss", key=key, parts=read_parts(lines)))
        return result

    with (
        mock.patch.object(autograd_cache, "autograd_cache_key", autograd_cache_key),
        mock.patch.object(autograd_cache.AOTAutogradCache, "_lookup", staticmethod(looked_up)),
    ):
        yield
    misses = sum(lookup.verdict == "miss" for lookup in found)
    if counters["aot_autograd"]["autograd_cache_miss"] > before + misses:
        found.append(Lookup(cache="aot_autograd", verdict="miss", note="a graph that the entry names is gone"))


def _key_lines(details: Any) -> list[str]:
    """The lines that torch logs of a key; they are made of the graph without what Dynamo keeps on it."""
    with autograd_cache.sanitize_gm_for_cache(details.gm):
        return autograd_cache.AOTAutogradCachePickler(details.gm).debug_lines(details)


def read_parts(lines: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The parts of a key, from the lines that torch logs of it.

    Args:
        lines: `[hash] name[item]: text` each.

    Returns:
        By name, a text to show, empty where it says nothing to a reader, and a hash. Config entries at their default
        are left out.
    """
    parts: dict[str, tuple[str, str]] = {}
    rest: list[str] = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        hashed, name, item, text = match.groups()
        hashed = hashed[-_HASH:]
        if name in _CONFIGS and item is not None:
            module = _CONFIGS[name]
            if _default(module, item) != text:
                parts[f"{module.__name__}.{item}"] = (_shown(text), hashed)
        elif name == "autograd_config":  # one pickle; what it is made of is read where it comes from
            parts.update(_changed_entries(torch._functorch.config))
            parts[torch._functorch.config.__name__] = ("", hashed)
        elif name == "example_inputs" and item is not None:
            if int(item) < _INPUTS:
                parts[f"input {item}"] = (_input(text), hashed)
            else:
                rest.append(hashed)
        elif name == "torch_version":
            parts["torch"] = (torch.__version__, hashed)
        elif name != "cache_key_tag" and item != "omnicomp_fallback":  # these repeat what is named part by part
            name = name if item is None else f"{name}[{item}]"
            parts[_NAMES.get(name, name)] = (_shown(text), hashed)
    if rest:
        parts[f"inputs from {_INPUTS} on"] = ("", hashlib.sha256("".join(rest).encode()).hexdigest()[:_HASH])
    return parts


def _default(module: Any, name: str) -> str | None:
    entry = module._config.get(name)
    return None if entry is None else str(entry.default)


def _changed_entries(module: Any) -> dict[str, tuple[str, str]]:
    """The entries of a config module that are not at their default."""
    values = ((name, getattr(module, name), entry.default) for name, entry in module._config.items())
    changed = ((f"{module.__name__}.{name}", str(value)) for name, value, default in values if value != default)
    return {name: (_shown(text), text if _shown(text) else "") for name, text in changed}


def _input(text: str) -> str:
    match = _TENSOR.search(text)
    return f"{match[1]}[{match[2]}]" if match else _shown(_SIZE.sub(r"\1", text))


def _shown(text: str) -> str:
    """A text that is short and the same in each process, or an empty one."""
    return text if len(text) <= 60 and "\n" not in text and " at 0x" not in text else ""
