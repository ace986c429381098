"""Verification: what a subgraph computes on real inputs, compared with eager in a higher precision.

A result is judged by eager's own error: half precision is allowed what eager loses in it, and float32 what the order of
its sums costs. `torch._dynamo.utils.same` judges alike; here the errors are kept, because the audit shows them.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import boxed, copy_module
from omnicomp._torch.writes import write_targets
from omnicomp.errors import LoweringError
from omnicomp.graphs import op_name
from omnicomp.localize import first_line
from omnicomp.lowerings import Executable, LoweringContext
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.retreat import Boxed, draws_random_numbers
from omnicomp.timeline import Attempt, Ran, Reason, Retreat

__all__ = ["Verifier", "in_precision"]

_DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64}
# How much farther off than eager a result may be: kernels sum in another order, which may be a less lucky one.
_FACTOR: Final = 4.0
# And by how many roundings of its dtype, where eager's result is nearly exact.
_ROUNDINGS: Final = 16.0


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
    """Compares the calls of one executable with eager.

    Attributes:
        module: the subgraph before anything was rewritten in it; read, not changed.
        inputs: fake tensors and symbolic sizes of it.
        context: where it belongs.
        subgraph: its id.
        lowering: of the executable.
    """

    module: GraphModule
    inputs: Sequence[Any]
    context: LoweringContext
    subgraph: str
    lowering: str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
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
        if node is not None:
            self.verdict, self._done = f"not verified: {op_name(node)} draws other numbers in eager", True
            return call(inputs)
        dtype, kept = _DTYPES[self.context.policy.reference], list(inputs)
        own = [_copy(value) if index in self._changed else value for index, value in enumerate(inputs)]
        wide = [_copy(value, dtype) for value in inputs]
        try:
            eager = self._eager_lowering()
            expected = list(eager.call(list(own)))
            exact = list(boxed(in_precision(self.module, dtype))(list(wide)))
        except Exception as error:  # noqa: BLE001 - becomes the verdict
            self.verdict, self._done = f"not verified: the reference raised {first_line(error)}", True
            return call(inputs)
        outputs = list(call(inputs))
        changed = sorted(self._changed)
        found = [*outputs, *(kept[index] for index in changed)]
        judged = _judge(
            found, [*expected, *(own[index] for index in changed)], [*exact, *(wide[index] for index in changed)]
        )
        self._done = True
        if judged.worst is None:
            self.verdict = f"verified: error {judged.error:.1e}, eager's {judged.own:.1e}"
            return outputs
        self._fail(judged, eager)
        for index in changed:
            kept[index].copy_(own[index])
        return expected

    def _eager_lowering(self) -> Executable:
        with self._lock:
            if self._eager is None:
                self._eager = EagerLowering().lower(copy_module(self.module), self.inputs, self.context)
            return self._eager

    def _fail(self, judged: "_Judged", eager: Executable) -> None:
        context = self.context
        output = next(iter(reversed(self.module.graph.nodes)))
        results = output.all_input_nodes
        node = results[judged.worst] if judged.worst is not None and judged.worst < len(results) else None
        reason = Reason(
            code="verification_failed",
            by=self.lowering,
            sentence=f"result {judged.worst} is farther from {context.policy.reference} than eager's",
            observed=f"error {judged.error:.1e}, eager's {judged.own:.1e}",
            needed=f"at most {judged.allowed:.1e}",
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
        where: dict[str, Any] = {"graph": context.graph_id, "part": context.part, "subgraph": self.subgraph}
        append = context.timeline.append
        append(Retreat(**where, source_lowering=self.lowering, target_lowering="eager", reason=reason))
        append(Attempt(**where, lowering=self.lowering, ok=False, reason=reason))
        append(Attempt(**where, lowering="eager", ok=True, selected=True))
        evidence, kernels = eager.attest()
        append(Ran(**where, lowering="eager", evidence=evidence, kernels=kernels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Judged:
    """The largest error of a result, eager's of the same, what was allowed, and the index of a result that is wrong."""

    error: float
    own: float
    allowed: float
    worst: int | None


def _judge(found: Sequence[Any], expected: Sequence[Any], exact: Sequence[Any]) -> _Judged:
    worst = _Judged(error=0.0, own=0.0, allowed=0.0, worst=None)
    for index, (got, own, true) in enumerate(zip(found, expected, exact, strict=True)):
        if not isinstance(got, torch.Tensor) or not isinstance(own, torch.Tensor):
            continue
        if got.shape != own.shape or got.dtype != own.dtype:
            return _Judged(error=float("inf"), own=0.0, allowed=0.0, worst=index)
        if not (got.is_floating_point() or got.is_complex()) or not got.numel():
            # Rounding may decide an index or a comparison otherwise; where eager and the reference agree it may not.
            certain = own == true.to(own.dtype)
            if bool((certain & (got != own)).any()):
                return _Judged(error=float("inf"), own=0.0, allowed=0.0, worst=index)
            continue
        error, own_error = _error(got, true), _error(own, true)
        allowed = _FACTOR * own_error + _ROUNDINGS * torch.finfo(got.dtype).eps
        if not error <= allowed and not torch.equal(got.nan_to_num(), own.nan_to_num()):
            return _Judged(error=error, own=own_error, allowed=allowed, worst=index)
        if error > worst.error:
            worst = _Judged(error=error, own=own_error, allowed=allowed, worst=None)
    return worst


def _error(value: torch.Tensor, true: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite where one is no number, or infinite, and one is."""
    wide = torch.complex128 if value.is_complex() else torch.float64
    value, true = value.detach().to(wide), true.detach().to(wide)
    finite = true.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return float("inf")
    difference = torch.where(finite, value - true, 0).norm()
    return float(difference / torch.where(finite, true, 0).norm().clamp_min(torch.finfo(torch.float32).tiny))


def _changed_inputs(module: GraphModule) -> frozenset[int]:
    """Which inputs the graph writes to."""
    inputs = {node: index for index, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = (target for node in module.graph.nodes for target in write_targets(node))
    return frozenset(inputs[target] for target in written if target in inputs)


def _copy(value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.clone() if dtype is None or not value.is_floating_point() else value.to(dtype, copy=True)
