"""The Inductor lowering: takes everything on a device that Inductor generates code for."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.cache_lookups import Lookup
from omnicomp._torch.inductor.eager_kernels import call_eager, hold
from omnicomp._torch.inductor.group_casts import cast_together
from omnicomp._torch.inductor.recordable import Recordable
from omnicomp.analysis.layouts import depends_on_data, layout_of, restride
from omnicomp.analysis.nodes import fake_value, op_name
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.timeline import Reason


class InductorLowering:
    """Builds a subgraph with Inductor's own inner compile, caches included."""

    name = "inductor"
    title = "Inductor"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Everything: what Inductor has no code generator for, it calls as an external kernel itself.

        With `numerics="eager"`, what it computes as eager does in every bit, or calls as eager's kernel.
        """
        if compile_fx.has_inductor(context.device.type):
            refused = None
            if context.policy.numerics == "eager":
                from omnicomp.lowerings.exact import has_external_kernel, inexact

                refused = None if has_external_kernel(node) else inexact(node, self.name)
            return refused or _negated(node, self.name)
        return Reason(
            code="lowering_excluded",
            by=self.name,
            sentence=f"Inductor has no code generator for the device {context.device.type}",
            node=f"{node.name} ({op_name(node)})",
            lever="register the device with Inductor; `omnicomp doctor` shows what is registered",
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Build one subgraph of a part that has more than one executable.

        Torch's own CUDA graphs stay off here: a recorded graph of one piece would have to know the memory of its
        neighbours. By the option `cudagraphs` pieces for inference are recorded, since all that they return is copied.
        """
        output = next(iter(reversed(module.graph.nodes)))
        predicted = [fake_value(value) for value in output.args[0]]
        if context.undecomposed:
            module = _decomposed(module, inputs, context)
        kwargs = dict(context.inductor_kwargs)
        found: list[Recordable] | None = [] if context.records and context.part == "inference" else None
        static = () if found is None else kwargs.get("static_input_idxs", ())
        kwargs.update(cudagraphs=compile_fx.cudagraphs_box(found is not None), static_input_idxs=static)
        lookups: list[Lookup] = []
        with compile_fx.subgraph_context(inputs), _combined(module, context):
            compiled = compile_fx.compile_part(module, inputs, "", lookups, found=found, **kwargs)
        result = executable(compiled)
        result.recordable = next(iter(found or ()), None)
        result.lookups, result.call = tuple(lookups), compile_fx.direct(compiled)
        if any(map(depends_on_data, predicted)):
            layouts, run = list(map(layout_of, predicted)), result.call
            result.call = lambda arguments: list(map(restride, run(arguments), layouts))
        return result

    def lower_whole(
        self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext, record: str, fallback: bytes
    ) -> Executable:
        """Build a whole part as `compile_fx` asks for it, CUDA graphs included."""
        if context.undecomposed:
            module = _decomposed(module, inputs, context)
        if context.part != "inference" and context.policy.dtype_policy.rewrites:
            cast_together(module.graph)
        lookups: list[Lookup] = []
        found: list[Recordable] | None = [] if context.records else None
        kwargs = context.inductor_kwargs
        with _combined(module, context):
            compiled = compile_fx.compile_part(module, inputs, record, lookups, fallback, found, **kwargs)
        recordable = next(iter(found or ()), None)
        return dataclasses.replace(whole_executable(compiled), lookups=tuple(lookups), recordable=recordable)


def _combined(module: GraphModule, context: LoweringContext) -> contextlib.AbstractContextManager[None]:
    """Inside, small kernels of a graph that is bound by launches are combined, unless the user sets `combo_kernels`."""
    if context.device.type != "cuda" or "combo_kernels" in context.policy.inductor:
        return contextlib.nullcontext()
    from omnicomp._torch.inductor.combos import combined  # needs Inductor's scheduler

    return combined(module)


def _decomposed(module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> GraphModule:
    """The subgraph with Inductor's decompositions; with eager's numerics, of what code is generated for."""
    from omnicomp._torch.autograd.decompose import with_decompositions
    from omnicomp.lowerings.exact import called_by_code

    if context.policy.numerics != "eager":
        return with_decompositions(module, inputs, context.part)
    call_eager(node for node in module.graph.nodes if called_by_code(node, "inductor") is not None)
    made = with_decompositions(module, inputs, "")
    hold(made.graph)
    return made


def _negated(node: Node, name: str) -> Support:
    """Generated code reads the memory of a tensor whose negation is pending, as of `z.conj().imag`, as it is."""
    values = [fake_value(operand) for operand in node.all_input_nodes]
    if not any(isinstance(value, torch.Tensor) and value.is_neg() for value in values):
        return None
    return Reason(
        code="lowering_excluded",
        by=name,
        sentence="Inductor's code would read a tensor without the negation that is pending for it",
        node=f"{node.name} ({op_name(node)})",
        lever="call resolve_neg() on it before the compiled function",
    )


def whole_executable(compiled: Any) -> Executable:
    """Wrap a whole part, built or restored, so that its call can be surrounded."""
    result = executable(compiled)
    if not isinstance(compiled, compile_fx.CompiledFxGraph):  # a graph without operators
        return result

    def install(first: Callable[[list[Any]], Any], later: Callable[[], Callable[..., Any]]) -> None:
        compile_fx.call_first(compiled, first, later)

    return dataclasses.replace(result, call=compiled.current_callable, install=install)


def executable(compiled: Any) -> Executable:
    """Wrap what Inductor built, with its generated module as evidence."""
    path, key = compile_fx.artefact_path(compiled), compile_fx.artefact_key(compiled)

    def attest() -> tuple[str, dict[str, int]]:
        evidence = f"{path} (key {key})" if key else path or "a graph without operators"
        return evidence, compile_fx.external_kernels(compiled)

    written, generated = compile_fx.overwritten_inputs(compiled), compile_fx.generated_python(compiled)
    return Executable(
        lowering="inductor",
        call=compiled,
        artefact=path,
        attest=attest,
        overwritten=written,
        generated=generated,
        compiled=compiled,
    )
