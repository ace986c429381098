"""Certificates for what passes change: each part that changed is checked by what knows nothing of the pass.

`changes` cuts the parts out, `omnicomp.analysis.certify` compares them at small sizes. A certificate is
kept by the structure of the part, beside both graphs, so that the layers of a model are one check, and a warm start is
none. The key holds the version of the package, so that an edited pass or checker begins anew.
"""

import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.autograd.attention import hint_of
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp._torch.fx import describe, fake_mode
from omnicomp._torch.inductor.store import JsonStore
from omnicomp._torch.inductor.versions import keeps_caches
from omnicomp._torch.symbols import facts_of
from omnicomp.analysis import certify
from omnicomp.analysis.nodes import fake_value, module_path, source_line
from omnicomp.errors import PassError, first_line
from omnicomp.options.digest import package_digest
from omnicomp.passes import assumptions as masks
from omnicomp.passes.changes import Change, UncutError, changes
from omnicomp.passes.check_budget import CheckBudget
from omnicomp.passes.graph_data import Plain, UnkeptError, dump_graph, dump_target, load_graph
from omnicomp.passes.mask_classes import MaskClass, classified, joined, reduced
from omnicomp.timeline import Certified, Event, NearMiss, Reason, Rewrite
from omnicomp.timeline.files import event_from_dict

CACHE: Final = "certificates"
# What a pass has to claim, as it makes other values of values that a program may have.
_CLAIMED: Final = (certify.FINITE_INPUTS, certify.FINITE_RESULTS, certify.NO_EMPTY_ROW, certify.SIGNED_ZERO)
_MOST_MASKED: Final = 2**22


@records.dataclass(frozen=True, kw_only=True)
class Kept:
    """A certificate as it is kept.

    Attributes:
        certificate: what was found.
        before: the graph as it was, as data; None where it can't be kept.
        after: the graph as it is, likewise.
        inputs: names of the inputs, which the assumptions go by.
    """

    certificate: certify.Certificate
    before: Plain
    after: Plain
    inputs: tuple[str, ...] = ()


def _dump(kept: Kept) -> Plain:
    return {**vars(kept), "certificate": kept.certificate.to_json(), "inputs": list(kept.inputs)}


def _load(data: Plain) -> Kept:
    found = certify.Certificate.from_json(data["certificate"])
    return Kept(certificate=found, before=data["before"], after=data["after"], inputs=tuple(data["inputs"]))


STORE: Final = JsonStore[Kept](CACHE, _dump, _load, files=2048)


def _dump_events(events: Sequence[Certified]) -> Plain:
    dropped = ("graph", "time", "seq", "schema", "kept", "seconds")
    return [{key: value for key, value in event.to_dict().items() if key not in dropped} for event in events]


def _load_events(data: Plain) -> list[Certified]:
    found = [event_from_dict({**each, "schema": 1, "graph": "", "kept": True}) for each in data]
    return [event for event in found if isinstance(event, Certified)]


# What was found of all that a pass did to a graph, for one that it does the same to again.
_GRAPHS: Final = JsonStore[list[Certified]]("certified", _dump_events, _load_events, files=256, size=2**22)


class NotCertifiedError(PassError):
    """What a pass made of a graph computes something else.

    Attributes:
        event: what was found.
    """

    def __init__(self, event: Certified) -> None:
        super().__init__(f"what it made at {event.node} computes something else: {event.sentence}")
        self.event = event


def certified(
    name: str,
    claims: Sequence[certify.Assumption],
    before: GraphModule,
    after: GraphModule,
    *,
    graph: str,
    assumed: Iterable[masks.Assumption] = (),
    known: dict[str, certify.Certificate],
    always: bool = False,
    prepare: Callable[[GraphModule], GraphModule] = lambda after: after,
    refuting: Callable[[Change, Certified], Certified] = lambda change, event: event,
    budget: CheckBudget | None = None,
    whole: str = "",
    caller: Node | None = None,
) -> list[Certified]:
    """Check all that a pass changed in a graph, and take back what computes something else.

    Args:
        name: of the pass.
        claims: what its rewrites rest on.
        before: a copy of the graph as it was.
        after: the graph as it is; a part of it that is refuted becomes what it was.
        graph: id of the graph.
        assumed: what passes assumed of the classes of masks.
        known: certificates of this compilation by key; extended.
        always: whether to check what earlier compilations have checked.
        prepare: makes a part of the new graph one that can be run by definitions.
        refuting: adds to what is told of a part that is refuted.
        budget: what the checks may take; parts behind it are told to be unchecked.
        whole: tells both graphs, if something short does: then no part is cut out of them a second time.
        caller: the node that calls the graph, if it is a region of another one.

    Returns:
        What was found of each part, with the verdict `refuted` for those that were taken back.

    Raises:
        NotCertifiedError: what computes something else can't be told from the rest. A check that fails is no reason.
    """
    told = {item.key: _of_mask(item, before) for item in assumed}
    rests = [*claims, *filter(None, told.values())]
    unsaid = [item.sentence for item in assumed if told[item.key] is None]
    kept = "" if always or not whole or not keeps_caches() else _hash([name, list(map(str, rests)), unsaid, whole])
    again, _ = _GRAPHS.read(kept) if kept else (None, "")
    if again is not None:
        return [dataclasses.replace(event, graph=graph) for event in again]
    found: list[Certified] = []
    wrong: list[tuple[Certified, Callable[[], None]]] = []
    try:
        for change in changes(before, after, caller):
            made = _certified(name, change, rests, unsaid, known, always, prepare, budget)
            event = dataclasses.replace(made, graph=graph)
            event = refuting(change, event) if event.verdict == certify.REFUTED else event
            found.append(event)
            if event.verdict == certify.REFUTED:
                if change.undo is None:
                    raise NotCertifiedError(event)
                wrong.append((event, change.undo))
    except (NotCertifiedError, *CONTROL_FLOW):
        raise
    except Exception as error:  # noqa: BLE001 - becomes the sentence of the event
        sentence = str(error) if isinstance(error, UncutError) else f"the check failed: {first_line(error)}"
        found.append(Certified(graph=graph, name=name, node="", verdict=certify.ASSUMED, sentence=sentence))
    for event, undo in wrong:
        try:
            undo()
        except Exception as error:
            raise NotCertifiedError(event) from error
    if wrong:
        after.graph.lint()
        after.recompile()
    elif kept and all(event.key for event in found):
        _GRAPHS.write(kept, found)
    return found


def _certified(
    name: str,
    change: Change,
    claims: Sequence[certify.Assumption],
    unsaid: Sequence[str],
    known: dict[str, certify.Certificate],
    always: bool,
    prepare: Callable[[GraphModule], GraphModule],
    budget: CheckBudget | None,
) -> Certified:
    """The certificate of a change, from the smallest cut that holds."""
    at: Change | None = change
    result: Certified | None = None
    while at is not None:
        if result is not None and result.verdict == certify.REFUTED:
            budget = None  # what may be wrong is looked at to its end
        event = _of_cut(name, dataclasses.replace(at, after=prepare(at.after)), claims, known, always, budget)
        if result is None or result.verdict in (certify.REFUTED, certify.ASSUMED):
            seconds = event.seconds + (0.0 if result is None else result.seconds)
            result = dataclasses.replace(event, nodes=change.nodes, seconds=seconds)
        if result.verdict not in (certify.REFUTED, certify.ASSUMED):
            break
        if budget is not None and budget.spent >= budget.seconds and result.verdict == certify.ASSUMED:
            break
        at = at.wider()
    assert result is not None
    below = change.read() if result.verdict == certify.REFUTED else None
    if below is not None:
        event = _of_cut(name, dataclasses.replace(below, after=prepare(below.after)), claims, known, always, None)
        if event.verdict not in (certify.REFUTED, certify.ASSUMED):
            return dataclasses.replace(event, nodes=change.nodes, seconds=event.seconds + result.seconds)
    if result.verdict == certify.REFUTED and unsaid:
        # What the masks are assumed to be is checked at each call, and can't be told to the checker.
        told = "; ".join(unsaid)
        return dataclasses.replace(result, verdict=certify.ASSUMED, sentence=f"equal only where {told}")
    return result


def _of_cut(
    name: str,
    change: Change,
    claims: Sequence[certify.Assumption],
    known: dict[str, certify.Certificate],
    always: bool,
    budget: CheckBudget | None,
) -> Certified:
    inputs = [node.name for node in change.before.graph.find_nodes(op="placeholder")]
    own = tuple(each for each in claims if not each.subject or each.subject in inputs)
    event = Certified(
        graph="",
        name=name,
        node=change.at.name,
        source=source_line(change.at),
        module=module_path(change.at),
        nodes=change.nodes,
    )
    key = _key(change, own)
    kept = known.get(key) or (None if always or not key else _read(key))
    if kept is not None:
        known[key] = kept
        return dataclasses.replace(event, **_told(kept), key=key, kept=True)
    if budget is not None and budget.spent >= budget.seconds:
        sentence = (
            f"left unchecked, as the checks of this graph took the {budget.seconds:.1f} s that they may take; "
            "options={'certify': 'always'} checks all"
        )
        return dataclasses.replace(event, verdict=certify.ASSUMED, sentence=sentence)
    started = time.thread_time()
    try:
        found = certify.check(change.before, change.after, assumptions=own, bound=_bound(own))
    except Exception as error:  # noqa: BLE001 - becomes the sentence of the event
        sentence = f"the check failed: {first_line(error)}"
        return dataclasses.replace(event, verdict=certify.ASSUMED, sentence=sentence)
    finally:
        if budget is not None:
            budget.spent += time.thread_time() - started
    if key:
        known[key] = found
    if key and keeps_caches():
        before, after = _data(change.before, change.after) or (None, None)
        STORE.write(key, Kept(certificate=found, before=before, after=after, inputs=tuple(inputs)))
    return dataclasses.replace(event, **_told(found), key=key, seconds=found.seconds)


def _bound(claims: Iterable[certify.Assumption]) -> float | None:
    """The error that a claim allows; None if it is eager's own."""
    return next((float(each.detail) for each in claims if each.kind == certify.ROUNDING and each.detail), None)


def _read(key: str) -> certify.Certificate | None:
    if not keeps_caches():
        return None
    kept, _ = STORE.read(key)
    return None if kept is None else kept.certificate


def _told(found: certify.Certificate) -> dict[str, Any]:
    """The fields of an event; where numbers are equal and special values are not, a pass has to say so."""
    unclaimed = [each.detail for each in found.open if each.kind in _CLAIMED]
    refuted = bool(unclaimed) and found.verdict != certify.REFUTED
    return {
        "verdict": certify.REFUTED if refuted else found.verdict,
        "sentence": f"other values, which the pass does not claim, for {', '.join(unclaimed)}"
        if refuted
        else found.reason,
        "methods": tuple(each.name for each in found.methods if each.holds),
        "assumptions": tuple(
            " ".join(filter(None, (each.kind, each.subject, each.detail))) for each in found.assumptions
        ),
        "differences": tuple(f"{each.kind}: {each.detail}" for each in found.differences),
        "probability": found.probability or 0.0,
    }


def _of_mask(item: masks.Assumption, module: GraphModule) -> certify.Assumption | None:
    """What is assumed of an input by what is assumed of the mask that is made of it, for the checker.

    None if there is no word for it: then the input is random, and what is refuted may hold all the same.
    """
    nodes = [node for node in module.graph.find_nodes(op="placeholder") if node.name in item.inputs]
    value = fake_value(nodes[0]) if len(nodes) == 1 == len(item.inputs) else None
    if item.holds is None or not isinstance(value, torch.Tensor) or value.dtype.is_complex:
        return None
    from omnicomp.analysis.certify.inputs import mask  # with the checker, which a warm start does without

    shape = tuple(hint_of(size) for size in value.shape)
    if math.prod(shape) > _MOST_MASKED:
        return None
    words = _words(item.holds)
    for word in (*words, *(f"{word} {certify.ONES}" for word in words if value.is_floating_point())):
        made = mask(word, shape, value.dtype).to(value.device)
        # Not by a `Checker`, which would remember it in place of masks of the program.
        found = reduced(item.check.forward(made))
        if classified(joined(found.cpu())).among(item.accepts) == item.holds:
            return certify.Assumption(certify.MASK_CLASS, subject=item.inputs[0], detail=word)
    return None


def _words(holds: MaskClass) -> tuple[str, ...]:
    """Classes of an input that may make a mask of a class."""
    if holds.kind == "band":
        return (f"band {_bound_of(holds.left)} {_bound_of(holds.right)}",)
    if holds.kind == "prefix":
        return (f"prefix {_bound_of(holds.right)} {_bound_of(holds.length)}",)
    return {"full": ("full", "hidden"), "causal": ("causal", "causal_bottom_right")}.get(holds.kind, ())


def _bound_of(number: int | None) -> str:
    return "-" if number is None else str(number)


def _data(*sides: GraphModule) -> list[Plain] | None:
    """Graphs as data, with names that do not depend on where they were; None if they can't be data."""
    try:
        return [_normal(side) for side in sides]
    except (UnkeptError, ValueError):
        return None


def _normal(module: GraphModule) -> Plain:
    data = dump_graph(module, described=("placeholder",))
    names = {node[0]: f"v{index}" for index, node in enumerate(data["nodes"])}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(each) for each in value]
        if isinstance(value, dict):
            return {k: names[v] if k == "node" else renamed(v) for k, v in value.items()}
        return value

    nodes = [
        [names[name], op, names[name] if op == "placeholder" else target, renamed(args), renamed(kwargs), value]
        for name, op, target, args, kwargs, value in data["nodes"]
    ]
    return {**data, "nodes": nodes}


def _key(change: Change, claims: Sequence[certify.Assumption]) -> str:
    """A hash of all that a certificate depends on; empty if that can't be told."""
    places = {node.name: place for place, node in enumerate(change.before.graph.find_nodes(op="placeholder"))}
    rests = [(each.kind, places.get(each.subject, -1), each.detail) for each in claims]
    try:
        told: Any = _data(change.before, change.after) or _text(change.before, change.after)
    except UnkeptError:
        return ""
    return _hash([rests, told])


def _hash(parts: Sequence[Any]) -> str:
    told = json.dumps([package_digest(), torch.__version__, *parts], sort_keys=True)
    return hashlib.sha256(told.encode("utf-8", "backslashreplace")).hexdigest()[:40]


def _text(*sides: GraphModule) -> str:
    """Graphs that are no data, such as those with symbolic sizes, as text that has symbols by their order.

    Raises:
        UnkeptError: one holds something, or calls what another process can't find.
    """
    lines: list[str] = []
    symbolic: list[Any] = []
    for side in sides:
        places = {node: f"v{place}" for place, node in enumerate(side.graph.nodes)}
        for node in side.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                raise UnkeptError(f"it holds {node.target}")
            called = map_arg((node.args, node.kwargs), places.__getitem__)
            leaves = tree_leaves(fake_value(node))
            sizes = [size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
            symbolic += [size for size in sizes if isinstance(size, (torch.SymInt, torch.SymFloat))]
            target = "" if node.op == "placeholder" else dump_target(node, {})
            lines.append(f"{node.op} {target} {called!r} {[_described(leaf) for leaf in leaves]}")
    symbols, facts = facts_of(symbolic)
    names = {name: f"symbol{place}" for place, name in enumerate(symbols)}
    return re.sub(r"\b[a-z]+\d+\b", lambda found: names.get(found[0], found[0]), "\n".join([*lines, *facts]))


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} {tuple(leaf.stride())} {leaf.device}"
    return str(leaf)


def with_verdicts(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events of a pipeline: each rewrite has the verdict of its certificate, and one that was refuted is none."""
    events = tuple(events)
    found: dict[tuple[str, str], Certified] = {}
    for event in events:
        if isinstance(event, Certified):
            found.update(dict.fromkeys(((event.name, node) for node in (event.node, *event.nodes)), event))
    return tuple(
        _with_verdict(event, found[event.name, event.node])
        if isinstance(event, Rewrite) and not event.kept and (event.name, event.node) in found
        else event
        for event in events
    )


def _with_verdict(event: Rewrite, found: Certified) -> Event:
    if found.verdict != certify.REFUTED:
        return dataclasses.replace(event, verdict=found.verdict)
    reason = Reason(
        code="not_certified",
        by=event.name,
        sentence=f"what the pass made of it computes something else: {found.sentence}",
        lever=f"report the error to the package that has the pass, or leave it out with "
        f"options={{'disable_passes': ['{event.name}']}}; options={{'certify': 'off'}} keeps what it made, unchecked",
    )
    fields = {key: getattr(event, key) for key in ("graph", "name", "kind", "node", "source", "module")}
    return NearMiss(**fields, reason=reason)


def again(key: str) -> tuple[certify.Certificate, certify.Certificate | None]:
    """The certificate that is kept under a key, and what a check of the kept graphs finds now; None without graphs.

    Raises:
        LookupError: nothing is kept under the key.
    """
    kept, wrong = STORE.read(key)
    if kept is None:
        raise LookupError(wrong or "it is not kept any more")
    if kept.before is None or kept.after is None:
        return kept.certificate, None
    sides: list[GraphModule] = []
    for data in (kept.before, kept.after):
        mode = fake_mode()
        side = load_graph(data, mode.from_tensor(torch.empty(0)))
        describe(side, [fake_value(node) for node in side.graph.find_nodes(op="placeholder")])
        sides.append(side)
    names = {name: f"v{place}" for place, name in enumerate(kept.inputs)}
    claims = [dataclasses.replace(each, subject=names.get(each.subject, "")) for each in kept.certificate.assumptions]
    return kept.certificate, certify.check(sides[0], sides[1], assumptions=claims, bound=_bound(claims))
