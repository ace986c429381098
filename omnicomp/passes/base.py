"""The contract of a pass, and the manager that runs the pipeline and checks what each pass claims.

A pass is a frozen dataclass; its fields are its options. It rewrites the Dynamo graph, before autograd, so that
training needs no second set of patterns. The manager runs it on the graph and on every submodule of a higher-order
operator (activation checkpointing, `cond`, …), innermost first; checks the reported `modified` against the graph; lints
and recompiles; times it; and records the difference in operators. A pass reports rewrites and near misses to its
context.
"""

import dataclasses
import functools
import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import describe, run_on_fakes
from omnicomp._torch.symbols import GuardOnDataDependentSymNode, free_unbacked_symbols
from omnicomp.analysis.nodes import all_nodes, fake_value, module_path, op_name, source_line, submodules
from omnicomp.devices import Device, primary_device
from omnicomp.errors import PassError
from omnicomp.options.policy import Policy
from omnicomp.passes.assumptions import Assumption
from omnicomp.timeline import Event, NearMiss, PassRun, Reason, Rewrite, Timeline
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump

__all__ = ["Applied", "Pass", "PassContext", "PassResult", "digest", "run_pipeline"]


@dataclasses.dataclass(kw_only=True)
class PassContext:
    """The context of a pass: the graph, its device, and where to report.

    Attributes:
        graph_id: id of the Dynamo graph in the timeline.
        device: the device that the graph runs on.
        timeline: where rewrites and near misses are recorded.
        training: whether the graph will be differentiated.
        speculate: whether a pass may rewrite as if something were so that can be checked when the graph is called; it
            says what by `assume`.
        assumptions: what passes assumed so far.
        root: the whole graph, which `run_pipeline` sets; a pass is run on the graphs inside it, too.
        memo: what a pass keeps from one of these graphs to the next; empty when it starts.
        inputs: what the graph is called with first, one a placeholder: real or fake tensors and symbolic sizes; none
            where it is compiled later.
        rewrites: the number of rewrites of each pass.
        traced_under: what makes the context managers that are in force while autograd traces the graph.
        retyped: dtypes of outputs that the device can't hold, each with the one that it has instead.
    """

    graph_id: str
    device: Device
    timeline: Timeline
    training: bool
    speculate: bool = False
    assumptions: list[Assumption] = dataclasses.field(default_factory=list[Assumption])
    root: GraphModule | None = None
    memo: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    inputs: Sequence[Any] = ()
    rewrites: Counter[str] = dataclasses.field(default_factory=Counter[str])
    traced_under: list[Callable[[], AbstractContextManager[None]]] = dataclasses.field(
        default_factory=list[Callable[[], AbstractContextManager[None]]]
    )
    retyped: set[tuple[torch.dtype, torch.dtype]] = dataclasses.field(
        default_factory=set[tuple[torch.dtype, torch.dtype]]
    )

    def assume(self, assumption: Assumption) -> None:
        """Record that the graph is now right only where the assumption holds; a repeated one is kept once.

        Raises:
            PassError: the context does not allow to speculate.
        """
        if not self.speculate:
            raise PassError(f"a pass assumed that {assumption.sentence}, but the graph may not be speculated on")
        if all(assumption.key != known.key for known in self.assumptions):
            self.assumptions.append(assumption)

    def count(self, name: str) -> None:
        """Count a place that the pass `name` rewrote, without an event of its own."""
        self.rewrites[name] += 1

    def while_traced(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        """Have something in force while autograd traces the graph and its parts are compiled."""
        self.traced_under.append(make)

    def rewrite(self, name: str, kind: str, node: Node, *, target: str, detail: str = "") -> None:
        """Record that the pass `name` rewrote the place anchored at `node`."""
        self.count(name)
        self.timeline.append(
            Rewrite(
                graph=self.graph_id,
                name=name,
                kind=kind,
                node=node.name,
                source=source_line(node),
                module=module_path(node),
                target=target,
                detail=detail,
            )
        )

    def near_miss(self, name: str, kind: str, node: Node, reason: Reason) -> None:
        """Record that the pass `name` left the candidate at `node` alone; `reason.node` says where it ended."""
        self.timeline.append(
            NearMiss(
                graph=self.graph_id,
                name=name,
                kind=kind,
                node=node.name,
                source=source_line(node),
                module=module_path(node),
                reason=reason,
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """What came of a pass that was applied by itself.

    Attributes:
        module: the graph, rewritten in place.
        modified: whether anything changed.
        events: the rewrites and near misses that the pass reported, and the pass itself as a `PassRun`.
    """

    module: GraphModule
    modified: bool
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class Pass:
    """One rewrite of a Dynamo graph; a subclass has a `name`, and fields for its options, all with defaults.

    The graph holds torch functions, methods and HOPs as Dynamo recorded them; every tensor node has a fake tensor in
    `meta["example_value"]`, and a pass gives one to every node that it inserts (`omnicomp.analysis.nodes.insert_call`
    does).
    A pass must not edit a region that it did not understand, and must leave no dead nodes behind.
    """

    name: ClassVar[str]
    checked: ClassVar[bool] = True
    """Whether the outputs must be what they were on fake tensors; a repair's were described wrongly before."""
    told: ClassVar[bool] = True
    """Whether a run that rewrote nothing is recorded."""

    def of(self, policy: Policy) -> "Pass":
        """This pass with the options that the user's policy gives it."""
        del policy
        return self

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the pass has any work on this graph and device; cheap."""
        raise NotImplementedError

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite `module` in place.

        Returns:
            `PassResult(module, modified)`; the manager checks `modified`.
        """
        raise NotImplementedError

    def apply(
        self, module: GraphModule, inputs: Sequence[Any] = (), *, device: Device | None = None, training: bool = False
    ) -> Applied:
        """Run this pass alone on a graph, and check its result on fake tensors.

        Args:
            module: a graph of torch functions, methods and operators; it is rewritten in place.
            inputs: one a placeholder, real or fake; needed where the nodes have no fake values yet.
            device: the device to rewrite for; None for that of the graph's tensors.
            training: whether the graph will be differentiated.

        Raises:
            PassError: the pass misreported what it did, or left a graph that does not run.
        """
        if inputs:
            describe(module, inputs)
        values = [leaf for node in all_nodes(module) for leaf in tree_leaves(fake_value(node))]
        types = [value.device.type for value in values if isinstance(value, torch.Tensor)]
        context = PassContext(
            graph_id="g0",
            device=device or primary_device(types),
            timeline=Timeline(),
            training=training,
            inputs=inputs,
        )
        modified = run_pipeline((self,), module, context, check=True, shown=False)
        return Applied(module=module, modified=modified, events=context.timeline.events())


def digest(passes: Sequence[Pass]) -> str:
    """A hash of the passes' sources, for the compile caches' keys: an edited pass never meets an old artefact."""
    value = hashlib.sha256()
    for item in passes:
        value.update(f"{item.name} {_source_digest(type(item))}".encode())
    return value.hexdigest()[:16]


@functools.cache
def _source_digest(cls: type) -> str:
    try:
        # The module, not only the class: a pass lives in one file with its helpers.
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        source = f"{cls.__module__}.{cls.__qualname__}"
    return hashlib.sha256(source.encode()).hexdigest()


def run_pipeline(
    passes: Sequence[Pass],
    module: GraphModule,
    context: PassContext,
    *,
    disabled: Collection[str] = (),
    check: bool = False,
    shown: bool = True,
) -> bool:
    """Run the passes in order on `module` and its submodules, in place.

    Args:
        passes: with their options.
        module: the whole graph.
        context: where they report.
        disabled: names of passes to skip.
        check: whether each pass' result is run on fake tensors.
        shown: whether the progress line may show the passes.

    Returns:
        Whether any pass changed anything.

    Raises:
        PassError: a pass reported `modified` wrongly, or left a graph that does not lint or (with `check`) does not run
            on fake tensors with the shapes and dtypes that it had.
    """
    context.root = module
    changed = False
    for item in passes:
        if item.name in disabled:
            _record(context, item, applied=False, note="switched off by the option disable_passes")
            continue
        text = f"pass {item.name} on {context.graph_id}"
        with activity("pass", text, shown=shown, graph=context.graph_id, by=item.name):
            modified = _run_pass(item, module, context, check=check)
        if modified:
            changed = True
            dump(context.graph_id, item.name, module)
    return changed


def _run_pass(item: Pass, module: GraphModule, context: PassContext, *, check: bool) -> bool:
    start = time.perf_counter()
    before: Counter[str] | None = None
    reported = context.rewrites[item.name]  # of an earlier run of the same pass
    modified = False
    context.memo.clear()
    for region in _regions(module):
        if item.applies(region, context):
            before = _count(module) if before is None else before
            modified |= _run_on_region(item, region, context, check=check)
    if before is None:
        if item.told:
            _record(
                context,
                item,
                applied=False,
                seconds=time.perf_counter() - start,
                note="nothing to do for this graph, device and policy",
            )
        return False
    rewrites = context.rewrites[item.name] - reported
    if not (item.told or modified or rewrites):
        return False
    diff = _count(module)
    diff.subtract(before)
    _record(
        context,
        item,
        applied=True,
        modified=modified,
        rewrites=rewrites,
        seconds=time.perf_counter() - start,
        node_diff={op: n for op, n in sorted(diff.items()) if n},
    )
    return modified


def _run_on_region(item: Pass, region: GraphModule, context: PassContext, *, check: bool) -> bool:
    fingerprint = _fingerprint(region)
    outputs = _output_values(region)
    result = item.run(region, context)
    if result.graph_module is not region:
        raise PassError(f"the pass {item.name!r} must rewrite the graph in place and return the same GraphModule")
    really = _fingerprint(region) != fingerprint
    if really != result.modified:
        raise PassError(
            f"the pass {item.name!r} reported modified={result.modified}, but the graph "
            f"{'changed' if really else 'did not change'}; return what really happened"
        )
    if really:
        try:
            region.graph.lint()
        except (RuntimeError, ValueError) as error:
            raise PassError(f"the pass {item.name!r} left a broken graph: {error}") from error
        region.recompile()
        if check and item.checked:
            _verify(item, region, outputs, context.retyped)
    return really


def _record(context: PassContext, item: Pass, **fields: Any) -> None:
    context.timeline.append(PassRun(graph=context.graph_id, name=item.name, **fields))


def _regions(module: GraphModule) -> Iterator[GraphModule]:
    """The graph's regions, innermost first, the graph itself last."""
    for child in submodules(module):
        yield from _regions(child)
    yield module


def _count(module: GraphModule) -> Counter[str]:
    counts: Counter[str] = Counter()
    for region in _regions(module):
        counts.update(op_name(node) for node in region.graph.nodes if node.op.startswith("call_"))
    return counts


def _fingerprint(module: GraphModule) -> tuple[Any, ...]:
    """Structure of the graph without metadata: equal before and after if and only if nothing was rewritten."""
    return tuple((n.name, n.op, str(n.target), str(n.args), str(n.kwargs)) for n in module.graph.nodes)


def _output_values(module: GraphModule) -> list[Any]:
    output = next(iter(reversed(module.graph.nodes)))
    leaves = [leaf for leaf in tree_leaves(output.args) if isinstance(leaf, Node)]
    return [leaf.meta.get("example_value") for leaf in leaves]


def _verify(item: Pass, region: GraphModule, before: list[Any], retyped: set[tuple[torch.dtype, torch.dtype]]) -> None:
    """Run the rewritten graph on fake tensors, and compare its outputs with what they were."""
    inputs = [node.meta.get("example_value") for node in region.graph.find_nodes(op="placeholder")]
    if any(value is None for value in inputs):
        return  # a region whose inputs Dynamo did not describe
    try:
        outputs = run_on_fakes(region, inputs)
    except GuardOnDataDependentSymNode:
        return  # it depends on values that no fake tensor has, so that running it proves nothing
    except Exception as error:
        raise PassError(f"the pass {item.name!r} left a graph that does not run on fake tensors: {error}") from error
    after = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)]
    before = [value for value in before if isinstance(value, torch.Tensor)]
    if len(before) != len(after):
        raise PassError(f"the pass {item.name!r} changed the number of outputs from {len(before)} to {len(after)}")
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        same = old.dtype == new.dtype or (old.dtype, new.dtype) in retyped
        # A size that depends on data is a new symbol each time.
        moved = old.shape != new.shape if not free_unbacked_symbols(old) else old.dim() != new.dim()
        if moved or not same or old.device != new.device:
            raise PassError(
                f"the pass {item.name!r} changed output {index} from {_describe(old)} to {_describe(new)}; "
                "an output keeps its shape, dtype and device"
            )


def _describe(value: torch.Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
