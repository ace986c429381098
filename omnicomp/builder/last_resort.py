"""The last resort: a part that cannot be built at all runs through torch's dispatcher, operator by operator.

A forward that can't be built could raise, and the whole graph would run eager. A backward is built when the user calls
`backward()`, where nothing else could take its place any more; so each part has a last resort of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from omnicomp._torch.fx import boxed, copy_module
from omnicomp.builder.placement import Plan, Run
from omnicomp.builder.record import PartRecord
from omnicomp.errors import Once, first_line, harmless
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.runtime.ranks import agree
from omnicomp.timeline import Outcome, Ran, Reason
from omnicomp.timeline.recorder import record_step_down


def run_eagerly(
    module: GraphModule, inputs: Sequence[Any], context: LoweringContext, error: Exception
) -> Callable[[list[Any]], Sequence[Any]]:
    """A boxed callable for a part that could not be built, which is recorded.

    Args:
        module: the part as autograd made it; owned by this function.
        inputs: fake tensors and symbolic sizes.
        context: where it belongs.
        error: what building it raised.

    Raises:
        Exception: `error`, if eager would compute other values than the other parts expect.
    """
    lowering = EagerLowering()
    nodes = tuple(node for node in module.graph.nodes if node.op == "call_function")
    if any(lowering.supports(node, context) is not None for node in nodes):
        raise error
    plan = Plan(runs=(Run(lowering="eager", nodes=nodes),), counts={"eager": len(nodes)}, declined=())
    where = context.where(f"{context.part_id}.0")
    record: PartRecord | None = None
    with harmless("what a part is made of"):
        record = PartRecord(module, plan, (), context, ["eager"])
    plain, lines = copy_module(module), [first_line(error)]
    try:
        built = lowering.lower(module, inputs, context)
    except Exception as second:  # noqa: BLE001 - its sentence joins that of the first
        built = Executable(lowering="eager", call=boxed(plain), attest=lambda: ("torch.fx.GraphModule", {}))
        lines.append(first_line(second))
    if record is not None:
        with harmless("what a part is made of"):
            record.emit_pieces([("", 0.0)])
    reason = Reason(
        code="build_failed",
        by="ladder",
        sentence=f"the part can't be built, and all of it runs eager: {'; '.join(dict.fromkeys(lines))}",
        observed=type(error).__name__,
        lever="report the error; to see it raised, set options={'on_error': 'raise'}",
    )
    record_step_down(context.timeline, where, "ladder", "eager", reason, attempts=False)

    def ran() -> None:
        evidence, kernels = built.attest()
        context.timeline.append(Ran(**where, lowering="eager", evidence=evidence, kernels=kernels))

    once = Once(ran)
    raised = Once(lambda: context.timeline.append(Outcome(**where, state="raised")))

    def call(arguments: list[Any]) -> Sequence[Any]:
        try:
            agree(context, can_follow=True)
            outputs = built.call(arguments)
        except BaseException:
            raised()
            raise
        once()
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
