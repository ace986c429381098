"""Which part of a compile cache's key changed: what was compiled before is remembered beside the caches.

A key is one hash, and says nothing of why it is another one. For each part of a graph a small file keeps what the keys
of its last compilations were made of; a miss is compared with the nearest of them. Nothing is read or written on a hit,
and nothing that compiles reads the files: one that is lost, or wrong, costs a sentence in the timeline.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omnicomp._torch.inductor.cache_lookups import Lookup
from omnicomp._torch.inductor.compile_fx import cache_dir
from omnicomp.store import write_whole
from omnicomp.timeline import Cache, Reason

__all__ = ["MAX_FILES", "MAX_RECORDS", "KeyParts", "changes", "folder", "verdict"]

Parts = Mapping[str, tuple[str, str]]

# Of one part of a graph: it is compiled anew for other shapes, options and versions, each worth comparing with.
MAX_RECORDS: Final = 6
MAX_FILES: Final = 1024
_SCHEMA: Final = 1
_CONFIGS: Final = ("torch._inductor.config", "torch._functorch.config")
_NEW: Final = "compiled for the first time with this cache folder"
_SAME: Final = "nothing changed since it was last compiled: the artefact was not kept, or was removed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyParts:
    """What is known of a graph's key before a cache is asked.

    Attributes:
        identity: what stays the same when the key changes: the function and the modules that it is made of.
        parts: what of omnicomp is in the key: by name, a text to show and a hash.
    """

    identity: str = ""
    parts: Parts = dataclasses.field(default_factory=dict[str, tuple[str, str]])


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
    if lookup.verdict != "miss" or not lookup.parts:
        return event
    parts: dict[str, tuple[str, str]] = {**lookup.parts, **key.parts}
    path = folder() / f"{_hash(key.identity, lookup.cache, part, subgraph.removeprefix(graph))}.json"
    try:
        before = _read(path)
    except (OSError, ValueError) as error:
        return dataclasses.replace(event, reason=_unreadable(error, _replace(path, [parts])))
    changed = () if not before else min((changes(old, parts) for old in reversed(before)), key=len)
    note = _SAME if before and not changed else "" if before else _NEW
    # The nearest may be an older one: what was compiled last goes to the end, and equal ones are kept once.
    failure = _replace(path, [*(old for old in before if changes(old, parts)), parts][-MAX_RECORDS:])
    reason = None if failure is None else _unreadable(failure, None)
    return dataclasses.replace(event, changed=changed, note=note, reason=reason)


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


def folder() -> Path:
    """Where the records are kept: beside Inductor's caches."""
    return Path(cache_dir()) / "omnicomp" / "keys"


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def _read(path: Path) -> list[dict[str, tuple[str, str]]]:
    """The records of a file, oldest first; none if there is no file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not what was written.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    try:
        if data["schema"] != _SCHEMA:  # another version's: as good as none
            return []
        return [{name: (str(text), str(value)) for name, (text, value) in item.items()} for item in data["records"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has no records: {error!r}") from error


def _replace(path: Path, records: Sequence[Parts]) -> OSError | None:
    """Write a file in one step, so that a reader in another process sees the old one or the new one."""
    text = json.dumps({"schema": _SCHEMA, "records": records}, separators=(",", ":"))
    try:
        write_whole(path, text, MAX_FILES)
    except OSError as error:
        return error
    return None


def _unreadable(error: Exception, second: OSError | None) -> Reason:
    return Reason(
        code="key_record_unusable",
        by="caches",
        sentence=f"the record of what was compiled before can't be used: {second or error}",
        observed=type(error).__name__,
        lever=f"remove {folder()}, or make it writable",
    )
