"""The nodes that make a subgraph compute something wrong, found on the inputs on which it did.

The search is that for nodes that can't be built (`localize`): a run of nodes "fails" if what Inductor builds of it is
not what eager computes from the same values. What leaves Inductor is as little as there.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.mutations import write_targets
from omnicomp._torch.dynamo.control_flow import compile_lock
from omnicomp._torch.fx import boxed, copy_module
from omnicomp._torch.inductor import compile_fx, own_context
from omnicomp._torch.inductor.repro_script import settings_now
from omnicomp.analysis.accuracy import PRECISIONS, copy_of, judge
from omnicomp.analysis.costs import cost_of
from omnicomp.analysis.layouts import layout_of, restride
from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.builder.find_failing import Prober, Verdict, find_failing
from omnicomp.builder.on_failure import Setbacks
from omnicomp.builder.partition import Piece, extract, gather_getitems, stitch
from omnicomp.builder.time_limit import PartBudget
from omnicomp.errors import WrongResultError, first_line
from omnicomp.lowerings import LOWERINGS, Executable, LoweringContext
from omnicomp.runtime.verify import in_precision
from omnicomp.timeline import Attempt, Ran, Reason, Retreat, Subgraph

__all__ = ["Finding", "Suspects", "blame", "record"]

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out about a subgraph that computes something wrong.

    Attributes:
        cut: nodes that Inductor gets wrong, by name, with the reason.
        flops: floating-point operations of each of them.
        boundaries: nodes before which the subgraph must be cut, as it is wrong only as a whole.
        call: the subgraph with those in eager and the rest compiled, seen to be right; None if there is none.
        evidence: what that consists of, if there is one.
        kernels: what it calls from outside of generated code.
        builds: how many builds were spent.
        note: why nothing was found, if nothing was.
    """

    cut: Mapping[str, Reason]
    flops: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    boundaries: frozenset[str] = frozenset()
    call: Boxed | None = None
    evidence: str = ""
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    builds: int = 0
    note: str = ""


class Suspects:
    """Finds what one subgraph gets wrong, and builds it without that."""

    def __init__(
        self,
        module: GraphModule,
        inputs: Sequence[Any],
        context: LoweringContext,
        setbacks: Setbacks | None = None,
        overwritten: frozenset[str] = frozenset(),
    ) -> None:
        """Keep what a search would need; called while the subgraph is compiled.

        Args:
            module: the subgraph before anything was rewritten in it; read, not changed.
            inputs: fake tensors and symbolic sizes of it.
            context: where it belongs.
            setbacks: where what is found is kept.
            overwritten: names of inputs that a call may write to.
        """
        self._module = module
        self._context = context
        self._setbacks = setbacks
        self._symbolic = own_context.is_symbolic(inputs)
        self._settings = settings_now()
        placeholders = module.graph.find_nodes(op="placeholder")
        self._fragile = frozenset(i for i, node in enumerate(placeholders) if str(node.target) in overwritten)
        self._lock = threading.Lock()

    def keep(self, inputs: Sequence[Any], changed: frozenset[int] = frozenset()) -> list[Any]:
        """The inputs of a call, to be taken before it; what it may write to is copied.

        Args:
            inputs: of the call.
            changed: indices of inputs that the graph itself writes to.
        """
        touched = self._fragile | changed
        return [_copy(value) if index in touched else value for index, value in enumerate(inputs)]

    def search(self, inputs: Sequence[Any]) -> Finding:
        """Find the nodes that are wrong on these inputs, keep them for the next process, and build the rest.

        Args:
            inputs: what `keep` returned.
        """
        with self._lock, compile_lock:
            try:
                return own_context.apart(lambda: self._searched(inputs), self._settings)
            except Exception as error:  # noqa: BLE001 - becomes the note of the finding
                return Finding(cut={}, note=f"the guilty node could not be looked for: {first_line(error)}")

    def _searched(self, inputs: Sequence[Any]) -> Finding:
        with PartBudget(self._context.policy.build_seconds).building(list(self._module.graph.nodes)):
            return _Search(self, inputs).run()

    @property
    def context(self) -> LoweringContext:
        """Where the subgraph belongs."""
        return self._context

    @property
    def module(self) -> GraphModule:
        """The subgraph."""
        return self._module

    def learn(self, module: GraphModule, verdict: Verdict) -> Verdict:
        """Keep a verdict for the next process, with a script."""
        return verdict if self._setbacks is None else self._setbacks.learn(module, verdict, values=True)

    def usable(self) -> bool:
        """Whether a build for the sizes of one call is one for all calls."""
        return not self._symbolic


class _Search:
    def __init__(self, suspects: Suspects, inputs: Sequence[Any]) -> None:
        self._suspects = suspects
        self._context = suspects.context
        self._inputs = inputs
        self._module = own_context.with_fixed_sizes(suspects.module, inputs)
        gather_getitems(self._module)
        self._built: dict[tuple[str, ...], Executable] = {}
        self._builds = 0
        self._prober = Prober(self._failure, self._context.policy.max_builds)

    def run(self) -> Finding:
        nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        error = self._failure(nodes)
        if error is None:
            note = "built once more with the sizes of the call, it is right; so no node can be named"
            return Finding(cut={}, builds=self._builds, note=note)
        cut: dict[str, Reason] = {}
        boundaries: frozenset[str] = frozenset()
        waiting: tuple[tuple[Node, ...], Exception] | None = (tuple(nodes), error)
        while waiting is not None:
            run, error = waiting
            verdict = find_failing(run, error, self._prober, nodes)
            verdict = dataclasses.replace(verdict, cut={name: _blamed(name, verdict, run) for name in verdict.cut})
            verdict = self._suspects.learn(self._module, verdict)
            cut.update(verdict.cut)
            boundaries |= verdict.boundaries
            waiting = self._next(nodes, cut, boundaries)
        flops = {node.name: cost_of([node]).flops_hint for node in nodes if node.name in cut}
        found = Finding(cut=cut, flops=flops, boundaries=boundaries, builds=self._builds)
        return self._rebuilt(_runs(nodes, cut, boundaries), found) if self._suspects.usable() else found

    def _next(
        self, nodes: Sequence[Node], cut: Mapping[str, Reason], boundaries: frozenset[str]
    ) -> tuple[tuple[Node, ...], Exception] | None:
        """The first run that Inductor would get and that is wrong."""
        for run in _runs(nodes, cut, boundaries):
            if run[0].name in cut or _key(run) in self._built:
                continue
            error = self._failure(run)
            if error is not None:
                return run, error
        return None

    def _rebuilt(self, runs: Sequence[tuple[Node, ...]], found: Finding) -> Finding:
        """The finding with a callable in which only the wrong nodes are in eager."""
        pieces = [extract(self._module, run) for run in runs]
        parts: list[Executable] = []
        for run, piece in zip(runs, pieces, strict=True):
            lowering = LOWERINGS["eager"]
            built = self._built.get(_key(run))
            parts.append(built or lowering.lower(piece.module, piece.fake_inputs, self._context))
        calls = [part.call for part in parts]
        call = stitch(self._module, pieces, calls, calls)
        wrong = self._compare(self._module, self._inputs, call)
        if wrong:
            return dataclasses.replace(found, note=f"with the rest compiled it is still wrong: {wrong}")
        seen = [part.attest() for part in parts]
        kernels = {name: count for _, calls in seen for name, count in calls.items()}
        return dataclasses.replace(found, call=call, evidence="; ".join(text for text, _ in seen), kernels=kernels)

    def _failure(self, nodes: Sequence[Node]) -> Exception | None:
        """What is wrong with what Inductor makes of a run of nodes, on the values that eager computes for it."""
        piece = extract(self._module, nodes)
        self._builds += 1
        try:
            with compile_fx.cache_tag(self._context.digest):
                built = LOWERINGS["inductor"].lower(piece.module, piece.fake_inputs, self._context)
        except Exception as error:  # noqa: BLE001 - what can't be built has to leave as well
            return error
        values = self._values(piece)
        wrong = self._compare(extract(self._module, nodes).module, values, built.call)
        if not wrong:
            self._built[_key(nodes)] = built
            return None
        return WrongResultError(wrong)

    def _compare(self, module: GraphModule, inputs: Sequence[Any], call: Boxed) -> str:
        """What is wrong with what a callable computes of a graph on these inputs; empty if nothing is."""
        dtype = PRECISIONS[self._context.policy.reference]
        placeholders = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
        written = [placeholders[t] for node in module.graph.nodes for t in write_targets(node) if t in placeholders]
        results: list[list[Any]] = []
        for run, values in (
            (call, list(map(_copy, inputs))),
            (boxed(copy_module(module)), list(map(_copy, inputs))),
            (boxed(in_precision(module, dtype)), [copy_of(value, dtype) for value in inputs]),
        ):
            results.append([*run(list(values)), *(values[index] for index in written)])
        judged = judge(*results)
        if judged.worst is None:
            return ""
        return f"error {judged.error:.1e}, eager's {judged.own:.1e}, at most {judged.allowed:.1e}"

    def _values(self, piece: Piece) -> list[Any]:
        """The inputs of a piece as eager computes them, in the layout that it is built for."""
        found = own_context.values_of(self._module, list(map(_copy, self._inputs)), piece.inputs)
        layouts = [layout_of(fake) for fake in piece.fake_inputs]
        return [restride(_copy(value), layout) for value, layout in zip(found, layouts, strict=True)]


def blame(finding: Finding, reason: Reason) -> Reason:
    """The reason of a failed verification, with the guilty nodes named, or why none is.

    Args:
        finding: what was found.
        reason: of the subgraph.
    """
    if finding.cut:
        first = next(iter(finding.cut.values()))
        more = f" and {len(finding.cut) - 1} more" if len(finding.cut) > 1 else ""
        said = f"; guilty: {first.node}{more}"
        reason = dataclasses.replace(reason, node=first.node, source=first.source, lever=first.lever)
    elif finding.boundaries:
        said = f"; right if it is built in parts, cut before {', '.join(sorted(finding.boundaries))}"
    else:
        said = ""
    note = f"; {finding.note}" if finding.note else ""
    return dataclasses.replace(reason, sentence=f"{reason.sentence}{said}{note}")


def record(finding: Finding, reason: Reason, context: LoweringContext, subgraph: str, lowering: str) -> None:
    """Put into the timeline that a subgraph goes on with the wrong nodes in eager and the rest compiled.

    Args:
        finding: what was found; with a `call`.
        reason: what was wrong with the subgraph.
        context: where it belongs.
        subgraph: its id.
        lowering: its lowering, which it keeps.
    """
    where: dict[str, Any] = {"graph": context.graph_id, "part": context.part}
    append = context.timeline.append
    append(Attempt(**where, subgraph=subgraph, lowering=lowering, ok=False, reason=reason))
    append(Attempt(**where, subgraph=subgraph, lowering=lowering, ok=True, selected=True))
    if not finding.cut:
        append(Retreat(**where, subgraph=subgraph, source_lowering=lowering, target_lowering=lowering, reason=reason))
    for name, why in finding.cut.items():
        id, operator = f"{subgraph}/{name}", why.node.partition("(")[2].rstrip(")")
        sources = (why.source,) if why.source else ()
        flops = finding.flops.get(name, 0)
        numbers: dict[str, Any] = {"nodes": 1, "ops": {operator: 1}, "flops": str(flops), "flops_hint": flops}
        append(Subgraph(**where, subgraph=id, lowering=lowering, sources=sources, **numbers))
        append(Retreat(**where, subgraph=id, source_lowering=lowering, target_lowering="eager", reason=why))
        append(Attempt(**where, subgraph=id, lowering=lowering, ok=False, reason=why))
        append(Attempt(**where, subgraph=id, lowering="eager", ok=True, selected=True))
        append(Ran(**where, subgraph=id, lowering="eager", evidence="torch.fx.GraphModule, operator by operator"))
    append(Ran(**where, subgraph=subgraph, lowering=lowering, evidence=finding.evidence, kernels=dict(finding.kernels)))


def _blamed(name: str, verdict: Verdict, run: Sequence[Node]) -> Reason:
    node = next((each for each in run if each.name == name), None)
    if not isinstance(verdict.error, WrongResultError):
        return verdict.cut[name]
    return Reason(
        code="verification_failed",
        by="inductor",
        sentence=f"what Inductor makes of it is not what eager computes: {verdict.error}",
        node=f"{node.name} ({op_name(node)})" if node is not None else name,
        source=source_line(node) if node is not None else "",
        lever="report the error to PyTorch",
    )


def _runs(nodes: Sequence[Node], cut: Mapping[str, Reason], boundaries: frozenset[str]) -> list[tuple[Node, ...]]:
    """Neighbours that stay together: all in eager, or all compiled with no boundary between them."""
    runs: list[list[Node]] = []
    for node in nodes:
        eager = node.name in cut
        starts = not runs or (runs[-1][0].name in cut) != eager or (not eager and node.name in boundaries)
        if starts:
            runs.append([])
        runs[-1].append(node)
    return [tuple(run) for run in runs]


def _key(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _copy(value: Any) -> Any:
    """A tensor of the same values and strides in memory of its own; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return restride(value.detach().clone(), layout_of(value))
