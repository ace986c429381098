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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult as PassResult
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dynamo.late_compile import hinted, is_fake
from omnicomp._torch.fx import Effects, copy_module, describe, effects, traced_again
from omnicomp._torch.symbols import GuardOnDataDependentSymNode, free_unbacked_symbols
from omnicomp.analysis.certify import NO_GRADIENTS, REFUTED, Certificate
from omnicomp.analysis.certify import Assumption as Claim
from omnicomp.analysis.nodes import all_nodes, fake_value, module_path, op_name, source_line, submodules
from omnicomp.devices import Device, primary_device
from omnicomp.errors import PassError
from omnicomp.options.policy import Policy
from omnicomp.passes.assumptions import Assumption, caller_of
from omnicomp.passes.mask_classes import GENERAL, MaskClass
from omnicomp.timeline import Event, NearMiss, PassRun, Reason, Rewrite, Timeline
from omnicomp.timeline.activity import activity
from omnicomp.timeline.graph_dump import dump

if TYPE_CHECKING:
    from omnicomp.passes.check_budget import CheckBudget

DECISION: Final = "decision"
"""The key in `PassContext.memo` of what tells the graph, where a pass keeps what it did to it."""


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
        answers: the classes of masks that a variant is made for, by the key of the assumption; None: those of `inputs`.
        root: the whole graph, which `run_pipeline` sets; a pass is run on the graphs inside it, too.
        memo: what a pass keeps from one of these graphs to the next; empty when it starts.
        inputs: what the graph is called with first, one a placeholder: real or fake tensors and symbolic sizes; none
            where it is compiled later.
        rewrites: the number of rewrites of each pass.
        traced_under: what makes the context managers that are in force while autograd traces the graph.
        retyped: dtypes of outputs that the device can't hold, each with the one that it has instead.
        modified_by: names of the passes that changed the graph so far.
        running: name of the pass that is at work, or was when the pipeline ended.
        replay: whether a pass may do what it did before for the same graph, in this process or another.
        certify: the option: which changes of passes are checked.
        certificates: those of this compilation, by key.
        budget: what the checks of omnicomp's own passes may take together; made when the first one is checked.
        settled: what `settle` was asked: the question, the guess, and the class.
    """

    graph_id: str
    device: Device
    timeline: Timeline
    training: bool
    speculate: bool = False
    assumptions: list[Assumption] = dataclasses.field(default_factory=list[Assumption])
    answers: Mapping[Hashable, MaskClass] | None = None
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
    modified_by: set[str] = dataclasses.field(default_factory=set[str])
    running: str = ""
    replay: bool = False
    certify: str = "off"
    certificates: dict[str, Certificate] = dataclasses.field(default_factory=dict[str, Certificate])
    budget: "CheckBudget | None" = None
    settled: list[tuple[Assumption, MaskClass, MaskClass]] = dataclasses.field(
        default_factory=list[tuple[Assumption, MaskClass, MaskClass]]
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

    def settle(self, question: Assumption, guess: MaskClass) -> MaskClass:
        """Record that the graph is right only where a mask is of the class that it is assumed to be of.

        Args:
            question: of no class yet.
            guess: the class if there are no values yet to look at.

        Returns:
            The class, which may be the general one: then the graph has to be right for any mask.

        Raises:
            PassError: the context does not allow to speculate.
        """
        known = next((item.holds for item in self.assumptions if item.key == question.key), None)
        if known is None:
            known = self._class_of(question, guess) if self.answers is None else self.answers.get(question.key, GENERAL)
            self.assume(dataclasses.replace(question, holds=known))
            self.settled.append((question, guess, known))
        return known

    def withdraw(self, question: Assumption) -> None:
        """Forget what `settle` recorded, as nothing was done about it."""
        self.assumptions = [item for item in self.assumptions if item.key != question.key]

    def _class_of(self, question: Assumption, guess: MaskClass) -> MaskClass:
        from omnicomp.passes.verdicts import Checker, capturing

        assert self.root is not None
        names = [node.name for node in self.root.graph.find_nodes(op="placeholder")]
        if len(names) != len(self.inputs):
            return guess
        values = [hinted(self.inputs[names.index(name)]) for name in question.inputs]
        if any(map(is_fake, values)):
            return guess
        if capturing():
            return GENERAL
        (found,) = Checker([question]).verdicts([values])
        assert isinstance(found, MaskClass)
        return found

    def count(self, name: str) -> None:
        """Count a place that the pass `name` rewrote, without an event of its own."""
        self.rewrites[name] += 1

    def while_traced(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        """Have something in force while autograd traces the graph and its parts are compiled."""
        self.traced_under.append(make)

    def rewrite(
        self,
        name: str,
        kind: str,
        node: Node,
        *,
        target: str,
        detail: str = "",
        kept: bool = False,
        timed: Mapping[str, float] | None = None,
    ) -> None:
        """Record that the pass `name` rewrote the place anchored at `node`, or found it as it should be (`kept`)."""
        if not kept:
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
                kept=kept,
                timed=dict(timed or {}),
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
    runs_after: ClassVar[str] = ""
    """For a pass from outside: the name of the one that it runs behind; by default `attention_fusion`."""
    runs_before: ClassVar[str] = ""
    """For a pass from outside: the name of the one that it runs in front of."""
    version: ClassVar[str] = ""
    """For a pass from outside: changes when it rewrites the same graph otherwise, and its sources don't tell."""
    checked: ClassVar[bool] = True
    """Whether the outputs must be what they were on fake tensors; a repair's were described wrongly before."""
    told: ClassVar[bool] = True
    """Whether a run that rewrote nothing is recorded."""

    def claims(self, context: PassContext) -> tuple[Claim, ...]:
        """What the rewrites of this pass rest on, for their certificates; nothing: they are equal in each bit."""
        del context
        return ()

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
        strict = () if type(self).__module__.startswith("omnicomp.") else (self.name,)
        modified = run_pipeline((self,), module, context, check=True, strict=strict, shown=False)
        return Applied(module=module, modified=modified, events=context.timeline.events())

    def as_function(self) -> Callable[[GraphModule, Sequence[Any]], GraphModule]:
        """This pass as a plain function, for programs that keep a list of passes of ATen graphs, such as torchtitan's.

        It takes a graph and its inputs, real or fake, and returns the graph, traced again where it was rewritten: of
        operators of ATen alone, with `meta["val"]`.
        """

        def graph_pass(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
            applied = self.apply(gm, example_inputs)
            return traced_again(gm, example_inputs) if applied.modified else gm

        graph_pass.__name__ = self.name
        return graph_pass


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
    left_out: Mapping[str, str] | None = None,
    check: bool = False,
    strict: Collection[str] = (),
    shown: bool = True,
) -> bool:
    """Run the passes in order on `module` and its submodules, in place.

    Args:
        passes: with their options.
        module: the whole graph.
        context: where they report.
        disabled: names of passes to skip.
        left_out: names of further ones, with the reason.
        check: whether each pass' result is run on fake tensors.
        strict: names of passes whose results always are, and are compared with the graph as it was.
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
        context.running = item.name
        skipped = "switched off by the option disable_passes" if item.name in disabled else ""
        skipped = skipped or (left_out or {}).get(item.name, "")
        if skipped:
            _record(context, item, applied=False, note=skipped)
            continue
        text = f"pass {item.name} on {context.graph_id}"
        with activity("pass", text, shown=shown, graph=context.graph_id, by=item.name):
            modified = _run_pass(item, module, context, check=check, strict=item.name in strict)
        if modified:
            changed = True
            context.modified_by.add(item.name)
            dump(context.graph_id, item.name, module)
    return changed


def _run_pass(item: Pass, module: GraphModule, context: PassContext, *, check: bool, strict: bool) -> bool:
    start = time.perf_counter()
    before: Counter[str] | None = None
    reported = context.rewrites[item.name]  # of an earlier run of the same pass
    modified = False
    context.memo.clear()
    for region in _regions(module):
        if item.applies(region, context):
            before = _count(module) if before is None else before
            modified |= _run_on_region(item, region, context, check=check, strict=strict)
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


def _run_on_region(item: Pass, region: GraphModule, context: PassContext, *, check: bool, strict: bool) -> bool:
    fingerprint = _fingerprint(region)
    known, outputs = set(region.graph.nodes), _outputs(region)
    # What a repair changes is wrong in the definitions that it would be compared by, or in how torch compiles them.
    certified = context.certify != "off" and (item.checked or strict)
    old = copy_module(region, lazy=True) if strict or certified else None
    before = old if strict else None
    called = list(zip(_regions(region), _regions(old), strict=True))[:-1] if old is not None else []
    result: Any = item.run(region, context)
    if not isinstance(result, PassResult):
        raise PassError(f"the pass {item.name!r} returned {type(result).__name__}; return PassResult(module, modified)")
    if result.graph_module is not region:
        raise PassError(f"the pass {item.name!r} must rewrite the graph in place and return the same GraphModule")
    now = _fingerprint(region)
    really = now != fingerprint
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
        if before is not None:
            _check_inputs(item, region, fingerprint)
            _check_new(item, region, known)
        if (check and item.checked) or strict:
            _verify(item, region, outputs, before, context)
        if certified and old is not None:
            _certify(item, region, old, context, now, strict=strict)
    # A pass is given the graphs that this one calls by themselves; `Graph.eliminate_dead_code` goes on in them anyway.
    for inner, was in called if certified and (really or strict) else ():
        now = _fingerprint(inner)
        if now != _fingerprint(was):
            inner.recompile()
            _certify(item, inner, was, context, now, strict=strict)
    return really


def _certify(
    item: Pass, region: GraphModule, old: GraphModule, context: PassContext, fingerprint: Sequence[Any], *, strict: bool
) -> None:
    """Check what a pass changed; what computes something else is taken back.

    Raises:
        NotCertifiedError: that can't be told from the rest.
    """
    from omnicomp.passes.certificates import certified
    from omnicomp.passes.check_budget import CheckBudget

    bounded = context.certify == "new" and not strict
    if bounded and context.budget is None:
        context.budget = CheckBudget.of(context.root or region)
    results = [leaf for leaf in _outputs(old) if isinstance(leaf, torch.Tensor)]
    differentiated = context.training or any(leaf.requires_grad for leaf in results)
    decision = context.memo.pop(DECISION, "")
    caller = None if context.root in (None, region) else caller_of(region, context.root)
    found = certified(
        item.name,
        (*item.claims(context), *(() if differentiated else (Claim(NO_GRADIENTS),))),
        old,
        region,
        graph=context.graph_id,
        assumed=context.assumptions,
        known=context.certificates,
        always=context.certify == "always",
        budget=context.budget if bounded else None,
        whole=f"{decision} {fingerprint}" if decision and caller is None else "",  # which tells nothing of a caller
        caller=caller,
    )
    refuted = {node for event in found if event.verdict == REFUTED for node in (event.node, *event.nodes)}
    told = [each for each in context.timeline.events() if isinstance(each, Rewrite) and each.name == item.name]
    context.rewrites[item.name] -= sum(each.node in refuted for each in told)
    for event in found:
        context.timeline.append(event)


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


def _outputs(module: GraphModule) -> list[Any]:
    """The values that a graph returns: fake tensors, or what else is there."""
    output = next(iter(reversed(module.graph.nodes)))
    return [leaf.meta.get("example_value") if isinstance(leaf, Node) else leaf for leaf in tree_leaves(output.args)]


def _check_inputs(item: Pass, region: GraphModule, before: Sequence[Any]) -> None:
    """The graph is called with what it was called with before."""
    old = [name for name, op, *_ in before if op == "placeholder"]
    new = [node.name for node in region.graph.find_nodes(op="placeholder")]
    if old != new:
        raise PassError(f"the pass {item.name!r} changed the inputs from ({', '.join(old)}) to ({', '.join(new)})")


def _check_new(item: Pass, region: GraphModule, known: Collection[Node]) -> None:
    """What was inserted has a fake value, by which later passes go."""
    for node in region.graph.nodes:
        if node.op.startswith("call_") and node not in known and node.users and "example_value" not in node.meta:
            raise PassError(
                f"the pass {item.name!r} inserted {node.name} without a fake value; insert it by "
                "omnicomp.analysis.nodes.insert_call, or set its meta['example_value']"
            )


def _verify(
    item: Pass, region: GraphModule, known: list[Any], before: GraphModule | None, context: PassContext
) -> None:
    """Run the rewritten graph on fake tensors, and compare its outputs with what they were.

    With the graph as it was, what both write to and what is in one memory is compared as well.
    """
    inputs = [node.meta.get("example_value") for node in region.graph.find_nodes(op="placeholder")]
    if any(value is None for value in inputs):
        return  # a region whose inputs Dynamo did not describe
    expected = _effects_or_none(before, inputs, context)
    try:
        done = effects(region, inputs, gradients=context.training)
    except GuardOnDataDependentSymNode:
        return  # it depends on values that no fake tensor has, so that running it proves nothing
    except Exception as error:
        if before is not None and expected is None:
            return  # as before
        raise PassError(f"the pass {item.name!r} left a graph that does not run on fake tensors: {error}") from error
    after = done.outputs
    if len(known) != len(after):
        raise PassError(f"the pass {item.name!r} changed the number of outputs from {len(known)} to {len(after)}")
    for index, (old, new) in enumerate(zip(known, after, strict=True)):
        if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            if isinstance(old, torch.Tensor) != isinstance(new, torch.Tensor):
                raise PassError(f"the pass {item.name!r} made another kind of value of output {index}")
            continue
        same = old.dtype == new.dtype or (old.dtype, new.dtype) in context.retyped
        # A size that depends on data is a new symbol each time.
        moved = old.shape != new.shape if not free_unbacked_symbols(old) else old.dim() != new.dim()
        if moved or not same or old.device != new.device:
            raise PassError(
                f"the pass {item.name!r} changed output {index} from {_describe(old)} to {_describe(new)}; "
                "an output keeps its shape, dtype and device"
            )
        strided = before is not None and old.layout == torch.strided and not free_unbacked_symbols(old)
        if strided and old.stride() != new.stride():
            raise PassError(
                f"the pass {item.name!r} changed the strides of output {index} from {old.stride()} to {new.stride()}; "
                "an output keeps its layout"
            )
        if context.training and old.requires_grad and not new.requires_grad:
            raise PassError(f"the pass {item.name!r} left output {index} without a gradient, which it had")
    if expected is not None and done.written != expected.written:
        raise PassError(
            f"the pass {item.name!r} changed which inputs the graph writes to, from {_listed(expected.written)} to "
            f"{_listed(done.written)}"
        )
    if expected is not None and done.shared != expected.shared:
        raise PassError(f"the pass {item.name!r} changed which inputs and outputs are in the same memory")


def _effects_or_none(module: GraphModule | None, inputs: Sequence[Any], context: PassContext) -> Effects | None:
    """What a graph does on fake tensors; None if it does not run on them."""
    if module is None:
        return None
    try:
        return effects(module, inputs, gradients=context.training)
    except Exception:  # noqa: BLE001 - the graph as it was, of which nothing is to be said
        return None


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices)) or "none"


def _describe(value: torch.Tensor) -> str:
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
