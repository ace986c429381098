"""Ranks agree: before the first call of a part with collectives, the ranks of their groups compare their plans.

A plan that differs on one rank alone hangs a job, or changes values on that rank only. What is compared is what the
timeline has of the graph: collectives in their order, versions and options, rewrites, placement and lowerings. Each
rank stores a digest of it in the store of the default process group; the lowest rank of a group compares them, and
stores one verdict, by which all go. Nobody waits in a collective, so that it does not matter which ranks compile, and
which restore. Later calls cost nothing.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch.fx import GraphModule

from omnicomp._torch.distributed import Job, Pause, groups_of_values, identity, is_gone, job, ranks_of
from omnicomp.analysis.collectives import group_of, groups_in, in_group, without_sizes
from omnicomp.analysis.hashes import numbers_and_sizes
from omnicomp.errors import RanksError, add_note, first_line, harmless
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.base import GraphRecord
from omnicomp.options.policy import Policy
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Agreement, Capture, Event, Placement, Reason, Retreat, Rewrite, Speculation, Subgraph
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank says of a part.

    Attributes:
        program: equal where ranks captured the same code, with the same numbers and sizes in it.
        collectives: in program order.
        environment: versions and options.
        masks: what was assumed of masks, which may differ with the data of a rank.
        decisions: rewrites, placement and lowerings.
        can_follow: whether the part can still go to eager.
    """

    program: str
    collectives: tuple[str, ...]
    environment: tuple[Decision, ...] = ()
    masks: str = ""
    decisions: tuple[Decision, ...] = ()
    can_follow: bool = False

    def to_text(self) -> str:
        """The JSON form."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """The inverse of `to_text`."""
        data: dict[str, Any] = json.loads(text)
        for name in ("environment", "decisions"):
            data[name] = tuple((str(a), str(b), str(c)) for a, b, c in data[name])
        data["collectives"] = tuple(data["collectives"])
        return cls(**data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What holds for all ranks of a group.

    Attributes:
        state: `same`, `eager`, `differs` or `missing`.
        sentence: what differs, or who is missing.
        ranks: that it is about.
    """

    state: str
    sentence: str = ""
    ranks: tuple[int, ...] = ()


_lock = new_lock()
_locks: Final[dict[str, Any]] = {}
_rounds: Final[dict[tuple[str, str], int]] = {}
_agreed: Final[dict[tuple[str, str], set[str]]] = {}
_known: Final[dict[str, Verdict]] = {}  # by the id of a part
_greeted: Final[dict[str, str]] = {}
_processes: Final[dict[int, str]] = {}  # by rank, what `process/…` of the store says: it may be gone when it matters
_orders: Final[dict[str, tuple[str, ...]]] = {}  # of the collectives that were agreed on, by part
_captured: Final[dict[str, str]] = {}  # by the id of a graph


def join(graph: GraphRecord, module: GraphModule) -> None:
    """Note what was captured, and tell the other ranks which process this one is: once, with its first graph."""
    found = job()
    if found is None:
        return
    _captured[graph.id] = numbers_and_sizes(module)
    if _greeted.get("identity") != f"{identity()} {found.rank}":
        with harmless(f"the process of {graph.id} for other ranks"):
            _remember(found, (0,))
            found.put(f"process/{found.rank}", identity())
            _greeted["identity"] = f"{identity()} {found.rank}"


def spans(module: GraphModule, values: Sequence[Any]) -> bool:
    """Whether a Dynamo graph, called with these values, may communicate with other ranks."""
    return job() is not None and bool(groups_in(module) or groups_of_values(values))


def fail(timeline: Timeline, graph: str, error: BaseException) -> None:
    """Tell the other ranks that a graph ended with an error on this one."""
    found = job()
    if found is None or isinstance(error, RanksError):
        return
    capture = _capture(timeline.events(graph.partition(":")[0]))
    told = {"function": capture.function, "graph": graph, "error": first_line(error)}
    try:
        found.put(f"failed/{found.rank}", json.dumps(told))
    except RuntimeError as second:
        log.warning("omni: other ranks could not be told: %s", first_line(second))


def explain(error: BaseException) -> None:
    """Add to the error of a collective what other ranks said before they ended."""
    found = job()
    if found is None or isinstance(error, RanksError):
        return
    try:
        said = [_end_of(found, rank, "") for rank in range(found.size) if rank != found.rank]
        found.put(f"heard/{found.rank}", "")
        pause = Pause(_GRACE)
        heard = [f"heard/{rank}" for rank in range(found.size)]
        # The store ends with the process that keeps it, which is rank 0's.
        while found.rank == 0 and pause.waited < pause.limit and found.get_all(heard) is None:
            pause.sleep()
    except RuntimeError as second:
        said = [f"the store of the job can't be asked: {first_line(second)}; {_keeper()}"]
    for text in filter(None, said):
        add_note(error, f"omnicomp: {text}")


def agree(context: LoweringContext, *, can_follow: bool) -> Verdict | None:
    """Compare the plan of a part with that of the other ranks; None if there is nothing to compare.

    Args:
        context: where the part belongs.
        can_follow: whether it can still go to eager.

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
            plan = _plan(placed, events, _capture(first), context, can_follow=can_follow)
            failed = any(isinstance(e, Retreat) and e.part in ("", context.part) for e in events)
            late = any(_family(part) == f"{family}.{context.part}" for part in _known)
            about = _About(context.timeline, context.graph_id, context.part, _capture(first).function)
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
    capture = _capture(timeline.events(record.id))
    plan = Plan(
        program=_program(capture),
        collectives=(),
        environment=_environment(record, policy),
        decisions=(("lowering of the whole graph", EAGER, reason.sentence),),
    )
    part = "forward" if capture.training else "inference"
    about = _About(timeline, record.id, part, capture.function)
    _obeyed(_meet(found, about, plan, groups, policy, failed=True, some=True))


@dataclasses.dataclass(frozen=True)
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
    placed: Placement, events: Sequence[Event], capture: Capture, context: LoweringContext, *, can_follow: bool
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
        program=_program(capture),
        collectives=tuple(map(_in_any_rank, placed.collectives)),
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
    groups: Sequence[str] | dict[str, None],
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
    digest = _hash(plan.to_text())
    signature = _hash(repr((list(map(without_sizes, plan.collectives)), plan.environment)))
    known = _agreed.setdefault(key, set())
    if digest in known or (signature in known and not failed):
        return Verdict(state=_SAME)
    _rounds[key] = number = _rounds.get(key, 0) + 1
    place = f"plan/{_hash(repr(key))}/{number}"
    members = {group: ranks_of(group) for group in groups}
    members = {group: ranks for group, ranks in members.items() if found.rank in ranks and len(ranks) > 1}
    limit = found.limit if policy.ranks_seconds is None else policy.ranks_seconds
    pause = Pause(limit)
    try:
        _remember(found, {rank for ranks in members.values() for rank in ranks} | {0})
        if found.get(f"{place}/{digest}") is None:
            found.put(f"{place}/{digest}", plan.to_text())
        for group in members:
            found.put(f"{place}/{group}/{found.rank}", digest)
        if policy.ranks == "warn":
            verdict = _seen(found, about, place, members, plan)
        else:
            verdict = _awaited(found, about, place, members, pause, some=some)
    except RuntimeError as error:  # torch.distributed's errors of a store whose process has ended
        sentence = f"the store of the job can't be asked about {about.name}: {first_line(error)}"
        verdict = Verdict(state="missing", sentence=f"{sentence}; {_keeper()}", ranks=(0,))
    _record(about, verdict, pause.waited, warned=policy.ranks == "warn")
    if verdict.state in (_SAME, EAGER) or policy.ranks == "warn":
        known |= {digest, signature}
        return verdict if verdict.state == EAGER else Verdict(state=_SAME)
    told = {"function": about.function, "graph": about.graph, "error": verdict.sentence}
    try:
        found.put(f"failed/{found.rank}", json.dumps(told))
        _linger(found, place, members)
    except RuntimeError as error:
        log.warning("omni: other ranks could not be told: %s", first_line(error))
    return verdict


def _linger(found: Job, place: str, members: dict[str, tuple[int, ...]]) -> None:
    """Wait until the ranks that came know the verdict: the store ends with the process that raises first."""
    pause = Pause(_GRACE)
    for group, ranks in members.items():
        found.put(f"{place}/{group}/{found.rank}/knows", "")
        came = [rank for rank in ranks if found.get(f"{place}/{group}/{rank}") is not None]
        while pause.waited < pause.limit and found.get_all([f"{place}/{group}/{rank}/knows" for rank in came]) is None:
            pause.sleep()


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


def _seen(found: Job, about: _About, place: str, members: dict[str, tuple[int, ...]], plan: Plan) -> Verdict:
    """Compare with the plans that are there, and wait for none."""
    for group, ranks in members.items():
        digests = {rank: text for rank in ranks if (text := found.get(f"{place}/{group}/{rank}")) is not None}
        verdict = _compared(about, digests, lambda digest: _plan_at(found, place, digest))
        if verdict.state != _SAME:
            return dataclasses.replace(verdict, state="differs")
    return Verdict(state=_SAME)


def _awaited(
    found: Job, about: _About, place: str, members: dict[str, tuple[int, ...]], pause: Pause, *, some: bool
) -> Verdict:
    """The verdicts on all groups; the first that is not `same` counts."""
    open_groups = dict(members)
    while open_groups:
        for group, ranks in list(open_groups.items()):
            verdict = _looked(found, about, f"{place}/{group}", place, ranks, pause)
            if verdict is None:
                continue
            if some or verdict.state != _SAME:
                _settle_rest(found, place, open_groups, verdict)
                return verdict
            del open_groups[group]
        if open_groups:
            pause.sleep()
    return Verdict(state=_SAME, ranks=tuple(sorted({rank for ranks in members.values() for rank in ranks})))


def _settle_rest(found: Job, place: str, groups: dict[str, tuple[int, ...]], verdict: Verdict) -> None:
    """Those who share only another group with this rank hear of it, too."""
    if verdict.state in ("differs", "missing"):
        for group in groups:
            found.settle(f"{place}/{group}/verdict", json.dumps(dataclasses.asdict(verdict)))


def _looked(found: Job, about: _About, place: str, plans: str, ranks: tuple[int, ...], pause: Pause) -> Verdict | None:
    """One look at the store: the verdict, if there is one by now. The lowest rank makes it."""
    text = found.get(f"{place}/verdict")
    if text is not None:
        return _verdict(text)
    leads = found.rank == ranks[0]
    if leads:
        digests = found.get_all([f"{place}/{rank}" for rank in ranks])
        if digests is not None:
            told = dict(zip(ranks, digests, strict=True))
            return _settle(found, place, _compared(about, told, lambda digest: _plan_at(found, plans, digest)))
    _remember(found, {*ranks, 0})
    absent = tuple(rank for rank in ranks if found.get(f"{place}/{rank}") is None)
    # The lowest rank may also end after it came, before it compared.
    ends = {rank: _end_of(found, rank, about.function) for rank in {*absent, ranks[0]} if rank != found.rank}
    ended = {rank: said for rank, said in sorted(ends.items()) if said}
    if ended:
        said = "; ".join(ended.values())
        sentence = f"{about.name} needs all of {_names(ranks)}: {said}"
        return _settle(found, place, Verdict(state="missing", sentence=sentence, ranks=tuple(ended)))
    if pause.waited > pause.limit + (0 if leads else _GRACE):
        names = _names(absent or ranks[:1])
        sentence = f"{about.name} needs all of {_names(ranks)}, and {names} did not come within {pause.limit:g} seconds"
        hint = "it compiles, hangs, or runs other code; options={'ranks_seconds': …} sets the limit"
        verdict = Verdict(state="missing", sentence=f"{sentence}: {hint}", ranks=absent)
        return _settle(found, place, verdict)
    return None


def _remember(found: Job, ranks: Iterable[int]) -> None:
    """Keep which processes these ranks are."""
    for rank in ranks:
        if rank not in _processes and (process := found.get(f"process/{rank}")) is not None:
            _processes[rank] = process


def _keeper() -> str:
    """What became of the process with the store, which can't be asked any more: rank 0's, unless an agent keeps it."""
    process, pause = _processes.get(0, ""), Pause(_GRACE)
    while process and pause.waited < pause.limit:
        if is_gone(process):
            return f"the process of rank 0, which keeps it, has ended ({process})"
        pause.sleep()  # its sockets close before it is gone
    return "rank 0 keeps it, and may have ended"


def _settle(found: Job, place: str, verdict: Verdict) -> Verdict:
    """The first verdict that is stored holds."""
    return _verdict(found.settle(f"{place}/verdict", json.dumps(dataclasses.asdict(verdict))))


def _verdict(text: str) -> Verdict:
    data: dict[str, Any] = json.loads(text)
    data["ranks"] = tuple(data["ranks"])
    return Verdict(**data)


def _end_of(found: Job, rank: int, function: str) -> str:
    """How a rank ended, as it said or as its process shows; empty if it may still come."""
    failed = found.get(f"failed/{rank}")
    process = found.get(f"process/{rank}")
    gone = process is not None and is_gone(process)
    if failed is not None:
        told = json.loads(failed)
        if gone or not function or told["function"] == function:
            return f"rank {rank} failed in {told['function'] or told['graph']}: {told['error']}"
    return f"the process of rank {rank} has ended ({process})" if gone else ""


def _plan_at(found: Job, place: str, digest: str) -> Plan:
    return Plan.from_text(found.get(f"{place}/{digest}") or "{}")


def _compared(about: _About, digests: dict[int, str], plan_of: Callable[[str], Plan]) -> Verdict:
    """The verdict on the plans of some ranks."""
    if len(set(digests.values())) <= 1:
        return Verdict(state=_SAME, ranks=tuple(digests))
    plans = {digest: plan_of(digest) for digest in set(digests.values())}
    first = min(digests)
    for rank in sorted(digests):
        found = difference(plans[digests[first]], plans[digests[rank]])
        if found is None:
            continue
        alike = tuple(other for other in sorted(digests) if digests[other] == digests[rank])
        name, mine, others = found
        sentence = f"{about.name} differs between ranks in the {name}: "
        sentence += f"rank {first} has {mine}, {_names(alike)} {'have' if len(alike) > 1 else 'has'} {others}"
        if name.startswith(_FOLLOWED) and all(plan.can_follow and _follows(plan) for plan in plans.values()):
            return Verdict(state=EAGER, sentence=f"{sentence}; the part runs eager on all ranks", ranks=alike)
        return Verdict(state="differs", sentence=sentence, ranks=alike)
    return Verdict(state=_SAME, ranks=tuple(digests))


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
