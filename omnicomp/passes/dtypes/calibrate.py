"""Bounded error of the dtype policy, `options={"dtype_error": 1e-2}`: what costs too much precision stays wide.

Just before the dtype pass rewrites a graph, the graph is run on the inputs of its first call: in the reference
precision, as it is written, and as the pass would leave it. If the worst of the outputs' relative errors (L2) is over
the bound, each lowered operator is tried alone; those that harm the outputs most are kept as they are written, as few
as meet the bound. Only outputs of the forward graph, and inputs that it writes to, are compared: no gradients.

The inputs are never changed, random numbers are drawn as if nothing had happened, and nothing is recorded for autograd.
Results are cached by the graph, in the process and on disk, and not by the values of weights and inputs.
"""

import dataclasses
import math
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp import records
from omnicomp._torch.inductor.store import JsonStore, key_of
from omnicomp._torch.inductor.versions import keeps_caches
from omnicomp.analysis.hashes import exact_hash
from omnicomp.analysis.nodes import op_name, submodules
from omnicomp.errors import first_line
from omnicomp.options.digest import package_digest
from omnicomp.options.policy import Policy
from omnicomp.passes.dtypes import trial_runs
from omnicomp.passes.dtypes.trial_runs import Runs, Site, TrialError
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Calibration, Option, Reason, Rewrite, Timeline

if TYPE_CHECKING:
    from omnicomp.passes.base import PassContext  # the passes need this module
    from omnicomp.passes.dtype_policy import DtypePass

CACHE: Final = "calibrations"
_MEMO: Final = "calibration"
# Operators, or groups of neighbours, that are lowered alone to see what they do to the outputs.
_ALONE: Final = 32
_GROUPS: Final = 48
_KNOWN_AT_MOST: Final = 512
_PLAIN: Final = (int, float, complex, str, bytes, type(None))
_known: Final[dict[str, "Finding"]] = {}
_lock = new_lock()


@records.dataclass(frozen=True, kw_only=True)
class Bound:
    """How far off the outputs of a graph may be, and how that is measured."""

    error: float  # relative to the outputs' norm (L2)
    reference: str = "fp64"  # the precision that they are compared with, `fp32` or `fp64`
    # Gives the inputs to measure on, in place of the first call's, of their names and values.
    sample: Callable[..., Any] | None = None
    # Whether earlier results are put to `use`, are to be measured again (`forget`), or are neither read nor stored
    # (`off`).
    verdicts: str = "use"
    strict: bool = False  # whether an error while measuring is raised; or else nothing is lowered

    @classmethod
    def of(cls, policy: Policy, error: float) -> "Bound":
        """The user's."""
        return cls(
            error=error,
            reference=policy.reference,
            sample=policy.dtype_sample,
            verdicts=policy.verdicts,
            strict=policy.on_error == "raise",
        )


@records.dataclass(frozen=True, kw_only=True)
class Finding:
    """What a calibration found."""

    # The operators that stay wide, most harmful first: region, name, the error of the outputs with it alone lowered (-1
    # if that was not tried), and of its own result on wide operands (-1 if unknown).
    kept: tuple[tuple[int, str, float, float], ...] = ()
    met: bool = True  # whether the bound holds with them kept
    lowered: int = 0  # how many operators the policy lowers without a bound
    before: float = 0.0  # error of the outputs with all of them lowered
    after: float = 0.0  # the same with the kept ones wide
    wide: float = -1.0  # the same with none lowered
    runs: int = 0  # of the graph, that it took
    seconds: float = 0.0  # that it took

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Finding":
        """The inverse of `dataclasses.asdict`; raises if it is something else."""
        return cls(
            kept=tuple((int(r), str(name), float(a), float(b)) for r, name, a, b in data["kept"]),
            met=data["met"] is True,
            **{name: float(data[name]) for name in ("before", "after", "wide", "seconds")},
            **{name: int(data[name]) for name in ("lowered", "runs")},
        )


STORE: Final = JsonStore[Finding](CACHE, dataclasses.asdict, Finding.from_dict, schema=2)


@records.dataclass(frozen=True, eq=False)
class _Kept:
    """What stays wide, by region of one graph."""

    regions: tuple[GraphModule, ...]
    reasons: Mapping[Site, Reason]

    def of(self, module: GraphModule) -> dict[str, Reason]:
        index = next((i for i, region in enumerate(self.regions) if region is module), -1)
        return {name: reason for (region, name), reason in self.reasons.items() if region == index}


def clear() -> None:
    """Forget what this process found; files stay."""
    with _lock:
        _known.clear()


def must_stay_wide(
    item: "DtypePass", bound: Bound, module: GraphModule, context: "PassContext"
) -> Mapping[str, Reason]:
    """The operators of a region that a pass must not lower, by name, and why; asked before it rewrites any.

    The first region that asks has the whole graph calibrated, or its finding looked up.
    """
    if context.root is None:
        return {}
    if _MEMO not in context.memo:
        reasons = _calibrate(item, bound, context, context.root)
        context.memo[_MEMO] = _Kept(_regions(context.root), reasons)
    kept: _Kept = context.memo[_MEMO]
    return kept.of(module)


def _regions(module: GraphModule) -> tuple[GraphModule, ...]:
    """The regions of a graph in the order in which passes see them."""
    return (*(region for child in submodules(module) for region in _regions(child)), module)


def _lower(
    item: "DtypePass", bound: Bound, context: "PassContext", root: GraphModule, kept: frozenset[Site]
) -> tuple[GraphModule, dict[Site, str]]:
    """A copy of a graph behind the pass, some operators kept as they are; and the dtypes of those that were lowered."""
    made = trial_runs.copy_for_trial(root)
    regions, timeline = _regions(made), Timeline()
    reason = _reason("it is kept wide for comparison", bound)
    own = dataclasses.replace(
        context,
        timeline=timeline,
        root=made,
        memo={_MEMO: _Kept(regions, dict.fromkeys(kept, reason))},
        rewrites=Counter(),
        assumptions=[],
        retyped=set(),
    )
    lowered: dict[Site, str] = {}
    for index, region in enumerate(regions):
        if not item.applies(region, own):
            continue
        before = len(timeline.events())
        item.run(region, own)
        region.recompile()
        events = timeline.events()[before:]
        lowered |= {(index, event.node): event.target for event in events if isinstance(event, Rewrite)}
    return made, lowered


def _calibrate(item: "DtypePass", bound: Bound, context: "PassContext", root: GraphModule) -> dict[Site, Reason]:
    """What has to stay wide, recorded in the timeline."""
    start = time.perf_counter()
    everything, lowered = _lower(item, bound, context, root, frozenset())
    if not lowered:
        return {}
    key = _key(item, bound, root, context)
    finding, trouble = _look_up(key, bound)
    state = "known"
    if finding is None:
        state = "measured"
        try:
            runs = Runs(bound, context, root)

            def measure(kept: frozenset[Site]) -> float:
                return runs.error(_lower(item, bound, context, root, kept)[0] if kept else everything)

            with runs:
                found = search(
                    lowered,
                    bound.error,
                    measure=measure,
                    wide=lambda: runs.error(trial_runs.copy_for_trial(root)),
                    local=lambda: runs.local_errors(root, _regions, lowered),
                )
            finding = dataclasses.replace(found, runs=runs.count, seconds=time.perf_counter() - start)
        except TrialError as error:
            return _refuse(lowered, bound, context, f"the graph can't be calibrated: {error}", start)
        except Exception as error:
            if bound.strict:
                raise
            return _refuse(lowered, bound, context, f"a run for calibration raised: {first_line(error)}", start)
        trouble = _keep(key, finding, bound) or trouble
    context.timeline.append(
        Calibration(
            graph=context.graph_id,
            state=state,
            bound=bound.error,
            lowered=finding.lowered,
            kept=len(finding.kept),
            before=_finite(finding.before),
            after=_finite(finding.after),
            wide=_finite(finding.wide),
            runs=finding.runs if state == "measured" else 0,
            seconds=time.perf_counter() - start,
            key=key,
            note=trouble,
        )
    )
    if not finding.met:
        sentence = "not even the graph as it is written meets the bound, and nothing is lowered"
        _tell(context, bound, _reason(sentence, bound, f"error {finding.wide:.1e}"))
    names = {(index, node.name): node for index, region in enumerate(_regions(root)) for node in region.graph.nodes}
    return {
        (region, name): _harmful(names[region, name], rank, alone, local, finding, bound)
        for rank, (region, name, alone, local) in enumerate(finding.kept, 1)
        if (region, name) in names
    }


def _finite(error: float) -> float:
    """What a line of JSON can hold."""
    return error if math.isfinite(error) else -1.0


def _harmful(node: Node, rank: int, alone: float, local: float, finding: Finding, bound: Bound) -> Reason:
    parts = [f"number {rank} of {len(finding.kept)} by harm"] if finding.met else []
    parts += [f"error {finding.before:.1e} with all operators lowered"]
    parts += [f"{alone:.1e} with this one alone"] if alone >= 0 else []
    parts += [f"{local:.1e} of its own result"] if local >= 0 else []
    sentence = "in low precision, the operator takes the graph's outputs over the bound"
    return dataclasses.replace(_reason(sentence, bound, ", ".join(parts)), node=f"{node.name} ({op_name(node)})")


def _reason(sentence: str, bound: Bound, observed: str = "") -> Reason:
    return Reason(
        code="error_bound",
        by="dtype_error",
        sentence=sentence,
        observed=observed,
        needed=f"at most {bound.error:.1e}",
        lever="raise dtype_error, or leave the operator out of the policy's rules",
    )


def _refuse(
    lowered: Mapping[Site, str], bound: Bound, context: "PassContext", sentence: str, start: float
) -> dict[Site, Reason]:
    """Keep everything wide, as a bound that nobody measured is none."""
    lever = "give real inputs by the option dtype_sample, or leave dtype_error out"
    reason = dataclasses.replace(_reason(f"{sentence}; nothing is lowered", bound), lever=lever)
    seconds = time.perf_counter() - start
    context.timeline.append(
        Calibration(
            graph=context.graph_id,
            state="refused",
            bound=bound.error,
            lowered=len(lowered),
            kept=len(lowered),
            seconds=seconds,
            reason=reason,
        )
    )
    _tell(context, bound, reason)
    return dict.fromkeys(lowered, reason)


def _tell(context: "PassContext", bound: Bound, reason: Reason) -> None:
    context.timeline.append(
        Option(
            graph=context.graph_id,
            key="dtype_error",
            requested=str(bound.error),
            effective="nothing lowered",
            reason=reason,
        )
    )


def search(
    lowered: Mapping[Site, str],
    bound: float,
    *,
    measure: trial_runs.Measure,
    wide: trial_runs.Figure,
    local: "trial_runs.Figures",
) -> Finding:
    """Which operators to keep wide so that the bound holds: the first of all, ordered by the harm that each does.

    With up to 32 operators each is lowered alone. Of more, groups of neighbours are, and the most harmful ones are
    halved until 48 were measured. How many of that order have to be kept is found by bisection; what is returned was
    measured as a whole. That takes at most 51 + log2(n) runs.

    Args:
        lowered: the operators that the policy lowers, in the order of the graph, with their dtypes.
        bound: on the error.
        measure: the error of the outputs with some operators kept wide.
        wide: the same with none lowered.
        local: the error of each operator's own result on wide operands, where it is known.
    """
    sites = tuple(lowered)
    before = measure(frozenset())
    if before <= bound:
        return Finding(lowered=len(sites), before=before, after=before)
    floor = wide()
    own = local()
    if not floor <= bound:
        kept = tuple((*site, -1.0, own.get(site, -1.0)) for site in sites)
        return Finding(kept=kept, met=False, lowered=len(sites), before=before, after=floor, wide=floor)
    alone = _alone(sites, measure)
    # Errors of a group add up like a walk's steps; of neighbours that were never parted, the own error decides.
    groups = sorted(alone, key=lambda group: (-group[0] / len(group[1]) ** 0.5, sites.index(group[1][0])))
    order = [site for _, group in groups for site in sorted(group, key=lambda s: -own.get(s, 0.0))]
    few, many, after = 0, len(order), floor
    while many - few > 1:
        middle = (few + many) // 2
        error = measure(frozenset(order[:middle]))
        if error <= bound:
            many, after = middle, error
        else:
            few = middle
    harm = {group[0]: error for error, group in alone if len(group) == 1}
    kept = tuple((*site, harm.get(site, -1.0), own.get(site, -1.0)) for site in order[:many])
    return Finding(kept=kept, lowered=len(sites), before=before, after=after, wide=floor)


def _alone(sites: tuple[Site, ...], measure: trial_runs.Measure) -> list[tuple[float, tuple[Site, ...]]]:
    """Errors of the outputs with one operator, or a group of neighbours, lowered and all others wide."""
    everything = frozenset(sites)

    def only(group: tuple[Site, ...]) -> tuple[float, tuple[Site, ...]]:
        return measure(everything - frozenset(group)), group

    if len(sites) == 1:
        return [(float("inf"), sites)]
    if len(sites) <= _ALONE:
        return [only((site,)) for site in sites]
    size = -(-len(sites) // 16)
    found = [only(sites[i : i + size]) for i in range(0, len(sites), size)]
    runs = len(found)
    while runs + 2 <= _GROUPS:
        worst = max((group for group in found if len(group[1]) > 1), key=lambda group: group[0], default=None)
        if worst is None:
            break
        half = len(worst[1]) // 2
        at = found.index(worst)
        found[at : at + 1] = [only(worst[1][:half]), only(worst[1][half:])]
        runs += 2
    return found


def _key(item: "DtypePass", bound: Bound, root: GraphModule, context: "PassContext") -> str:
    """What a finding is known by: everything that it depends on but values of inputs, and sizes that are symbolic."""
    device = context.device.type
    hardware = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else ""
    regions = [exact_hash(list(region.graph.nodes), names=True) for region in _regions(root)]
    sample = bound.sample
    named = "" if sample is None else f"{sample.__module__}.{sample.__qualname__} {_code(sample)}"
    return key_of(
        *(regions, repr(item.policy), repr(bound.error), bound.reference, named),
        *(device, hardware, context.training, torch.__version__, package_digest()),
    )


def _code(sample: Any) -> str:
    """What a function computes, as far as it can be told without calling it: two lambdas have one name."""

    def of(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return (value.co_code, value.co_names, tuple(map(of, value.co_consts)))
        if isinstance(value, tuple):
            return tuple(map(of, value))
        if isinstance(value, frozenset):  # in an order of the process's own
            return tuple(sorted(map(repr, map(of, value))))
        return value if isinstance(value, _PLAIN) else type(value).__name__  # a repr may have an address in it

    function = getattr(sample, "__func__", sample)  # of a method
    closure: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    cells = tuple(cell.cell_contents for cell in closure if cell != types.CellType())
    return repr(of((getattr(function, "__code__", None), getattr(function, "__defaults__", None), cells)))


def _look_up(key: str, bound: Bound) -> tuple[Finding | None, str]:
    """What was found before, in this process or an earlier one; and what was wrong with what was kept."""
    if bound.verdicts != "use":
        return None, ""
    with _lock:
        if key in _known:
            return _known[key], ""
    if not keeps_caches():
        return None, ""
    finding, problem = STORE.read(key)
    if finding is None:
        return None, problem and f"{problem}; it was calibrated afresh"
    _remember(key, finding)
    return finding, ""


def _keep(key: str, finding: Finding, bound: Bound) -> str:
    """Keep a finding; returns why it could not be kept, or nothing."""
    if bound.verdicts == "off":
        return ""
    _remember(key, finding)
    if not keeps_caches():
        return ""
    problem = STORE.write(key, finding)
    return problem and f"it is not kept for other processes: {problem}"


def _remember(key: str, finding: Finding) -> None:
    with _lock:
        while len(_known) >= _KNOWN_AT_MOST:
            _known.pop(next(iter(_known)))
        _known[key] = finding
