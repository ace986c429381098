"""Verification: results of a subgraph on real inputs, compared with eager in a higher precision.

Half precision is allowed what eager loses in it, and float32 what the order of its sums costs
(`omnicomp.analysis.accuracy`). With `numerics="eager"` results are compared with eager's own, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.mutations import write_targets
from omnicomp._torch.fx import boxed, copy_module
from omnicomp._torch.user_code import user_operators
from omnicomp.analysis.accuracy import PRECISIONS, copy_of, differences, judge
from omnicomp.analysis.collectives import collectives_of
from omnicomp.analysis.nodes import op_name
from omnicomp.analysis.random_state import GeneratorStates, generator_states
from omnicomp.errors import LoweringError, first_line, harmless
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.override import put_references
from omnicomp.runtime.guard import Boxed, drawing_devices, draws_random_numbers
from omnicomp.safety.forks import new_lock
from omnicomp.timeline import Reason
from omnicomp.timeline.recorder import record_step_down


def in_precision(module: GraphModule, dtype: torch.dtype) -> GraphModule:
    """A copy of a post-autograd graph in which every floating-point dtype that it names is `dtype`."""

    def wide(value: Any) -> Any:
        return dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

    made = copy_module(module)
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(map(wide, node.args))
            node.kwargs = {name: wide(value) for name, value in node.kwargs.items()}
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
    made.recompile()
    return made


@dataclasses.dataclass(eq=False)
class Verifier:
    """Compares the calls of one executable with eager."""

    module: GraphModule  # the subgraph before anything was rewritten in it; read, not changed
    inputs: Sequence[Any]  # fake tensors and symbolic sizes of it
    context: LoweringContext  # where it belongs
    subgraph: str  # its id
    lowering: str  # of the executable
    # Called once with the reason if the executable is wrong; returns what to record.
    on_wrong: Callable[[Reason], Reason] = lambda reason: reason
    build: Callable[[], Executable] | None = None  # makes the eager executable; by default of `module`

    def __post_init__(self) -> None:
        self._lock = new_lock()
        self._done = False
        self._eager: Executable | None = None
        self._replaced: Boxed | None = None
        self._changed = _changed_inputs(self.module)
        self.verdict = "not verified: it was not called"

    @property
    def failed(self) -> bool:
        """Whether the executable was replaced by eager."""
        return self._replaced is not None

    def around(self, call: Boxed) -> Boxed:
        """A boxed callable that verifies the first call, or every one, of `call`."""
        always = self.context.policy.verify == "always"

        def verified(inputs: list[Any]) -> Sequence[Any]:
            replaced = self._replaced
            if replaced is not None:
                return replaced(inputs)
            if self._done and not always:
                return call(inputs)
            return self._verify(call, inputs)

        verified._boxed_call = True  # type: ignore[attr-defined]
        return verified

    def _verify(self, call: Boxed, inputs: list[Any]) -> Sequence[Any]:
        node = draws_random_numbers(self.module)
        if node is not None and not self._exact:
            self.verdict, self._done = f"not verified: {op_name(node)} draws other numbers in eager", True
            return call(inputs)
        if collectives_of(self.module):
            self.verdict, self._done = "not verified: it takes part in a collective, which would run again", True
            return call(inputs)
        operators = user_operators(self.module)
        if operators:
            self.verdict, self._done = f"not verified: {', '.join(operators)} of the program would run again", True
            return call(inputs)
        dtype, kept = PRECISIONS[self.context.policy.reference], list(inputs)
        states = GeneratorStates(()) if node is None else generator_states(drawing_devices(self.module))
        try:
            own, again = (
                [copy_of(value) if index in self._changed else value for index, value in enumerate(inputs)]
                for _ in range(2)
            )
            wide = [] if self._exact else [copy_of(value, dtype) for value in inputs]
            eager = self._eager_lowering()
            expected = list(eager.call(list(own)))
            states.restore()
            repeated = list(eager.call(list(again))) if self._exact else []
            exact = (
                []
                if self._exact
                else list(boxed(in_precision(put_references(copy_module(self.module)), dtype))(list(wide)))
            )
        except Exception as error:  # noqa: BLE001 - becomes the verdict
            self.verdict, self._done = f"not verified: the reference raised {first_line(error)}", True
            states.restore()
            return call(inputs)
        states.restore()
        outputs = list(call(inputs))
        self._done = True
        if self._exact:
            mine = self._results(expected, own)
            unsteady = differences(self._results(repeated, again), mine)
            different = [index for index in differences(self._results(outputs, kept), mine) if index not in unsteady]
            if not different:
                but = f", but for {len(unsteady)} in which two runs of eager differ" if unsteady else ""
                self.verdict = f"verified: eager's results in every bit{but}"
                return outputs
            self._fail(different[0], "is not eager's in every bit", "other bits", "eager's bits", eager)
            return self._eagers(kept, expected, own)
        found, mine, true = self._results(outputs, kept), self._results(expected, own), self._results(exact, wide)
        try:
            judged = judge(found, mine, true)
        except Exception as error:  # noqa: BLE001 - becomes the verdict
            self.verdict = f"not verified: the results could not be compared: {first_line(error)}"
            return outputs
        if judged.worst is None:
            wide = str(dtype).removeprefix("torch.")
            self.verdict = f"verified against {wide}: error {judged.error:.1e}, eager's {judged.own:.1e}"
            return outputs
        seen, allowed = f"error {judged.error:.1e}, eager's {judged.own:.1e}", f"at most {judged.allowed:.1e}"
        sentence = f"is farther from {self.context.policy.reference} than eager's"
        self._fail(judged.worst, sentence, seen, allowed, eager)
        return self._eagers(kept, expected, own)

    @property
    def _exact(self) -> bool:
        return self.context.policy.numerics == "eager"

    def _results(self, results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """What a call returned, and what it wrote to."""
        return [*results, *(arguments[index] for index in sorted(self._changed))]

    def _eagers(self, kept: list[Any], expected: list[Any], own: list[Any]) -> list[Any]:
        for index in self._changed:
            kept[index].copy_(own[index])
        return expected

    def _eager_lowering(self) -> Executable:
        with self._lock:
            if self._eager is None:
                self._eager = (self.build or self._lowered)()
            return self._eager

    def _lowered(self) -> Executable:
        return EagerLowering().lower(put_references(copy_module(self.module)), self.inputs, self.context)

    def _fail(self, worst: int | None, sentence: str, observed: str, needed: str, eager: Executable) -> None:
        context = self.context
        output = next(iter(reversed(self.module.graph.nodes)))
        results = output.all_input_nodes
        node = results[worst] if worst is not None and worst < len(results) else None
        reason = Reason(
            code="verification_failed",
            by=self.lowering,
            sentence=f"result {worst} {sentence}",
            observed=observed,
            needed=needed,
            node=f"{node.name} ({op_name(node)})" if isinstance(node, Node) else "",
            lever="report the error; to see it raised, set options={'on_error': 'raise'}",
        )
        if context.policy.on_error == "raise":
            raise LoweringError(f"{self.subgraph} is wrong on {self.lowering}: {reason}")
        with self._lock:
            first, self._replaced = self._replaced is None, eager.call
        if not first:
            return
        self.verdict = f"wrong: {reason.sentence}"
        with harmless("what computed something wrong"):
            reason = self.on_wrong(reason)
        record_step_down(
            context.timeline, context.where(self.subgraph), self.lowering, "eager", reason, ran=eager.attest()
        )


def _changed_inputs(module: GraphModule) -> frozenset[int]:
    """Which inputs the graph writes to."""
    inputs = {node: index for index, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = (target for node in module.graph.nodes for target in write_targets(node))
    return frozenset(inputs[target] for target in written if target in inputs)
