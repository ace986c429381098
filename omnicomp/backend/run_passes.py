"""The pipeline of passes on one graph, with the user's options."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.fx import GraphModule

from omnicomp import passes, records
from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import record_retreat
from omnicomp.errors import LegaliseError, PassError, first_line
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.base import Pass, PassContext, run_pipeline
from omnicomp.passes.mask_classes import MaskClass
from omnicomp.passes.registry import GROUP, Plugin, checked
from omnicomp.passes.repairs import Repair
from omnicomp.timeline import Certified, Event, Option, Reason, Timeline, current


@records.dataclass(frozen=True, kw_only=True)
class Passed:
    """A graph behind the passes."""

    module: GraphModule
    assumptions: tuple[Assumption, ...]
    events: tuple[Event, ...]
    traced_under: tuple[Callable[[], AbstractContextManager[None]], ...]

    @contextlib.contextmanager
    def in_force(self) -> Generator[None]:
        """Have in force what the passes want while the graph is compiled."""
        with contextlib.ExitStack() as stack:
            for make in self.traced_under:
                stack.enter_context(make())
            yield


def run_passes(
    gm: GraphModule,
    graph: CapturedGraph,
    *,
    speculate: bool,
    kept: GraphModule | None = None,
    inputs: Sequence[Any] = (),
    answers: Mapping[Hashable, MaskClass] | None = None,
) -> Passed:
    """Run the pipeline; a pass that raises costs its rewrites, not the user's program.

    One from outside costs its own alone: the others run again without it. `kept` is a copy of the graph for these
    cases, if there is one already. `answers` are the classes of masks that the graph is to be right for; without them,
    those of the inputs.
    """
    own = copy_module(gm) if kept is None else None
    spare = kept or own or gm
    line, unusable = passes.pipeline(graph.policy)
    for plugin in unusable:
        _record_unusable(graph, plugin)
    foreign = {item.name for item in line if all(item is not each for each in passes.PIPELINE)}
    left_out: dict[str, str] = {}
    suspected: dict[str, str] = {}
    refuted: dict[str, Event] = {}
    # Dynamo calls what is compiled with what its own graph takes: one that others rewrite is a copy.
    module = copy_module(gm) if foreign else gm
    while True:
        context = PassContext(
            graph_id=graph.id,
            device=graph.device,
            timeline=Timeline(),  # of its own, as rewrites of a pass that raises did not happen
            training=graph.training,
            speculate=speculate,
            inputs=inputs,
            answers=answers,
            replay=graph.policy.verdicts == "use",
            certify=graph.policy.certify,
        )
        try:
            passed = _run(line, module, context, graph, foreign=foreign, left_out={**left_out, **suspected})
        except control_flow.CONTROL_FLOW:
            raise
        except Exception as error:
            told = first_line(error)
            if graph.policy.on_error == "raise" and not isinstance(error, LegaliseError):
                raise
            if graph.policy.certify != "off":
                from omnicomp.passes.certificates import NotCertifiedError

                if isinstance(error, NotCertifiedError):
                    refuted[context.running], told = error.event, str(error)
            if context.running in foreign | refuted.keys():
                left_out[context.running] = told
            elif context.modified_by & foreign and not suspected:
                # What another one left may be what it could not take: it gets the graph without that.
                suspected = dict.fromkeys(context.modified_by & foreign, f"{context.running} raised behind it: {told}")
            elif isinstance(error, LegaliseError):
                raise control_flow.user_error(error) from None
            else:
                _record_failure(graph, context.running, told)
                repairs = [item for item in line if isinstance(item, Repair)]
                context = dataclasses.replace(
                    context, timeline=Timeline(), speculate=False, assumptions=[], inputs=(), certify="off"
                )
                return _run(repairs, copy_module(spare), context, graph)
            module = copy_module(spare)
        else:
            break
    for name, why in {**left_out, **suspected}.items():
        _record_left_out(graph, name, why, refuted=name in refuted)
    if own is not None:
        forget_tensors(own)
    return dataclasses.replace(passed, events=(*refuted.values(), *passed.events)) if refuted else passed


def _run(
    line: Sequence[Pass],
    gm: GraphModule,
    context: PassContext,
    graph: CapturedGraph,
    *,
    foreign: Collection[str] = (),
    left_out: Mapping[str, str] | None = None,
) -> Passed:
    """Run passes with the options of the policy; the graphs of those from outside are always checked."""
    policy = graph.policy
    pipeline: list[Pass] = []
    left_out = dict(left_out or {})
    for item in line:
        context.running = item.name
        made = item if item.name in left_out else item.of(policy)
        if policy.numerics != "inductor" and made.claims(context):
            left_out.setdefault(item.name, "its rewrites may change a bit, which the option numerics forbids")
        if item.name in foreign and checked(made).name != item.name:
            raise PassError(f"{type(item).__qualname__}.of returned the pass {made.name!r}; return one of its own kind")
        pipeline.append(made)
    run_pipeline(
        pipeline,
        gm,
        context,
        disabled=policy.disable_passes,
        left_out=left_out,
        check=policy.check_passes,
        strict=foreign,
        shown=policy.progress,
    )
    events = context.timeline.events()
    if any(isinstance(event, Certified) for event in events):
        from omnicomp.passes.certificates import with_verdicts

        events = with_verdicts(events)
    return Passed(
        module=gm,
        assumptions=tuple(context.assumptions),
        events=events,
        traced_under=tuple(context.traced_under),
    )


def _record_failure(graph: CapturedGraph, name: str, error: str) -> None:
    reason = Reason(
        code="capture_failed",
        by="passes",
        sentence=f"the pass {name} raised, and the graph goes on as Dynamo captured it: {error}",
        lever=f"switch the pass off with options={{'disable_passes': ['{name}']}}, and report the error",
    )
    record_retreat(graph.id, "passes", "no passes", reason)


def _record_left_out(graph: CapturedGraph, name: str, error: str, *, refuted: bool) -> None:
    failed = "was refuted" if refuted else "failed"
    reason = Reason(
        code="not_certified" if refuted else "pass_left_out",
        by=name,
        sentence=f"the pass {name} {failed}, and the graph goes on without what it rewrote: {error}",
        lever=f"report the error to the package that has the pass, or leave it out with "
        f"options={{'disable_passes': ['{name}']}}"
        + ("; options={'certify': 'off'} keeps what it made, unchecked" if refuted else ""),
    )
    record_retreat(graph.id, "passes", f"passes without {name}", reason)


def _record_unusable(graph: CapturedGraph, plugin: Plugin) -> None:
    current().append(
        Option(
            graph=graph.id,
            key=f"entry point {GROUP}: {plugin.name}",
            requested="its pass",
            effective="none",
            reason=Reason(
                code="option_ineffective",
                by="passes",
                sentence=f"the pass {plugin.name} of {plugin.origin or 'a package'} can't be used: {plugin.error}",
                lever="repair or uninstall the package that declares it",
            ),
        )
    )
