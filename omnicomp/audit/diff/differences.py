"""What differs between two reports beside the placement: passes, options, versions and devices."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, TypeVar

from omnicomp.audit.diff.changes import Change
from omnicomp.audit.facts import Setting
from omnicomp.audit.model import Audit, GraphAudit
from omnicomp.timeline import NearMiss, Rewrite

__all__ = ["difference", "environments", "options", "passes"]

# Where events go, and what is said while a program runs: another value makes no other program.
_OF_NO_EFFECT: Final = frozenset({"timeline", "timeline_max_bytes", "progress", "summary", "ranges", "fallback"})
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")

Item = TypeVar("Item")


def difference(
    left: Iterable[Item], left_key: Callable[[Item], Hashable], right: Iterable[Item], key: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """What the first has more of than the second, and the second more than the first, as multisets of keys."""
    waiting: dict[Hashable, list[Item]] = {}
    for item in left:
        waiting.setdefault(left_key(item), []).append(item)
    new: list[Item] = []
    for item in right:
        same = waiting.get(key(item))
        if same:
            same.pop(0)
        else:
            new.append(item)
    return [item for items in waiting.values() for item in items], new


def passes(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    """The passes that rewrite fewer or more places, and the candidates that they leave alone."""

    def rewritten(item: Rewrite) -> Hashable:
        return (item.name, item.kind, item.module, item.target)

    def missed(item: NearMiss) -> Hashable:
        return (item.name, item.kind, item.module, item.reason.code)

    had, has = (_applied(graph) for graph in (one, other))
    for name in dict.fromkeys((*had, *has)):
        old, new = had.get(name), has.get(name)
        if (old is None) != (new is None):
            kind, text = ("pass_stopped", "does not run any more") if new is None else ("pass_started", "runs now")
            if old or new:
                yield Change(kind=kind, what=name, sentence=f"the pass {name} {text}", graph=other.identity)
    gone, new = difference(one.rewrites, rewritten, other.rewrites, rewritten)
    counts = Counter(item.name for item in one.rewrites), Counter(item.name for item in other.rewrites)
    for kind, items, text in (("pass_stopped", gone, "not rewritten any more"), ("pass_started", new, "rewritten now")):
        for item in items:
            target = f" to {item.target}" if item.target else ""
            yield Change(
                kind=kind,
                what=item.name,
                graph=other.identity,
                sentence=f"{item.name}: {item.kind}{target} is {text}",
                before=f"{counts[0][item.name]} rewrites",
                after=f"{counts[1][item.name]} rewrites",
                places=tuple(filter(None, (item.module or item.source,))),
            )
    # A pass may say how many places it rewrote without telling of each.
    told = set(counts[0]) | set(counts[1])
    for name in sorted((set(had) & set(has)) - told):
        old, now = had[name], has[name]
        if old != now:
            kind = "pass_stopped" if now < old else "pass_started"
            yield Change(
                kind=kind,
                what=name,
                graph=other.identity,
                before=f"{old} rewrites",
                after=f"{now} rewrites",
                sentence=f"{name} rewrites {now} places, and rewrote {old}",
            )
    gone_misses, new_misses = difference(one.near_misses, missed, other.near_misses, missed)
    for kind, misses in (("near_miss", new_misses), ("near_miss_gone", gone_misses)):
        for miss in misses:
            text = "leaves a candidate alone" if kind == "near_miss" else "has one candidate less that it left alone"
            yield Change(
                kind=kind,
                what=miss.name,
                graph=other.identity,
                sentence=f"{miss.name}: {miss.kind} {text}",
                places=tuple(filter(None, (miss.module or miss.source,))),
                reasons=(miss.reason,) if kind == "near_miss" else (),
            )


def _applied(graph: GraphAudit) -> dict[str, int]:
    """How many places each pass that ran rewrote."""
    return {run.name: run.rewrites for run in graph.passes if run.applied}


def options(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    """The options that took effect with another value."""
    had, has = ({s.key: s for s in graph.settings if s.key not in _OF_NO_EFFECT} for graph in (one, other))
    for key in dict.fromkeys((*had, *has)):
        old, new = had.get(key), has.get(key)
        asked = any(setting is not None and setting.requested for setting in (old, new))
        # A report of a version that does not know an option says nothing of its default.
        if (old is None or new is None) and not asked:
            continue
        before, after = _value(old), _value(new)
        if before != after:
            reason = new.reason if new is not None else None
            yield Change(
                kind="option",
                what=key,
                sentence=f"{key} is {after or 'not set'}, and was {before or 'not set'}",
                before=before,
                after=after,
                graph=other.identity,
                reasons=() if reason is None else (reason,),
            )
    if one.mode != other.mode:
        sentence = f"the mode is {other.mode}, and was {one.mode}"
        yield Change(kind="option", what="mode", sentence=sentence, before=one.mode, after=other.mode)


def _value(setting: Setting | None) -> str:
    return "" if setting is None else _ADDRESS.sub("", setting.effective or setting.requested)


def environments(before: Audit, after: Audit) -> Iterator[Change]:
    """Versions and devices; the names of devices and platforms make no difference of their own."""
    old, new = before.environment, after.environment
    for name in sorted(set(old.versions) | set(new.versions)):
        was, now = old.versions.get(name, ""), new.versions.get(name, "")
        # What one of them does not tell can't be compared, as of another device's toolkit.
        if was and now and was != now:
            sentence = f"{name} is {now}, and was {was}"
            yield Change(kind="version", what=name, sentence=sentence, before=was, after=now)
    if before.graphs and after.graphs and set(old.devices) != set(new.devices):
        was, now = ", ".join(old.devices), ", ".join(new.devices)
        yield Change(
            kind="device", what="device", sentence=f"the device is {now}, and was {was}", before=was, after=now
        )
    named = {type: (old.devices[type], new.devices[type]) for type in old.devices if type in new.devices}
    facts = {**named, "platform": (", ".join(old.platforms), ", ".join(new.platforms))}
    for what, (was, now) in facts.items():
        if was and now and was != now:
            sentence = f"{what} is {now}, and was {was}"
            yield Change(kind="device", what=what, sentence=sentence, before=was, after=now, significant=False)
