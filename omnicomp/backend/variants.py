"""Two variants of one graph, and the choice between them at each call.

The *assumed* variant is right only where the assumptions hold; the *general* one always. Whichever the first call
needs is compiled while Dynamo compiles, the other when a call needs it. What Dynamo gets is one callable.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omnicomp._torch.dynamo import control_flow, late_compile
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import graph_compiler, record_eager
from omnicomp.backend.saved import State, state_of
from omnicomp.errors import Once, first_line
from omnicomp.passes.assumptions import Assumption
from omnicomp.privacy import logger
from omnicomp.timeline import Reason, Speculation, Timeline, current

__all__ = ["ASSUMED", "GENERAL", "PATIENCE", "Checks", "Memo", "Variant", "Variants", "within_sizes"]

log = logger("omnicomp")

ASSUMED: Final = "assumed"
GENERAL: Final = "general"

PATIENCE: Final = 3
"""After so many calls of which none was as assumed, nothing is checked any more."""


class Memo:
    """The last result of the checks, valid while the checked tensors are the same objects and were not written to.

    A write that torch does not count (through `.data`, by a kernel of the user's, by the replay of a CUDA graph that
    the user recorded) is not seen; neither would autograd see it. On the CPU, where arrays share memory with tensors
    and a check costs no wait, nothing is remembered.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[tuple[Any, ...], ...], bool] | None = None

    def recall(self, values: Sequence[Any]) -> bool | None:
        """The result for these very tensors, or None if it is not known."""
        last = self._last
        if last is None or len(last[0]) != len(values):
            return None
        same = all(_is_same(known, value) for known, value in zip(last[0], values, strict=True))
        return last[1] if same else None

    def keep(self, values: Sequence[Any], verdict: bool) -> None:
        """Remember a result, unless a tensor is on the CPU or has no version counter (inference mode)."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(value.is_inference() for value in tensors) or all(value.is_cpu for value in tensors):
            self._last = None
        else:
            self._last = (tuple(map(_identity, values)), verdict)


def _identity(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (None, value)
    return (weakref.ref(value), value._version, value.data_ptr(), value.shape)


def _is_same(known: tuple[Any, ...], value: Any) -> bool:
    if known[0] is None:
        return bool(known[1] == value)
    return known[0]() is value and known[1:] == (value._version, value.data_ptr(), value.shape)


class Checks:
    """The checks of all assumptions on the inputs of a call."""

    def __init__(self, assumptions: Sequence[Assumption], placeholders: Sequence[str]) -> None:
        """Bind the assumptions to the placeholders of their graph.

        Args:
            assumptions: at least one.
            placeholders: the names of the graph's placeholders, in order.
        """
        self.assumptions, self.placeholders = tuple(assumptions), tuple(placeholders)
        self._positions = sorted({placeholders.index(name) for item in assumptions for name in item.inputs})
        self._checks = [
            (item.check.forward, [self._positions.index(placeholders.index(name)) for name in item.inputs])
            for item in assumptions
        ]
        self._memo = Memo()

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Those of the graph's inputs that the checks read."""
        return [args[position] for position in self._positions]

    def hold(self, args: Sequence[Any]) -> bool:
        """Check; on an accelerator this waits for the device, unless the same tensors were checked just before.

        Raises:
            Exception: whatever a check raises.
        """
        values = [args[position] for position in self._positions]
        known = self._memo.recall(values)
        if known is not None:
            return known
        with torch.no_grad():
            verdict = all(bool(check(*[values[i] for i in wanted])) for check, wanted in self._checks)
        self._memo.keep(values, verdict)
        return verdict


@dataclasses.dataclass(kw_only=True)
class Variant:
    """One variant.

    Attributes:
        name: `assumed` or `general`.
        graph: id of its events in the timeline.
        build: compiles it; the argument is whether Dynamo's own compilation of it is over.
        call: the compiled function, or None.
    """

    name: str
    graph: str
    build: Callable[[bool], Callable[..., Any]] | None
    call: Callable[..., Any] | None = None


class Variants:
    """The callable that Dynamo gets: runs the checks, and calls the variant that is right for the inputs."""

    def __init__(
        self,
        *,
        checks: Checks,
        assumed: Variant,
        general: Variant,
        eager: Callable[..., Any],
        timeline: Timeline,
        on_cuda: bool,
    ) -> None:
        """Set up the choice; nothing is compiled yet.

        Args:
            checks: what decides.
            assumed: the variant for inputs that pass.
            general: the variant for all.
            eager: the graph itself, for a call in which nothing can be compiled.
            timeline: gets the events.
            on_cuda: whether an input is on a CUDA device.
        """
        self._checks, self._assumed, self._general, self._eager = checks, assumed, general, eager
        self._timeline, self._on_cuda = timeline, on_cuda
        self._stopped = self._held = False
        self._failures = 0
        self._say_held = Once(lambda: self._record("held", ASSUMED))
        self._say_failed = Once(lambda: self._record("failed", GENERAL))
        self._say_capture = Once(self._record_capture)
        for item in checks.assumptions:
            self._record("assumed", ASSUMED, item)

    def compile_first(self, inputs: Sequence[Any]) -> None:
        """Compile the variant that the first call will need; called while Dynamo compiles.

        Args:
            inputs: what Dynamo passed to the backend; if it passed fake tensors, the assumed variant is compiled.

        Raises:
            Exception: whatever the compilation raises.
        """
        variant = self._assumed
        if not any(map(late_compile.is_fake, self._checks.inputs(inputs))):
            variant = self._choose([late_compile.hinted(value) for value in inputs])
        self._compiled(variant, after_dynamo=False)

    def compile_all(self) -> None:
        """Compile what was not compiled yet, for a graph that may be saved; called while Dynamo compiles."""
        for variant in (self._assumed, self._general):
            self._compiled(variant, after_dynamo=True)

    def saved_state(self) -> State:
        """What it is restored from: the checks, and both variants."""
        calls = self._assumed.call, self._general.call
        if calls[0] is None or calls[1] is None:
            raise ValueError("one of its variants is not compiled; compile with options={'speculate': False}")
        return _SavedVariants(
            assumptions=tuple(item.as_text() for item in self._checks.assumptions),
            placeholders=self._checks.placeholders,
            assumed=state_of(calls[0]),
            general=state_of(calls[1]),
            on_cuda=self._on_cuda,
        )

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        variant = self._choose(args)
        call = variant.call
        if call is None:
            if self._capturing():
                self._say_capture()
                return self._eager(*args)
            call = self._compiled(variant, after_dynamo=True)
        result = call(*args)
        if not self._stopped:
            self._note(variant)
        return result

    def _choose(self, args: Sequence[Any]) -> Variant:
        if self._stopped or self._capturing():
            # What is captured is replayed with other values in the same tensors.
            return self._general
        try:
            return self._assumed if self._checks.hold(args) else self._general
        except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline, and the general variant is right
            reason = Reason(
                code="check_failed",
                by="speculation",
                sentence=f"the check raised, and the general variant is taken from now on: {first_line(error)}",
                observed=type(error).__name__,
                lever="switch it off with options={'speculate': False}, and report the error",
            )
            self._stop(reason)
            return self._general

    def _capturing(self) -> bool:
        return self._on_cuda and torch.cuda.is_current_stream_capturing()

    def _note(self, variant: Variant) -> None:
        """Record an outcome the first time that it is seen, and stop checking an assumption that never holds."""
        if variant is self._assumed:
            self._held = True
            self._say_held()
            return
        if self._capturing():
            return
        self._say_failed()
        self._failures += 1
        if self._failures >= PATIENCE and not self._held:
            reason = Reason(
                code="assumption_failed",
                by="speculation",
                sentence=f"none of the first {PATIENCE} calls was as assumed: the general variant is taken from now on",
                lever="pass no mask, or a full one, where nothing is padded",
            )
            self._stop(reason)

    def _stop(self, reason: Reason) -> None:
        with control_flow.compile_lock:
            if self._stopped:
                return
            self._stopped = True
            self._assumed.build = None  # it holds a copy of the graph
            self._record("stopped", GENERAL, reason=reason)

    def _compiled(self, variant: Variant, *, after_dynamo: bool) -> Callable[..., Any]:
        with control_flow.compile_lock, control_flow.unseen_by_hooks():
            if variant.call is None:
                if variant.build is None:  # another thread gave up on it after this one chose it
                    return self._compiled(self._general, after_dynamo=after_dynamo)
                variant.call = variant.build(after_dynamo)
                variant.build = None
                self._record("compiled", variant.name)
            return variant.call

    def _record_capture(self) -> None:
        reason = Reason(
            code="assumption_failed",
            by="speculation",
            sentence="a CUDA graph is captured before the general variant was compiled: the graph runs eager there",
            lever="capture with options={'speculate': False}, or call once before with a mask that is not full",
        )
        self._record("captured", GENERAL, reason=reason)

    def _record(self, state: str, variant: str, item: Assumption | None = None, reason: Reason | None = None) -> None:
        sentence = item.sentence if item else "; ".join(each.sentence for each in self._checks.assumptions)
        log.info("omni: %s: %s: %s (%s variant)", self._assumed.graph, sentence, state, variant)
        self._timeline.append(
            Speculation(
                graph=self._assumed.graph,
                state=state,
                variant=variant,
                sentence=sentence,
                inputs=item.inputs if item else (),
                saves=item.saves if item else "",
                source=item.source if item else "",
                reason=reason,
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedVariants(State):
    assumptions: tuple[Assumption, ...]
    placeholders: tuple[str, ...]
    assumed: State
    general: State
    on_cuda: bool

    def restore(self, id: str) -> Callable[..., Any]:
        other = f"{id}:{GENERAL}"
        assumed, general = self.assumed.restore(id), self.general.restore(other)
        return Variants(
            checks=Checks(self.assumptions, self.placeholders),
            assumed=Variant(name=ASSUMED, graph=id, build=None, call=assumed),
            general=Variant(name=GENERAL, graph=other, build=None, call=general),
            eager=general,
            timeline=current(),
            on_cuda=self.on_cuda,
        ).__call__


def within_sizes(
    compiled: Callable[..., Any], eager: Callable[..., Any], sizes: late_compile.SizeGuards, graph: CapturedGraph
) -> Callable[..., Any]:
    """Call the compiled graph for the sizes that it is right for, and the graph itself for other sizes."""
    reason = Reason(
        code="capture_failed",
        by="speculation",
        sentence="a variant that was compiled late is right for some sizes only, and a call had others: they run eager",
        needed=sizes.text,
        lever="switch it off with options={'speculate': False}",
    )
    retreat = Once(lambda: record_eager(graph.id, graph_compiler(graph), reason)())

    def call(*args: Any) -> Any:
        if sizes.holds is not None and sizes.holds(args):
            return compiled(*args)
        retreat()
        return eager(*args)

    return call
