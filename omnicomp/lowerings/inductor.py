"""The Inductor lowering: takes everything on a device that Inductor generates code for."""

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from omnicomp._torch import inductor
from omnicomp._torch.decompose import with_decompositions
from omnicomp._torch.lookups import Lookup
from omnicomp.graphs import fake_value, op_name
from omnicomp.layouts import depends_on_data, layout_of, restride
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.timeline import Reason

__all__ = ["InductorLowering"]


class InductorLowering:
    """Builds a subgraph with Inductor's own inner compile, caches included."""

    name = "inductor"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Everything: what Inductor has no code generator for, it calls as an external kernel itself."""
        if inductor.has_inductor(context.device.type):
            return None
        return Reason(
            code="lowering_excluded",
            by=self.name,
            sentence=f"Inductor has no code generator for the device {context.device.type}",
            node=f"{node.name} ({op_name(node)})",
            lever="register the device with Inductor; `omnicomp doctor` shows what is registered",
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Build one subgraph of a part that has more than one executable.

        CUDA graphs stay off here: a recorded graph of one piece would have to know the memory of its neighbours.
        """
        output = next(iter(reversed(module.graph.nodes)))
        predicted = [fake_value(value) for value in output.args[0]]
        if context.undecomposed:
            module = with_decompositions(module, inputs, context.part)
        kwargs = dict(context.inductor_kwargs)
        kwargs.update(cudagraphs=inductor.no_cudagraphs(), static_input_idxs=())
        lookups: list[Lookup] = []
        with inductor.subgraph_context(inputs):
            compiled = inductor.compile_part(module, inputs, "", lookups, **kwargs)
        result = executable(compiled)
        result.lookups, result.call = tuple(lookups), inductor.direct(compiled)
        if any(map(depends_on_data, predicted)):
            layouts, run = list(map(layout_of, predicted)), result.call
            result.call = lambda arguments: list(map(restride, run(arguments), layouts))
        return result


def executable(compiled: Any) -> Executable:
    """Wrap what Inductor built, with its generated module as evidence."""
    path, key = inductor.artefact_path(compiled), inductor.artefact_key(compiled)

    def attest() -> tuple[str, dict[str, int]]:
        evidence = f"{path} (key {key})" if key else path or "a graph without operators"
        return evidence, inductor.external_kernels(compiled)

    written, generated = inductor.overwritten_inputs(compiled), inductor.generated_python(compiled)
    return Executable(
        lowering="inductor",
        call=compiled,
        artefact=path,
        attest=attest,
        overwritten=written,
        generated=generated,
        compiled=compiled,
    )
