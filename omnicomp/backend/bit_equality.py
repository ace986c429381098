"""The first calls of a graph under `numerics="eager"`, compared with eager bit for bit.

Results, gradients, random numbers and what the graph writes to are compared.

Before each of these calls, the compiled graph and the graph as Dynamo captured it run on the inputs of the call, from
one state of the generators, and backward from the same gradients. A graph that differs anywhere runs eager from then
on, by eager's autograd; the call itself comes behind, so that nothing is drawn or written twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule

from omnicomp._torch.dynamo import control_flow
from omnicomp._torch.fx import forget_tensors
from omnicomp._torch.repairs.recomputed_draws import eager_calls
from omnicomp.analysis.accuracy import differences
from omnicomp.analysis.nodes import all_nodes, fake_value
from omnicomp.analysis.random_state import GeneratorStates, generator_states
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import graph_compiler, record_eager
from omnicomp.backend.saved import carried
from omnicomp.errors import LoweringError, first_line
from omnicomp.timeline import Option, Reason, current

_CALLS: Final = 2
"""How many calls are compared: the second has other inputs, and maybe other strides of its gradients."""

_STATISTICS: Final = ("batch_norm", "instance_norm")


def compared(
    compiled: Callable[..., Any], plain: GraphModule, graph: CapturedGraph, *, owned: bool = True
) -> Callable[..., Any]:
    """The compiled graph, unless one of its first calls differs from eager in a bit.

    Args:
        compiled: what is to be compared.
        plain: the graph as Dynamo captured it.
        graph: what it belongs to.
        owned: whether nobody else calls `plain`.
    """
    if graph.policy.numerics != "eager" or graph.policy.verify == "off":
        return compiled
    comparison = _Comparison(plain, graph)
    target, left = compiled, _CALLS

    def call(*arguments: Any) -> Any:
        nonlocal target, left
        if left:
            left -= 1
            eager = comparison.eager_if_different(compiled, arguments)
            if eager is not None:
                target, left = eager, 0
            elif not left and owned:
                forget_tensors(plain)
        return target(*arguments)

    return carried(compiled, control_flow.disable(call, reason="omnicomp compares the graph with eager"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trial:
    """What one run left."""

    names: tuple[str, ...]  # what each value is, for people
    values: tuple[Any, ...]  # results, what was written to, gradients, and states of generators


class _Comparison:
    """Compares a compiled graph with the captured one."""

    def __init__(self, plain: GraphModule, graph: CapturedGraph) -> None:
        from omnicomp.runtime.eager_gradients import effects_of

        self._plain, self._graph = eager_calls(plain), graph
        nodes = plain.graph.find_nodes(op="placeholder")
        fakes = [fake_value(node) for node in nodes]
        # Normalisation with running statistics writes to them without a new version.
        normed = any(getattr(node.target, "__name__", "") in _STATISTICS for node in all_nodes(plain))
        # Dynamo ran the graph's other writes on these.
        self._written = tuple(
            index
            for index, fake in enumerate(fakes)
            if isinstance(fake, Tensor) and (fake._version or (normed and not fake.requires_grad))
        )
        self._refusal = effects_of(plain)
        for node in plain.graph.find_nodes(op="get_attr"):
            held, fake = getattr(plain, str(node.target), None), fake_value(node)
            written = isinstance(fake, Tensor) and fake._version
            if isinstance(held, Tensor) and (held.requires_grad or normed or written):
                self._refusal = self._refusal or "it may write to a tensor that it holds"  # as an optimizer's does
        if any(fakes[index].requires_grad for index in self._written):
            self._refusal = self._refusal or "it writes to an input that requires a gradient"

    def eager_if_different(self, compiled: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """The graph to call from now on, if the compiled one is not equal to it in every bit."""
        if self._refusal:
            self._left_out(self._refusal)
            return None
        from omnicomp.runtime.override_check import devices_of

        states, different = generator_states(devices_of(arguments)), ""
        unsteady: dict[str, None] = {}
        try:
            for spread in (True, False) if self._graph.training else (False,):
                expected = self._run(self._plain, arguments, states, spread=spread)
                found = self._run(compiled, arguments, states, spread=spread)
                others = differences(found.values, expected.values)
                if others:
                    again = self._run(self._plain, arguments, states, spread=spread)
                    own = differences(again.values, expected.values)
                    unsteady |= dict.fromkeys(expected.names[index] for index in own)
                    others = [index for index in others if index not in own]
                different = different or next((expected.names[index] for index in others), "")
        except control_flow.CONTROL_FLOW:
            raise
        except Exception as error:  # noqa: BLE001 - becomes an event; the call itself raises what it raises
            self._left_out(f"comparing it raised: {first_line(error)}")
        finally:
            states.restore()
        if unsteady and not different:
            self._left_out(f"two runs of eager differ in {', '.join(unsteady)}")
        return self._eager(different) if different else None

    def _run(
        self, function: Callable[..., Any], arguments: Sequence[Any], states: GeneratorStates, *, spread: bool
    ) -> _Trial:
        """Run forward and backward; `spread`: on gradients that share one number, as of a sum."""
        from omnicomp.runtime.override_check import devices_of

        states.restore()
        own = [_copy(value) if index in self._written else _own(value) for index, value in enumerate(arguments)]
        results = function(*own)
        values = {f"result {index}": value for index, value in enumerate(results)}
        values |= {f"input {index}, which it writes to": own[index] for index in self._written}
        wanted = [index for index, value in enumerate(own) if isinstance(value, Tensor) and value.requires_grad]
        ends = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
        if self._graph.training and wanted and ends:
            # Drawn behind the graph's own numbers, on which neither these nor what is compared depends.
            after = generator_states(devices_of(arguments))
            torch.manual_seed(0)
            grads = [torch.ones((), dtype=v.dtype, device=v.device).expand_as(v) for v in ends]
            grads = (
                grads
                if spread
                else [torch.randn_like(value) if value.dim() else one for value, one in zip(ends, grads, strict=True)]
            )
            after.restore()
            found = torch.autograd.grad(ends, [own[index] for index in wanted], grads, allow_unused=True)
            values |= {f"the gradient of input {index}": value for index, value in zip(wanted, found, strict=True)}
        drawn = generator_states(devices_of(arguments))
        values |= {f"generator {index}": state for index, (_, state) in enumerate(drawn.states)}
        return _Trial(names=tuple(values), values=tuple(values.values()))

    def _eager(self, what: str) -> Callable[..., Any]:
        graph = self._graph
        reason = Reason(
            code="verification_failed",
            by=graph_compiler(graph),
            sentence=f"{what} is not eager's in every bit, and the graph runs eager",
            observed="other bits",
            needed="eager's bits",
            source=graph.record.sources[0] if graph.record.sources else "",
            lever="report the graph; options={'numerics': 'inductor'} compiles it",
        )
        if graph.policy.on_error == "raise":
            raise LoweringError(f"{graph.id} is wrong on {graph_compiler(graph)}: {reason}")
        once, plain = record_eager(graph.id, graph_compiler(graph), reason), self._plain

        def run(*arguments: Any) -> Any:
            results = plain(*arguments)
            once()
            return results

        return run

    def _left_out(self, why: str) -> None:
        current().append(
            Option(
                graph=self._graph.id,
                key="numerics",
                requested="eager",
                effective="eager, not compared as a whole",
                reason=Reason(
                    code="option_ineffective",
                    by="numerics",
                    sentence=f"the graph was not compared with eager as a whole: {why}",
                    lever="none is needed; what generated code computes of it was compared",
                ),
            )
        )


def _own(value: Any) -> Any:
    """The same memory, without the hooks of the program on its gradient."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def _copy(value: Tensor) -> Tensor:
    """A copy with the same strides, offset and gaps."""
    memory = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        memory, value.storage_offset(), value.shape, value.stride()
    )
