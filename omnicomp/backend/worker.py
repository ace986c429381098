"""The process that builds graphs for the option `background`: `python -m omnicomp.backend.worker READ WRITE`.

It reads what `shipping.pack` made of a graph, compiles it as the program would, and answers with its saved state. It
ends, with the compilers that it started, once the program has closed the pipe.
"""

import dataclasses
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from omnicomp._torch.dynamo import control_flow, late_compile, samples, saving, shipping
from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor import libraries
from omnicomp.backend.background import Answer, Task, Wish
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.pipeline import compile_graph
from omnicomp.backend.saved import state_of
from omnicomp.backend.worker_pool import serve
from omnicomp.devices import resolve_device
from omnicomp.errors import first_line
from omnicomp.timeline import Capture, Retreat, Timeline
from omnicomp.timeline.files import event_from_dict
from omnicomp.timeline.recorder import drafting


def build(data: bytes) -> bytes:
    """Compile one graph; the answer says so if that is not possible."""
    draft = Timeline()
    try:
        wish: Wish = pickle.loads(data)
        with drafting(draft), shipping.unpacked(wish.graph, wish.sizes) as shipped:
            with saving.bundled(keyless=True), libraries.built_here(shipped.extra.device):
                return pickle.dumps(_answer(shipped, wish, draft))
    except Exception as error:  # noqa: BLE001 - becomes the reason why the program builds the graph itself
        return pickle.dumps(Answer(events=(), error=first_line(error), kept_here=True))


def _answer(shipped: shipping.Shipped, wish: Wish, draft: Timeline) -> Answer:
    task: Task = shipped.extra
    capture = event_from_dict(task.capture)
    assert isinstance(capture, Capture)
    gm = shipped.module
    graph = CapturedGraph(
        record=task.record,
        device=resolve_device(task.device),
        policy=dataclasses.replace(task.policy, **wish.policy),
        training=task.training,
        capture=capture,
        plain=copy_module(gm) if task.training else None,
        values=samples.unpacked(wish.values, shipped.scene.inputs) if wish.values else None,
    )
    if wish.variant:
        graph = graph.with_record(id=f"{graph.id}:{wish.variant}")
        graph = dataclasses.replace(graph, capture=dataclasses.replace(capture, graph=graph.id, variant=wish.variant))

    def compile_it(inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, copy_module(gm, lazy=True), graph, inputs)

    try:
        with control_flow.compile_lock:
            compiled, sizes = late_compile.compile_late(shipped.scene, compile_it)
    except Exception as error:  # noqa: BLE001 - becomes the reason why the graph runs eager
        return Answer(events=_events(draft), error=first_line(error))
    try:
        state = state_of(compiled)
        pickle.dumps(state)
    except Exception as error:  # noqa: BLE001 - becomes the reason why the program builds the graph itself
        gave_up = any(isinstance(each, Retreat) and each.subgraph == graph.id for each in draft.events())
        return Answer(events=_events(draft) if gave_up else (), error=first_line(error), kept_here=not gave_up)
    return Answer(events=_events(draft), state=state, sizes=sizes)


def _events(draft: Timeline) -> tuple[dict[str, Any], ...]:
    return tuple(event.to_dict() for event in draft.events())


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), build)
