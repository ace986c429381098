"""The pipeline of passes on one graph, with the user's options."""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.fx import GraphModule

from omnicomp import passes
from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import record_retreat
from omnicomp.errors import LegaliseError, first_line
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.base import Pass, PassContext, run_pipeline
from omnicomp.passes.repairs import Repair
from omnicomp.timeline import Event, Reason, Timeline

__all__ = ["Passed", "run_passes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passed:
    """A graph behind the passes.

    Attributes:
        module: the graph.
        assumptions: what it assumes of its inputs.
        events: what the passes reported.
        traced_under: makes what has to be in force while it is compiled.
    """

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
) -> Passed:
    """Run the pipeline; a pass that raises costs its rewrites, not the user's program.

    `kept` is a copy of the graph for that case, if there is one already.
    """
    own = copy_module(gm) if kept is None else None
    pipeline = [item.of(graph.policy) for item in passes.PIPELINE]
    try:
        passed = _run(pipeline, gm, graph, speculate=speculate, inputs=inputs)
    except control_flow.CONTROL_FLOW:
        raise
    except LegaliseError as error:
        raise control_flow.user_error(error) from None
    except Exception as error:
        if graph.policy.on_error == "raise":
            raise
        reason = Reason(
            code="capture_failed",
            by="passes",
            sentence=f"a pass raised, and the graph goes on as Dynamo captured it: {first_line(error)}",
            lever="switch the pass off with options={'disable_passes': [...]}, and report the error",
        )
        record_retreat(graph.id, "passes", "no passes", reason)
        repairs = [item for item in pipeline if isinstance(item, Repair)]
        return _run(repairs, copy_module(kept or own or gm), graph)
    if own is not None:
        forget_tensors(own)
    return passed


def _run(
    pipeline: Sequence[Pass],
    gm: GraphModule,
    graph: CapturedGraph,
    *,
    speculate: bool = False,
    inputs: Sequence[Any] = (),
) -> Passed:
    # Rewrites are reported to a timeline of their own first: those of a pass that raises did not happen.
    context = PassContext(
        graph_id=graph.id,
        device=graph.device,
        timeline=Timeline(),
        training=graph.training,
        speculate=speculate,
        inputs=inputs,
    )
    policy = graph.policy
    run_pipeline(
        pipeline,
        gm,
        context,
        disabled=policy.disable_passes,
        check=policy.check_passes,
        shown=policy.progress,
    )
    return Passed(
        module=gm,
        assumptions=tuple(context.assumptions),
        events=context.timeline.events(),
        traced_under=tuple(context.traced_under),
    )
