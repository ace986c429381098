"""What torch's compile caches answered, and what the key of a miss was made of, from what torch leaves of a lookup.

Dynamo's compile lock, which is held around a lookup, keeps other compilations from torch's counters.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.config_comms
from torch._dynamo.utils import counters, get_chromium_event_logger

from omnicomp import records

Counts = Mapping[tuple[str, str], int]

_VERDICTS: Final = ("miss", "bypass", "hit")

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


@records.dataclass(frozen=True, kw_only=True)
class Lookup:
    """One question to a cache."""

    cache: str  # `aot_autograd` or `fx_graph`
    verdict: str  # `hit`, `miss` or `bypass`
    key: str = ""  # what was looked up; empty if there was no key
    note: str = ""  # why there was none
    # What the key of a miss was made of: by name, a text to show and a hash.
    parts: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict[str, tuple[str, str]])


def counts() -> Counts:
    """How often torch's caches have answered in which way, to be taken before a lookup."""
    graphs, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        **{("fx_graph", verdict): graphs[f"fxgraph_cache_{verdict}"] for verdict in _VERDICTS},
        **{("aot_autograd", verdict): autograd[f"autograd_cache_{verdict}"] for verdict in _VERDICTS},
    }


def graph_lookup(compiled: Any, before: Counts) -> Lookup | None:
    """What Inductor's graph cache answered for a graph that was just compiled; None if it was not asked."""
    verdict = _answer("fx_graph", before)
    if verdict is None:
        return None
    key = str(getattr(compiled, "_fx_graph_cache_key", None) or "")
    lines: Sequence[str] = getattr(compiled, "_fx_graph_cache_debug_lines", None) or ()
    note = "Inductor makes no key of it; TORCH_LOGS=torch._inductor.codecache says why" if verdict == "bypass" else ""
    parts = read_parts(lines) if verdict == "miss" else {}
    return Lookup(cache="fx_graph", verdict=verdict, key=key, note=note, parts=parts)


def autograd_lookup(before: Counts) -> Lookup | None:
    """What AOTAutograd's cache answered in the compilation that is under way; None if it was not asked.

    Torch notes key, components and the reason of a bypass in its event of the compilation. Since torch 2.13 it makes
    the components for its log alone.
    """
    verdict = _answer("aot_autograd", before)
    if verdict is None:
        return None
    data = get_chromium_event_logger().get_event_data().get("backend_compile", {})
    return Lookup(
        cache="aot_autograd",
        verdict=verdict,
        key=str(data.get("key") or ""),
        note=str(data.get("cache_bypass_reason") or "").split("\n", maxsplit=1)[0] if verdict == "bypass" else "",
        parts=read_parts(data.get("components") or ()) if verdict == "miss" else {},
    )


def _answer(cache: str, before: Counts) -> str | None:
    now = counts()
    return next((verdict for verdict in _VERDICTS if now[cache, verdict] > before[cache, verdict]), None)


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
