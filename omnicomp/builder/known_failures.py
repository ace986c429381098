"""Known failures: nodes that Inductor could not build, or built wrongly, stored on disk for the next process.

One small JSON file for each graph of a part, under Inductor's cache folder. It holds names of nodes and reasons, and
no tensor. Failures of the moment or the machine, such as memory or a missing compiler, are never stored.
"""

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.inductor.store import JsonStore, append, folder, key_of, note_use, read_trusted
from omnicomp._torch.inductor.versions import compilers, inductor_identity, keeps_caches
from omnicomp.analysis.hashes import exact_hash
from omnicomp.lowerings import MAIN, LoweringContext
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Cache, Reason

CACHE: Final = "verdicts"
# A process does not use its own entries: a fault may have been repaired in it meanwhile.
_PROCESS: Final = uuid.uuid4().hex


@records.dataclass(frozen=True, kw_only=True)
class Entry:
    """The known failures of one graph."""

    key: str  # of the graph, Inductor, and everything of ours that changes it
    graph: str = ""  # its first user function and part, for people
    writer: str = ""  # the process that found it
    time: float = 0.0  # seconds since the epoch
    compilers: str = ""  # the compilers that it was found with; others may do better
    # How many builds were spent if they did not suffice to find the smallest change; None if they did.
    builds: int | None = None
    # Nodes that leave Inductor, by name.
    cut: Mapping[str, Reason] = dataclasses.field(default_factory=dict[str, Reason])
    boundaries: frozenset[str] = frozenset()  # nodes before which it is cut
    values: bool = False  # whether the built code computed wrong results; otherwise it could not be built
    untuned: Reason | None = None  # why it is built without autotuning; None if it is not
    scripts: tuple[str, ...] = ()  # paths of the scripts that show it

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON can hold it."""
        data = {**dataclasses.asdict(self), "boundaries": sorted(self.boundaries)}
        data["cut"] = {name: reason.to_dict() for name, reason in self.cut.items()}
        data["untuned"] = None if self.untuned is None else self.untuned.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Entry":
        """The inverse; raises if it is something else."""
        return cls(
            key=_typed(data, "key", str),
            graph=_typed(data, "graph", str),
            writer=_typed(data, "writer", str),
            time=float(data["time"]),
            compilers=_typed(data, "compilers", str),
            builds=None if data["builds"] is None else _typed(data, "builds", int),
            cut={str(name): Reason.from_dict(item) for name, item in _typed(data, "cut", dict).items()},
            boundaries=frozenset(map(str, _typed(data, "boundaries", list))),
            values=_typed(data, "values", bool),
            untuned=None if data["untuned"] is None else Reason.from_dict(_typed(data, "untuned", dict)),
            scripts=tuple(map(str, _typed(data, "scripts", list))),
        )


def _typed(data: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(data[name], kind):
        raise TypeError(name)
    return data[name]


STORE: Final = JsonStore[Entry](CACHE, Entry.to_dict, Entry.from_dict, schema=2)


class PartVerdicts:
    """The known failures of one part, from earlier processes and from this one."""

    def __init__(self, module: GraphModule, context: LoweringContext, settings: Mapping[str, Any]) -> None:
        """Take the key of a part before it is built; Inductor changes the graph later.

        Args:
            module: the graph, before overrides are put into it.
            context: where it belongs.
            settings: with which it is built: those of Inductor's that differ from torch's defaults.
        """
        self._context = context
        self._lock = new_lock()
        self._enabled = context.policy.verdicts != "off" and MAIN.name in context.device.lowerings and keeps_caches()
        self._entry = Entry(key="")
        if self._enabled:
            nodes = list(module.graph.nodes)
            content = (
                exact_hash(nodes, names=True),
                context.graph.digest,
                context.part,
                _hardware(context.device.type),
            )
            targets = (node.target for node in nodes if node.op == "call_function")
            key = key_of(*content, inductor_identity(targets, settings))
            graph = next(iter(context.graph.sources), "")
            self._entry = Entry(key=key, graph=f"{context.part_id} {graph}".rstrip(), writer=_PROCESS)

    @property
    def key(self) -> str:
        """Key of the part; empty where nothing is stored."""
        return self._entry.key

    def known(self) -> Entry | None:
        """The entry of an earlier process, with reasons that say so; recorded in the timeline."""
        policy = self._context.policy
        if not self._enabled or policy.verdicts == "forget" or policy.on_error == "raise":
            return None
        found, problem = STORE.read(self.key)
        if problem:
            return self.unusable("bypass", f"{problem}; it is found out afresh")
        if found is None:
            return None
        if found.writer == _PROCESS and not found.values:
            return None
        if found.compilers != compilers(self._context.device.type):
            return self._record("miss", "it was found with other compilers, so it is found out afresh")
        if found.builds is not None and policy.max_builds > found.builds:
            return self._record("miss", f"it was found with {found.builds} builds, and more are allowed now")
        self._entry = dataclasses.replace(found, writer=_PROCESS)
        nodes = "1 node leaves" if len(found.cut) == 1 else f"{len(found.cut)} nodes leave"
        nodes += ", built without autotuning," if found.untuned else ""
        self._record("hit", f"{nodes} Inductor, as is known from an earlier process")
        cut = {name: _earlier(reason) for name, reason in found.cut.items()}
        untuned = None if found.untuned is None else _earlier(found.untuned)
        return dataclasses.replace(found, cut=cut, untuned=untuned)

    def add(
        self,
        cut: Mapping[str, Reason],
        boundaries: Iterable[str] = (),
        *,
        scripts: Iterable[str] = (),
        builds: int | None = None,
        values: bool = False,
        untuned: Reason | None = None,
    ) -> None:
        """Store a failure, together with those known before.

        Args:
            cut: nodes that must leave Inductor, by name.
            boundaries: nodes before which it must be cut.
            scripts: paths of scripts that show it.
            builds: the bound on builds, if it ended the search before the smallest change was found.
            values: whether the built code computed wrong results.
            untuned: why it is built without autotuning, if it is.
        """
        if not self._enabled:
            return
        with self._lock:
            old = self._entry
            self._entry = dataclasses.replace(
                old,
                time=time.time(),
                compilers=compilers(self._context.device.type),
                builds=old.builds if builds is None else builds,
                cut={**old.cut, **cut},
                boundaries=old.boundaries | frozenset(boundaries),
                values=old.values or values,
                untuned=untuned or old.untuned,
                scripts=tuple(dict.fromkeys([*old.scripts, *scripts])),
            )
            problem = STORE.write(self.key, self._entry)
            if values and not problem:
                problem = _mark_wrong(self.key)
            if problem:
                self.unusable("bypass", f"it is not kept: {problem}")

    def unusable(self, verdict: str, sentence: str) -> None:
        """Record why nothing could be read or stored."""
        reason = Reason(
            code="verdict_unusable",
            by="verdicts",
            sentence=sentence,
            lever="make the folder writable, name another in OMNICOMP_CACHE_DIR, or `omnicomp bisect --forget`",
        )
        self._record(verdict, sentence, reason)

    def _record(self, verdict: str, note: str, reason: Reason | None = None) -> None:
        graph, part = self._context.graph_id, self._context.part
        self._context.timeline.append(
            Cache(graph=graph, part=part, cache=CACHE, verdict=verdict, key=self.key, note=note, reason=reason)
        )


def _earlier(reason: Reason) -> Reason:
    return dataclasses.replace(reason, sentence=f"{reason.sentence} (known from an earlier process)")


def _hardware(device_type: str) -> str:
    if device_type == "cuda" and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
    return device_type


def _mark_wrong(key: str) -> str:
    """Change `wrong_code`; returns why that failed, or an empty text."""
    path = folder() / "wrong"
    try:
        if key not in (read_trusted(path).decode() if path.exists() else ""):
            append(path, f"{key}\n")
        note_use(path)
    except (OSError, UnicodeError) as error:
        return f"{path} can't be written: {error}"
    return ""


def wrong_code() -> str:
    """Text for the keys of the compile caches that changes when generated code was found to compute wrong results.

    The caches hold the wrong code, and a part that AOTAutograd's cache restores would not be placed again.
    """
    try:
        found = read_trusted(folder() / "wrong")
    except OSError:
        return ""  # nothing was found, or nothing can be known
    note_use(folder() / "wrong")
    return hashlib.sha256(found).hexdigest()[:16]


def entries() -> list[tuple[Path, Entry | str]]:
    """Every stored entry, the newest first; for one that cannot be read, the error."""
    found = [(STORE.path(key), entry) for key, entry in STORE.all()]
    return sorted(found, key=lambda each: -each[1].time if isinstance(each[1], Entry) else 0.0)


def forget(chosen: Callable[[Entry], bool] = lambda _: True) -> int:
    """Remove entries, and those that cannot be read; returns how many.

    Args:
        chosen: whether to remove an entry; all of them by default.
    """
    removed, left = 0, 0
    for path, entry in entries():
        if isinstance(entry, str) or chosen(entry):
            path.unlink(missing_ok=True)
            removed += 1
        else:
            left += entry.values
    if not left:
        (folder() / "wrong").unlink(missing_ok=True)
    return removed
