"""Ranks agree: before the first call of a part with collectives, the ranks of their groups compare their plans.

A plan that differs on one rank alone hangs a job, or changes values on that rank only. What is compared is what the
timeline has of the graph: collectives in their order, versions and options, rewrites, placement and lowerings. Each
rank stores a digest of it in the store of the default process group; the last rank of a group to come compares them,
and stores one verdict, by which all go. The first to come looks after those that don't: they ended, or wait for the
group in another part. Nobody waits in a collective, so that it does not matter which ranks compile, and which restore.
Later calls cost nothing.
"""

import atexit
import dataclasses
import functools
import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.distributed import Job, Pause, groups_of_values, identity, is_gone, job, ranks_of
from omnicomp._torch.inductor import store
from omnicomp.analysis.collectives import group_of, groups_in, in_group, without_sizes
from omnicomp.analysis.hashes import numbers_and_sizes
from omnicomp.errors import RanksError, add_note, first_line, harmless
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.base import GraphRecord
from omnicomp.options.policy import Policy
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import (
    Agreement,
    Capture,
    Event,
    NearMiss,
    Placement,
    Reason,
    Retreat,
    Rewrite,
    Speculation,
    Subgraph,
)
from omnicomp.timeline.recorder import Timeline

log = logger("omnicomp")

EAGER: Final = "eager"
"""The verdict by which all ranks run the part eager."""

_SAME: Final = "same"
_GRACE: Final = 2.0  # seconds, for the verdict of a rank whose limit ends at the same time
_LOCAL: Final = ("code found to be wrong", "what rules of placement go by")  # of a machine's caches, and of one graph
_ASSUMED: Final = ("assumed", "compiled")
_FOLLOWED: Final = ("placement", "lowering")

Decision = tuple[str, str, str]
"""What was decided, how, and why."""


@records.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank says of a part."""

    program: str  # equal where ranks captured the same code, with the same numbers and sizes in it
    collectives: tuple[str, ...]  # in program order
    place: str = ""  # the part and the line that its graph begins at, and why the graph ends before its function does
    environment: tuple[Decision, ...] = ()  # versions and options
    masks: str = ""  # what was assumed of masks, which may differ with the data of a rank
    decisions: tuple[Decision, ...] = ()  # rewrites, placement and lowerings
    can_follow: bool = False  # whether the part can still go to eager

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """What `_text` wrote."""
        data: dict[str, Any] = json.loads(text)
        for name in ("environment", "decisions"):
            data[name] = tuple((str(a), str(b), str(c)) for a, b, c in data[name])
        data["collectives"] = tuple(data["collectives"])
        return cls(**data)


@records.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What holds for all ranks of a group."""

    state: str  # `same`, `eager`, `differs` or `missing`
    sentence: str = ""  # what differs, or who is missing
    ranks: tuple[int, ...] = ()  # that it is about

    @classmethod
    def from_text(cls, text: str) -> "Verdict":
        """What `_text` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["ranks"] = tuple(data["ranks"])
        return cls(**data)


def _text(record: Plan | Verdict) -> str:
    return json.dumps(dataclasses.asdict(record), sort_keys=True)


_lock = new_lock()
_locks: Final[dict[str, Any]] = {}
_rounds: Final[dict[tuple[str, str], int]] = {}
_agreed: Final[dict[tuple[str, str], set[str]]] = {}
_known: Final[dict[str, Verdict]] = {}  # by the id of a part
_greeted: Final[dict[str, str]] = {}
_processes: Final[dict[int, str]] = {}  # by rank, what `process/…` of the store says: it may be gone when it matters
_orders: Final[dict[str, tuple[str, ...]]] = {}  # of the collectives that were agreed on, by part
_captured: Final[dict[str, str]] = {}  # by the id of a graph
_words: Final[list[Path]] = []  # the file in which the rank that keeps the store tells why it ended


def join(graph: GraphRecord, module: GraphModule) -> None:
    """Note what was captured, and tell the other ranks which process this one is: once, with its first graph."""
    found = job()
    if found is None:
        return
    _captured[graph.id] = numbers_and_sizes(module)
    if _greeted.get("identity") != f"{identity()} {found.rank}":
        with harmless(f"the process of {graph.id} for other ranks"):
            if found.ends_with_us:
                found.put("words", str(store.folder() / "ended" / f"{uuid.uuid4().hex}.json"))
            found.put(f"process/{found.rank}", identity())
            _know_keeper(found)
            _greeted["identity"] = f"{identity()} {found.rank}"


def spans(module: GraphModule, values: Sequence[Any]) -> bool:
    """Whether a Dynamo graph, called with these values, may communicate with other ranks."""
    return job() is not None and bool(groups_in(module) or groups_of_values(values))


def fail(timeline: Timeline, graph: str, error: BaseException, *causes: str) -> None:
    """Tell the other ranks that a graph ended with an error on this one, and what this rank knows of its causes."""
    found = job()
    if found is None or isinstance(error, RanksError):
        return
    function = _capture(timeline.events(graph.partition(":")[0])).function
    _tell(found, function, graph, "; ".join((first_line(error), *causes)))


def explain(timeline: Timeline, graph: str, error: BaseException) -> None:
    """Add to the error of a call what other ranks said before they ended, and tell it to those that are left.

    Not all ranks notice in a collective which one ended: some are left by those that noticed.
    """
    found = job()
    if found is None or isinstance(error, RanksError):
        return
    gone: list[str] = []
    try:
        first = found.get("failed")
        said = [_failure(first)] if first is not None and json.loads(first)["rank"] != found.rank else []
        keys = [f"process/{rank}" for rank in range(found.size)]
        processes = found.get_all(keys) or [found.get(key) for key in keys]
        pause = Pause(_GRACE)
        while not gone and pause.waited < pause.limit:
            gone = [_gone(rank, process) for rank, process in enumerate(processes) if process and is_gone(process)]
            pause.sleep()  # the sockets of a process close before it is gone
    except RuntimeError as second:
        said = [f"the store of the job can't be asked: {first_line(second)}; {_keeper()}"]
    for text in (f"omnicomp: {each}" for each in (*said, *gone)):
        if text not in getattr(error, "__notes__", ()):
            add_note(error, text)
    fail(timeline, graph, error, *gone)


def _tell(found: Job, function: str, graph: str, error: str) -> None:
    """Tell the other ranks that this one raises."""
    told = json.dumps({"rank": found.rank, "function": function, "graph": graph, "error": error})
    try:
        found.put(f"failed/{found.rank}", told)
        first = found.settle("failed", told)
        if found.ends_with_us and _words:
            with harmless("why this rank ends"):
                store.write_whole(_words[0], first)
        _heard(found)
    except RuntimeError as second:
        log.warning("omni: other ranks could not be told: %s", first_line(second))


def _heard(found: Job) -> None:
    """This rank knows that the job failed; the process that keeps the store ends a little later than it would."""
    found.put(f"heard/{found.rank}", "")
    if found.ends_with_us and _greeted.get("stays") != identity():
        _greeted["stays"] = identity()
        atexit.register(_stay, found, identity())


def _stay(found: Job, process: str) -> None:
    """Wait at the end of a process for the ranks that look at its store; it has printed its error by now.

    Those in a collective don't look before this process is gone, and read what it wrote.
    """
    pause, others = Pause(_GRACE, found.size), set(range(1, found.size)) if process == identity() else set[int]()
    with harmless("the wait for other ranks"):
        while others and pause.waited < pause.limit:
            others = {rank for rank in others if not found.has(f"heard/{rank}") and _ended(found, rank) is None}
            pause.sleep()


def agree(context: LoweringContext, *, can_follow: bool) -> Verdict | None:
    """Compare the plan of a part with that of the other ranks; None if there is nothing to compare.

    Raises:
        RanksError: the ranks differ, or one does not come.
    """
    found = job()
    if found is None:
        return None
    events = context.timeline.events(context.graph_id)
    placed = next((e for e in reversed(events) if isinstance(e, Placement) and e.part == context.part), None)
    if placed is None or not placed.collectives:
        return None
    with _lock:
        own = _locks.setdefault(context.part_id, new_lock())
    with own:
        if context.part_id not in _known:
            family = context.graph_id.partition(":")[0]
            first = context.timeline.events(family) if family != context.graph_id else events
            about = _About(context.timeline, context.graph_id, context.part, _capture(first).function)
            plan = _plan(placed, events, first, context, about, can_follow=can_follow)
            failed = any(isinstance(e, Retreat) and e.part in ("", context.part) for e in events)
            late = any(_family(part) == f"{family}.{context.part}" for part in _known)
            groups = dict.fromkeys(map(group_of, placed.collectives))
            order = _orders.setdefault(f"{family}.{context.part}", plan.collectives)
            _known[context.part_id] = (
                _like_the_first(plan, order, about.name)
                if late
                else _meet(found, about, plan, groups, context.policy, failed=failed)
            )
    return _obeyed(_known[context.part_id])


def _like_the_first(plan: Plan, order: tuple[str, ...], name: str) -> Verdict:
    """The verdict on a variant, which this rank may be the only one to need: it communicates as the one agreed on."""
    if list(map(without_sizes, plan.collectives)) == list(map(without_sizes, order)):
        return Verdict(state=_SAME)
    mine, its = next(pair for pair in _paired(plan.collectives, order) if pair[0] != pair[1])
    sentence = f"a variant of {name} does not communicate as that which the ranks agreed on: {mine or 'none'}, not "
    return Verdict(
        state="differs", sentence=f"{sentence}{its or 'none'}; options={{'speculate': False}} has no variants"
    )


def agree_on_eager(
    timeline: Timeline, record: GraphRecord, policy: Policy, reason: Reason, module: GraphModule, values: Sequence[Any]
) -> None:
    """Tell the other ranks that a whole graph runs eager here, which is right only if it does so on all of them.

    Args:
        timeline: has the events of the graph.
        record: of the graph.
        policy: its options.
        reason: why.
        module: the Dynamo graph.
        values: the inputs of the first call.

    Raises:
        RanksError: it does not on all, or one does not come.
    """
    found = job()
    groups = dict.fromkeys((*groups_in(module), *groups_of_values(values))) if found is not None else {}
    if found is None or not groups:
        return
    events = timeline.events(record.id)
    capture = _capture(events)
    about = _About(timeline, record.id, "forward" if capture.training else "inference", capture.function)
    plan = Plan(
        program=_program(capture),
        collectives=(),
        place=_place(about, events),
        environment=_environment(record, policy),
        decisions=(("lowering of the whole graph", EAGER, reason.sentence),),
    )
    _obeyed(_meet(found, about, plan, groups, policy, failed=True, some=True))


@records.dataclass(frozen=True)
class _About:
    timeline: Timeline
    graph: str
    part: str
    function: str

    @property
    def name(self) -> str:
        return f"the {self.part} of {self.function or self.graph}"


def _obeyed(verdict: Verdict) -> Verdict:
    if verdict.state in (_SAME, EAGER):
        return verdict
    raise RanksError(verdict.sentence)


def _family(part_id: str) -> str:
    """The id of a part without the variant of its graph."""
    graph, _, part = part_id.rpartition(".")
    return f"{graph.partition(':')[0]}.{part}"


def _capture(events: Sequence[Event]) -> Capture:
    return next((event for event in events if isinstance(event, Capture)), Capture(graph=""))


def _place(about: _About, events: Sequence[Event]) -> str:
    """The part, and what breaks its graph off."""
    broken = next((e for e in events if isinstance(e, NearMiss) and e.kind == "graph_break"), None)
    if broken is None:
        return about.name
    why = f"{broken.source}: " if broken.source else ""
    return f"{about.name}, whose graph ends at {why}{broken.reason.sentence}"


def _program(capture: Capture) -> str:
    known = _captured.get(capture.graph.partition(":")[0], "")
    return f"{capture.function}, {capture.nodes} operators, {'training' if capture.training else 'inference'}, {known}"


def _environment(record: GraphRecord, policy: Policy) -> tuple[Decision, ...]:
    """Versions and options: what differs there differs for every graph."""
    found = [(name, shown, key) for name, (shown, key) in record.key.parts.items() if name not in _LOCAL]
    rows = [(name, shown if shown == key else f"{shown} ({key[:12]})".strip(), "") for name, shown, key in found]
    options = [(f"option {name}", str(getattr(policy, name)), "") for name in ("ranks", "autograd", "mode")]
    inductor = [(f"option {name}", str(value), "") for name, value in sorted(policy.inductor.items())]
    return (("torch", _torch_version(), ""), *rows, *options, *inductor)


@functools.cache
def _torch_version() -> str:
    import torch

    toolkit = torch.version.cuda or torch.version.hip
    return f"{torch.__version__}{f' with {toolkit}' if toolkit else ''}"


def _plan(
    placed: Placement,
    events: Sequence[Event],
    first: Sequence[Event],
    context: LoweringContext,
    about: _About,
    *,
    can_follow: bool,
) -> Plan:
    part = context.part
    rewrites = [
        (f"{event.kind} of {event.module or event.node}", event.target, event.detail)
        for event in events
        if isinstance(event, Rewrite) and not event.kept
    ]
    failures = [e.reason.sentence for e in events if isinstance(e, Retreat) and e.part in ("", part)]
    failed = "; ".join(dict.fromkeys(failures))
    declined = [
        (f"placement of {node.op} at {node.module or node.node}", node.lowering, _because(node.chain))
        for node in placed.declined
    ]
    rows = {event.subgraph: event for event in events if isinstance(event, Subgraph) and event.part == part}
    lowerings = [(f"lowering of {row.subgraph.partition('.')[2]}", row.lowering, failed) for row in rows.values()]
    return Plan(
        program=_program(_capture(first)),
        collectives=tuple(map(_in_any_rank, placed.collectives)),
        place=_place(about, first),
        environment=_environment(context.graph, context.policy),
        masks="; ".join(e.sentence for e in events if isinstance(e, Speculation) and e.state in _ASSUMED),
        decisions=(*rewrites, *declined, *lowerings),
        can_follow=can_follow,
    )


def _in_any_rank(collective: str) -> str:
    """A collective with what its group has in common with those of the other ranks of a mesh, in place of its name."""
    ranks = ranks_of(group_of(collective))
    steps = {second - first for first, second in itertools.pairwise(ranks)}
    if len(steps) != 1:
        return collective
    return in_group(collective, f"{len(ranks)}x{steps.pop()}")


def _because(chain: Sequence[Reason]) -> str:
    return "; ".join(reason.sentence for reason in chain)


def _meet(
    found: Job,
    about: _About,
    plan: Plan,
    groups: Iterable[str],
    policy: Policy,
    *,
    failed: bool,
    some: bool = False,
) -> Verdict:
    """Store the plan, and come to a verdict with the other ranks of its groups.

    With `some`, that of one group is enough: others need not be of the part.

    What has the collectives and the options of an agreed plan of the same code meets nobody: other ranks may have no
    reason to compile again. Unless something failed, which is so on all ranks, or must not be.
    """
    key = (about.function, about.part)
    digest = _hash(_text(plan))
    signature = _hash(repr((list(map(without_sizes, plan.collectives)), plan.environment)))
    known = _agreed.setdefault(key, set())
    if digest in known or (signature in known and not failed):
        return Verdict(state=_SAME)
    _rounds[key] = number = _rounds.get(key, 0) + 1
    place = f"plan/{_hash(repr(key))}/{number}"
    members = {group: ranks_of(group) for group in groups}
    members = {group: ranks for group, ranks in members.items() if found.rank in ranks and len(ranks) > 1}
    limit = found.limit if policy.ranks_seconds is None else policy.ranks_seconds
    pause = Pause(limit, max(map(len, members.values()), default=1))
    try:
        _know_keeper(found)
        if not found.has(f"{place}/{digest}"):
            found.put(f"{place}/{digest}", _text(plan))
        if policy.ranks == "warn":
            verdict = _seen(found, _arrived(found, place, digest, members))
        else:
            verdict = _awaited(found, about, place, digest, members, pause, some=some)
        _know_keeper(found)  # it may have joined since
    except RuntimeError as error:  # torch.distributed's errors of a store whose process has ended
        sentence = f"the store of the job can't be asked about {about.name}: {first_line(error)}"
        verdict = Verdict(state="missing", sentence=f"{sentence}; {_keeper()}", ranks=(0,))
    _record(about, verdict, pause.waited, warned=policy.ranks == "warn")
    if verdict.state in (_SAME, EAGER) or policy.ranks == "warn":
        known |= {digest, signature}
        return verdict if verdict.state == EAGER else Verdict(state=_SAME)
    _tell(found, about.function, about.graph, verdict.sentence)
    return verdict


def _record(about: _About, verdict: Verdict, seconds: float, *, warned: bool) -> None:
    reason = None
    if verdict.state != _SAME:
        reason = Reason(
            code="rank_missing" if verdict.state == "missing" else "ranks_differ",
            by="ranks",
            sentence=verdict.sentence,
            lever="give all ranks the same program, options, versions and overrides; options={'ranks': 'warn'} goes on",
        )
        if warned or verdict.state == EAGER:
            log.warning("omni: %s: %s", about.graph, verdict.sentence)
    state = "warned" if warned and reason is not None else verdict.state
    seconds = round(seconds, 6)
    about.timeline.append(
        Agreement(graph=about.graph, part=about.part, state=state, ranks=verdict.ranks, seconds=seconds, reason=reason)
    )


@dataclasses.dataclass
class _Wait:
    """A rank comes to a place for a group; `last` if it is the last one. The first to come, with a digest, watches."""

    group: str
    ranks: tuple[int, ...]
    place: str
    digest: str
    first: tuple[int, str]
    last: bool
    watched: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def at(self) -> str:
        return f"{self.place}/{self.group}"


def _arrived(found: Job, place: str, digest: str, members: dict[str, tuple[int, ...]]) -> list[_Wait]:
    """Come to a place, for each group."""
    waits: list[_Wait] = []
    for group, ranks in members.items():
        at = f"{place}/{group}"
        found.put(f"{at}/{found.rank}", digest)
        first, _, its = found.settle(f"{at}/first", f"{found.rank} {digest}").partition(" ")
        waits.append(_Wait(group, ranks, place, digest, (int(first), its), found.add(f"{at}/came") == len(ranks)))
    return waits


def _seen(found: Job, waits: Sequence[_Wait]) -> Verdict:
    """Compare with who came first, the last to come with all, and wait for nobody."""
    for wait in waits:
        rank, digest = wait.first
        both = {found.rank: (wait.place, wait.digest), rank: (wait.place, digest)}
        verdict = _of_all(found, wait) if wait.last else _compared(found, both)
        if verdict.state != _SAME:
            return dataclasses.replace(verdict, state="differs")
    return Verdict(state=_SAME)


def _of_all(found: Job, wait: _Wait) -> Verdict:
    """The verdict on the ranks of a group that all came to a place, stored there."""
    digests = found.get_all([f"{wait.at}/{rank}" for rank in wait.ranks]) or []
    at = {rank: (wait.place, digest) for rank, digest in zip(wait.ranks, digests, strict=True)}
    return _settled(found, wait, _compared(found, at), at)


def _awaited(
    found: Job,
    about: _About,
    place: str,
    digest: str,
    members: dict[str, tuple[int, ...]],
    pause: Pause,
    *,
    some: bool,
) -> Verdict:
    """The verdicts on all groups; the first that is not `same` counts."""
    # A part that may go on with one of its groups is not said to wait for any.
    found.put(f"at/{found.rank}", json.dumps([place, digest, [] if some else list(members)]))
    waits = _arrived(found, place, digest, members)
    while waits:
        for wait in list(waits):
            verdict = _looked(found, about, wait, pause)
            if verdict is None:
                continue
            if some or verdict.state != _SAME:
                if verdict.state in ("differs", "missing"):
                    for other in waits:  # those who share only another group with this rank hear of it, too
                        found.settle(f"{other.at}/verdict", _text(verdict))
                return verdict
            waits.remove(wait)
        if waits:
            pause.sleep()
    return Verdict(state=_SAME, ranks=tuple(sorted({rank for ranks in members.values() for rank in ranks})))


def _looked(found: Job, about: _About, wait: _Wait, pause: Pause) -> Verdict | None:
    """One look at the store: the verdict, if there is one by now. The last to come makes it, or else the first."""
    text = found.get(f"{wait.at}/verdict")
    if text is not None:
        verdict = Verdict.from_text(text)
        if verdict.state != _SAME or found.rank in verdict.ranks:
            return verdict
        # The others were here when this rank was elsewhere, and do not come again.
        return _seen(found, [dataclasses.replace(wait, last=False)])
    if wait.last:
        return _of_all(found, wait)
    watches = wait.first[0] == found.rank
    late = pause.waited > pause.limit + (0 if watches else _GRACE)
    if not late and time.monotonic() - wait.watched < 5 * pause.longest:
        return None
    wait.watched = time.monotonic()
    _know_keeper(found)
    if not watches:
        ended = {wait.first[0]: _ended(found, wait.first[0], about.function)}
        return _missing(found, about, wait, ended, (wait.first[0],) if late else (), pause.limit)
    came = {rank: (wait.place, digest) for rank in wait.ranks if (digest := found.get(f"{wait.at}/{rank}")) is not None}
    elsewhere = _elsewhere(found, wait, came)
    if len(came) + len(elsewhere) == len(wait.ranks):
        return _settled(found, wait, _compared(found, came | elsewhere), came | elsewhere)
    absent = [rank for rank in wait.ranks if rank not in came and rank not in elsewhere]
    ended = {rank: _ended(found, rank, about.function) for rank in absent}
    return _missing(found, about, wait, ended, tuple(absent) if late else (), pause.limit)


def _elsewhere(found: Job, wait: _Wait, came: Container[int]) -> dict[int, tuple[str, str]]:
    """The ranks that wait for the same group in another part, with their places and digests."""
    others: dict[int, tuple[str, str]] = {}
    for rank in wait.ranks:
        told = found.get(f"at/{rank}") if rank not in came else None
        place, digest, groups = json.loads(told) if told is not None else ("", "", [])
        if wait.group in groups and not found.has(f"{place}/{wait.group}/verdict"):
            others[rank] = (place, digest)
    return others


def _settled(found: Job, wait: _Wait, verdict: Verdict, at: dict[int, tuple[str, str]]) -> Verdict:
    """Store a verdict at each place where ranks wait; the first that is stored there holds."""
    for place in dict.fromkeys(place for place, _ in at.values()):
        here = tuple(sorted(rank for rank, (its, _) in at.items() if its == place))
        told = dataclasses.replace(verdict, ranks=here) if verdict.state == _SAME else verdict
        held = Verdict.from_text(found.settle(f"{place}/{wait.group}/verdict", _text(told)))
        verdict = held if place == wait.place else verdict
    return verdict


def _missing(
    found: Job,
    about: _About,
    wait: _Wait,
    ended: dict[int, str | None],
    late: tuple[int, ...],
    limit: float,
) -> Verdict | None:
    """The verdict that ranks ended, or are late; None if neither."""
    said = {rank: text for rank, text in sorted(ended.items()) if text is not None}
    sentence = f"{about.name} needs all of {_names(wait.ranks)}"
    if said:
        sentence, late = f"{sentence}: {'; '.join(said.values())}", tuple(said)
    elif late:
        sentence += (
            f", and {_names(late)} did not come within {limit:g} seconds: it compiles, hangs, or runs other code"
        )
        sentence += "; options={'ranks_seconds': …} sets the limit"
    else:
        return None
    return _settled(
        found, wait, Verdict(state="missing", sentence=sentence, ranks=late), {found.rank: (wait.place, wait.digest)}
    )


def _process_of(found: Job, rank: int) -> str:
    """Which process a rank is, kept; empty if it did not say."""
    if rank not in _processes and (process := found.get(f"process/{rank}")) is not None:
        _processes[rank] = process
    return _processes.get(rank, "")


def _know_keeper(found: Job) -> None:
    """Keep which process has the store, and where it will say why it ended: the store may be gone when it matters."""
    if _process_of(found, 0) and not _words and (path := found.get("words")) is not None:
        _words.append(Path(path))


def _keeper() -> str:
    """What became of the process with the store, which can't be asked any more: rank 0's, unless an agent keeps it."""
    process, pause = _processes.get(0, ""), Pause(_GRACE)
    if _words and _words[0].exists():
        with harmless("why rank 0 ended"):
            return _failure(store.read_trusted(_words[0]).decode())
    while process and pause.waited < pause.limit:
        if is_gone(process):
            return f"the process of rank 0, which keeps it, has ended ({process})"
        pause.sleep()  # its sockets close before it is gone
    return "rank 0 keeps it, and may have ended"


def _ended(found: Job, rank: int, function: str = "") -> str | None:
    """How a rank ended, as it said or as its process shows; None if it may still come.

    An error in another function than this one is no end.
    """
    failed, process = found.get(f"failed/{rank}"), _process_of(found, rank)
    gone = bool(process) and is_gone(process)
    if failed is not None and (gone or not function or json.loads(failed)["function"] == function):
        return _failure(failed)
    return _gone(rank, process) if gone else None


def _failure(told: str) -> str:
    said = json.loads(told)
    return f"rank {said['rank']} failed in {said['function'] or said['graph']}: {said['error']}"


def _gone(rank: int, process: str) -> str:
    return f"the process of rank {rank} has ended ({process})"


def _compared(found: Job, at: dict[int, tuple[str, str]]) -> Verdict:
    """The verdict on the plans of some ranks, which are at their places under their digests."""
    if len(set(at.values())) <= 1:
        return Verdict(state=_SAME, ranks=tuple(at))
    plans = {each: Plan.from_text(found.get("/".join(each)) or "{}") for each in set(at.values())}
    first = min(at)
    for rank in sorted(at):
        mine, its = plans[at[first]], plans[at[rank]]
        differs = difference(mine, its)
        if differs is None:
            continue
        alike = tuple(other for other in sorted(at) if at[other] == at[rank])
        name, one, other = differs
        have = "have" if len(alike) > 1 else "has"
        if mine.place == its.place:
            sentence = f"{mine.place} differs between ranks in the {name}: rank {first} has {one}, "
            sentence += f"{_names(alike)} {have} {other}"
        else:
            sentence = f"ranks run different graphs, which differ in the {name}: rank {first} has {one} in "
            sentence += f"{mine.place}; {_names(alike)} {have} {other} in {its.place}"
        if name.startswith(_FOLLOWED) and all(plan.can_follow and _follows(plan) for plan in plans.values()):
            return Verdict(state=EAGER, sentence=f"{sentence}; the part runs eager on all ranks", ranks=alike)
        return Verdict(state="differs", sentence=sentence, ranks=alike)
    return Verdict(state=_SAME, ranks=tuple(at))


def _follows(plan: Plan) -> bool:
    return any(name == "option ranks" and value == "follow" for name, value, _ in plan.environment)


def difference(one: Plan, other: Plan) -> tuple[str, str, str] | None:
    """The first decision in which two plans differ in a way that matters: its name, and what each has with its reason.

    Ranks may run different programs as long as these communicate alike, and may see different masks: what is decided
    for one of them says nothing of the other then.
    """
    if one.collectives or other.collectives:
        for number, (mine, its) in enumerate(_paired(one.collectives, other.collectives)):
            whole = "[]" not in mine and "[]" not in its
            if (mine if whole else without_sizes(mine)) != (its if whole else without_sizes(its)):
                eager = next((d for plan in (one, other) if not plan.collectives for d in plan.decisions), None)
                if eager is not None:
                    return _both(eager[0], one.decisions, other.decisions)
                return f"collective {number}", mine or "none", its or "none"
    found = _first_difference(one.environment, other.environment)
    if found is None and one.program == other.program and one.masks == other.masks:
        found = _first_difference(one.decisions, other.decisions)
    return found


def _paired(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    length = max(len(one), len(other))
    return [(one[i] if i < len(one) else "", other[i] if i < len(other) else "") for i in range(length)]


def _first_difference(one: Sequence[Decision], other: Sequence[Decision]) -> tuple[str, str, str] | None:
    mine, its = {name: value for name, value, _ in one}, {name: value for name, value, _ in other}
    for name in dict.fromkeys((*mine, *its)):
        if mine.get(name) != its.get(name):
            return _both(name, one, other)
    return None


def _both(name: str, one: Sequence[Decision], other: Sequence[Decision]) -> tuple[str, str, str]:
    def told(decisions: Sequence[Decision]) -> str:
        value, reason = next(((value, why) for each, value, why in decisions if each == name), ("none", ""))
        return f"{value or 'nothing'}{f' ({reason})' if reason else ''}"

    return name, told(one), told(other)


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
