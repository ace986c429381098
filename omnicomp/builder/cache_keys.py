"""Explains a miss of a compile cache: the components of earlier keys are stored beside the caches.

A key is one hash, and says nothing of why it is another one. For each part of a graph a small file keeps what the key
of its last compilation was made of, as torch and omnicomp name it; a miss is compared with that. Nothing is read or
written on a hit, and nothing that compiles reads the files: one that is lost costs a sentence in the timeline.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnicomp._torch.inductor.cache_lookups import Lookup
from omnicomp._torch.inductor.compile_fx import cache_dir
from omnicomp._torch.inductor.store import JsonStore
from omnicomp.lowerings.base import KeyParts
from omnicomp.timeline import Cache, Reason

Parts = Mapping[str, tuple[str, str]]

_CONFIGS: Final = ("torch._inductor.config", "torch._functorch.config")
_NEW: Final = "compiled for the first time with this cache folder"
_SAME: Final = "nothing changed since it was last compiled: the artefact was not kept, or was removed"


def verdict(lookup: Lookup, key: KeyParts, *, graph: str, part: str, subgraph: str = "") -> Cache:
    """The event that tells what a cache answered; of a miss, also what of the key changed, which is then remembered.

    Args:
        lookup: question and answer.
        key: of the graph.
        graph: its id.
        part: `forward`, `backward` or `inference`; empty for the whole graph.
        subgraph: id of the subgraph, in a part that is cut.
    """
    event = Cache(
        graph=graph,
        part=part,
        subgraph=subgraph,
        cache=lookup.cache,
        verdict=lookup.verdict,
        key=lookup.key,
        note=lookup.note,
    )
    if lookup.verdict != "miss":
        return event
    parts: dict[str, tuple[str, str]] = {**lookup.parts, **key.parts}
    name = "\0".join((key.identity, lookup.cache, part, subgraph.removeprefix(graph)))
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    before, unread = STORE.read(digest)
    problem = STORE.write(digest, parts) or unread
    if problem:
        return dataclasses.replace(event, reason=_unusable(problem))
    if before is None:
        return dataclasses.replace(event, note=_NEW)
    changed = changes(before, parts)
    return dataclasses.replace(event, changed=changed, note="" if changed or not lookup.parts else _SAME)


def changes(old: Parts, new: Parts) -> tuple[str, ...]:
    """The parts in which two keys differ, each as a phrase such as `option dtype_policy: 'keep' → 'bf16'`."""
    names = [*new, *(name for name in old if name not in new)]
    differing = [name for name in names if old.get(name, (None, None))[1] != new.get(name, (None, None))[1]]
    # The hash of a whole config says nothing where an entry of it is named.
    named = {name for name in differing if not any(other.startswith(f"{name}.") for other in differing)}
    return tuple(_phrase(name, old.get(name), new.get(name)) for name in differing if name in named)


def _phrase(name: str, old: tuple[str, str] | None, new: tuple[str, str] | None) -> str:
    if name.startswith(_CONFIGS) and (old is None or new is None):
        old, new = old or ("its default", ""), new or ("its default", "")
    if old is None or new is None:
        return f"{name} {'added' if old is None else 'removed'}"
    if old[0] != new[0] and old[0] and new[0]:
        return f"{name}: {old[0]} → {new[0]}"
    if name in ("omnicomp", "torch"):
        return f"{name}: its sources"
    return f"{name}: edited" if name.startswith(("override ", "pass ")) else f"{name}: changed"


def _load(data: Any) -> Parts:
    return {name: (str(text), str(value)) for name, (text, value) in data.items()}


STORE: Final = JsonStore[Parts]("key_components", dict, _load, root=lambda: Path(cache_dir()) / "omnicomp")
"""What keys were made of; beside Inductor's caches, whose misses it explains."""


def _unusable(problem: str) -> Reason:
    return Reason(
        code="key_record_unusable",
        by="caches",
        sentence=f"the record of what was compiled before can't be used: {problem}",
        lever=f"remove {STORE.folder}, or make it writable",
    )
