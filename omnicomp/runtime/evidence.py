"""Evidence from the first call of an executable: the code that ran, the overrides that were called, their errors.

A description by the executable itself is a claim. It is compared with what the interpreter and operators show: the file
of the code object that was entered, and the calls of the overrides' operators. Those calls are where an override is
compared with its reference, on the arguments of a real call. Later calls are not observed.
"""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from omnicomp.analysis.accuracy import PRECISIONS
from omnicomp.analysis.hashes import size_class
from omnicomp.errors import LoweringError
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.override import PlannedCall
from omnicomp.lowerings.overrides.trust import classify, distrust, distrusted, is_trusted, trust
from omnicomp.timeline import Reason, Verification
from omnicomp.timeline.recorder import record_step_down

if TYPE_CHECKING:
    from omnicomp.runtime.override_check import Trial

Boxed = Callable[[list[Any]], Sequence[Any]]

_GENERATED: Final = "<eval_with_key>"  # what FX generates
_REPLACED: Final = "its reference, in place of the override"
_local: Final = threading.local()


class Rejected(BaseException):
    """A forward is abandoned because the backward that would follow is wrong; raised only inside `rejectable`.

    It is no `Exception`: those lead to the next lowering of the same part, with the same backward.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.sentence)
        self.reason = reason


@contextlib.contextmanager
def rejectable() -> Generator[None]:
    """Inside, a call of this thread may raise `Rejected`."""
    before = getattr(_local, "rejectable", False)
    _local.rejectable = True
    try:
        yield
    finally:
        _local.rejectable = before


class FirstCallObserver:
    """Observes the first call of one executable."""

    def __init__(
        self,
        context: LoweringContext,
        claim: str,
        calls: Sequence[PlannedCall] = (),
        *,
        path: str = "",
        repeatable: bool = True,
    ) -> None:
        """Prepare; nothing happens before the first call.

        Args:
            context: where the executable belongs.
            claim: the lowering that it was built by.
            calls: the calls of overrides in it, in program order.
            path: the Python module that Inductor generated for it, if it did.
            repeatable: whether the part has no effect when it is abandoned half-way.
        """
        self._context, self._claim, self._path, self._repeatable = context, claim, path, repeatable
        self._calls: dict[Any, list[PlannedCall]] = {}
        for call in calls:
            self._calls.setdefault(call.operator, []).append(call)
        self._open = threading.local()  # calls of this thread's first call that were not made yet
        self.counts: Counter[Any] = Counter()
        self.notes: dict[str, str] = {}
        self.replaced: dict[str, Reason] = {}
        self._code = ""
        self.watched = False
        self._sizes: tuple[int, ...] = ()
        self._seen: set[tuple[str, ...]] = set()

    def first(self, call: Boxed, inputs: list[Any]) -> Sequence[Any]:
        """Call an executable and observe it."""
        self._sizes = tuple(index for index, value in enumerate(inputs) if type(value) is int)
        self._seen.add(self._size_class(inputs))
        with self._watching():
            outputs = self._listening(call, inputs)
        if self._claim == "inductor" and not self._path and not self.counts and not self.replaced:
            for planned in (each for calls in self._calls.values() for each in calls):
                self._record(planned, "unknown", "it is called from C++, where nothing can listen")
        return outputs

    def later(self, call: Boxed) -> Boxed:
        """The callable from the second call on: `call` itself, if it holds no override.

        With one it is called directly unless the override was found wrong, or sizes of another class come in.
        """
        if not self._calls:
            return call

        def run(inputs: list[Any]) -> Sequence[Any]:
            if not self.replaced:
                if not self._sizes:
                    return call(inputs)
                case = self._size_class(inputs)
                if case in self._seen:
                    return call(inputs)
                self._seen.add(case)
            return self._listening(call, inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def after_first(self, call: Boxed) -> Boxed:
        """The same, after the first call, when it is known whether anything was replaced."""
        return self.later(call) if self.replaced or self._sizes else call

    @property
    def ran(self) -> str:
        """The lowering that ran in the first call: the claim, unless the evidence contradicts it."""
        if self._claim == "override" and self.replaced:
            return "eager"
        if not self.watched:
            return self._claim
        if self._claim == "override":
            called = sum(self.counts.values()) >= sum(map(len, self._calls.values()))
            return "override" if called else "eager" if self._code else "unknown"
        if self._claim not in ("device", "inductor", "eager"):
            return self._claim  # an engine, whose executable is called by `omnicomp.lowerings.engines.program`
        if self._claim == "device":
            # Its program is not ours to know; but the code of an FX graph runs operator by operator.
            return "eager" if self._code == _GENERATED else self._claim
        if self._claim == "inductor":
            return "inductor" if self._code == self._path else "eager" if self._code == _GENERATED else "unknown"
        return "eager" if self._code == _GENERATED else "unknown"

    @property
    def evidence(self) -> str:
        """The evidence, if it contradicts the claim; else an empty text."""
        if self.replaced and self._claim == "override":
            return _REPLACED
        if self.ran != self._claim:
            seen = {"": "no generated code at all", _GENERATED: "the code of an FX graph"}.get(self._code, self._code)
            return f"it says {self._claim}, and the first call ran {seen}"
        return ""

    def calls_of(self, operators: Collection[str]) -> int:
        """How often operators of these names were called."""
        return sum(count for operator, count in self.counts.items() if str(operator) in operators)

    def was_replaced(self, subgraph: str) -> bool:
        """Whether a call of an override went to its reference."""
        return self.notes.get(subgraph) == _REPLACED

    def _size_class(self, inputs: list[Any]) -> tuple[str, ...]:
        return tuple([size_class(inputs[index]) for index in self._sizes])

    @contextlib.contextmanager
    def _watching(self) -> Generator[None]:
        """Inside, note the first code object that identifies the executable, unless this thread is profiled already."""
        # Named by a hash of its content; without caches it is loaded from a folder that is gone by then.
        wanted = Path(self._path).name if self._claim == "inductor" else _GENERATED
        if sys.getprofile() is not None or not wanted:
            yield
            return

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                name = frame.f_code.co_filename
                if name.endswith(wanted) and Path(name).name == wanted:
                    self._code = self._path
                elif name.startswith(_GENERATED) and not self._code:
                    self._code = _GENERATED
                if self._code and self._code in (self._path, wanted):
                    sys.setprofile(None)

        self.watched = True
        sys.setprofile(profile)
        try:
            yield
        finally:
            if sys.getprofile() is profile:
                sys.setprofile(None)

    def _listening(self, call: Boxed, inputs: list[Any]) -> Sequence[Any]:
        if not self._calls:
            return call(inputs)
        self._open.calls = {operator: list(planned) for operator, planned in self._calls.items()}
        from omnicomp._torch.autograd.call_hooks import tapped

        with tapped(list(self._calls), self._hear):
            return call(inputs)

    def _hear(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        from omnicomp.runtime.override_check import devices_of

        # A loop may make more calls than there are in the graph.
        expected: list[PlannedCall] = self._open.calls[operator]
        this = expected.pop(0) if expected else self._calls[operator][-1]
        policy = self._context.policy
        devices = devices_of((args, kwargs))
        if this.truth is not None and this.item.name in self.replaced:
            # Also while a CUDA graph is recorded: all later calls replay the recorded call.
            self._replace(this, self.replaced[this.item.name])
            return this.truth(*args, **kwargs)
        if policy.verify == "off" or not devices or _is_recording(devices):
            self.counts[operator] += 1
            return call(*args, **kwargs)
        known = distrusted(this.item, devices[0], stored=self._stored)
        if known is not None and this.truth is not None:
            self._replace(this, known)
            return this.truth(*args, **kwargs)
        self.counts[operator] += 1
        case = f"{classify((args, kwargs))} {self._context.part} {this.text}"
        if not self._may_reject(this):
            case += " values only"  # its gradients are not seen here
        if is_trusted(this.item, case, devices[0], stored=self._stored):
            self._record(this, "known", "right, as found before")
            return call(*args, **kwargs)
        if this.truth is None:
            self._record(this, "unknown", "what it replaced is not known")
            return call(*args, **kwargs)
        return self._verify(this, case, args, kwargs, call)

    @property
    def _stored(self) -> bool:
        return self._context.policy.verdicts == "use"

    def _verify(
        self, this: PlannedCall, case: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]
    ) -> Any:
        from omnicomp.runtime.override_check import Trial, devices_of, try_forward

        precision, item = PRECISIONS[self._context.policy.reference], this.item
        device, start = devices_of((args, kwargs))[0], time.perf_counter()
        trial = Trial(state="unknown", detail="")
        for other in self._alternatives(this):
            assert other.truth is not None
            trial = try_forward(item, other.truth, call, args, kwargs, precision)
            if trial.state != "wrong" or item.mutates:
                if other is not this:
                    self._open.calls[this.operator].remove(other)
                    self._open.calls[this.operator].insert(0, this)
                    this = other
                break
        note = self._backward(this, trial, args, kwargs, call, precision)
        if trial.state == "wrong":
            reason = self._reason(this, trial, args, kwargs)
            self._record(this, "wrong", trial.detail, start)
            self.counts[this.operator] -= 1
            self._give_up(this, reason, device)
            self._replace(this, reason)
        else:
            kept = trust(item, case, device, stored=self._stored) if trial.state == "right" else ""
            self._record(this, trial.state, "; ".join(filter(None, (trial.detail, note, kept))), start)
        return trial.results

    def _alternatives(self, this: PlannedCall) -> list[PlannedCall]:
        """The planned calls that a call may be: Inductor may reorder calls of operators, and makes each once."""
        found = {other.text: other for other in self._open.calls[this.operator] if other.truth is not None}
        return [this, *(other for text, other in found.items() if text != this.text)]

    def _backward(
        self,
        this: PlannedCall,
        trial: "Trial",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        precision: torch.dtype,
    ) -> str:
        """Verify the override's own derivative; returns why it could not be verified."""
        if trial.state != "right" or self._context.part != "forward" or not this.differentiable:
            return ""
        if not self._may_reject(this):
            return "its backward is not verified, as this forward could not be given up"
        assert this.truth is not None
        start = time.perf_counter()
        from omnicomp.runtime.override_check import devices_of, try_backward

        found = try_backward(this.differentiable, this.item, this.truth, call, args, kwargs, precision)
        if found.state == "unknown":
            return f"its backward is not verified: {found.detail}"
        self._record(this, found.state, found.detail, start, direction="backward")
        if found.state == "wrong":
            reason = self._reason(this, found, args, kwargs)
            self._give_up(this, reason, devices_of((args, kwargs))[0])
            raise Rejected(reason)
        return ""

    def _may_reject(self, this: PlannedCall) -> bool:
        return self._repeatable and not this.item.mutates and getattr(_local, "rejectable", False)

    def _reason(self, this: PlannedCall, trial: "Trial", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason:
        far = f"is farther from {self._context.policy.reference} than its reference"
        what = "has a backward that raises" if trial.raised else far
        return Reason(
            code="verification_failed",
            by=this.item.name,
            sentence=f"the override {this.item.name} {what} for {classify((args, kwargs))}",
            observed=trial.detail,
            needed=trial.needed,
            lever="repair the override, or leave it out with options={'disable_overrides': [...]}",
        )

    def _give_up(self, this: PlannedCall, reason: Reason, device: torch.device) -> None:
        if self._context.policy.on_error == "raise":
            raise LoweringError(f"{this.subgraph}: {reason}")
        problem = distrust(this.item, device, reason, stored=self._stored)
        if problem:
            self.notes[this.item.name] = problem

    def _replace(self, this: PlannedCall, reason: Reason) -> None:
        """Record, once, that the calls of an override go to its reference from now on."""
        self.replaced[this.item.name] = reason
        if self.notes.get(this.subgraph) == _REPLACED:
            return
        self.notes[this.subgraph] = _REPLACED
        context = self._context
        record_step_down(context.timeline, context.where(this.subgraph), "override", "eager", reason)

    def _record(
        self, this: PlannedCall, state: str, detail: str, start: float | None = None, *, direction: str = "forward"
    ) -> None:
        context = self._context
        self.notes.setdefault(this.subgraph, f"verified: {detail}" if state in ("right", "known") else detail)
        context.timeline.append(
            Verification(
                graph=context.graph_id,
                part=context.part,
                subgraph=this.subgraph,
                name=this.item.name,
                state=state,
                direction=direction,
                detail=detail,
                seconds=0.0 if start is None else time.perf_counter() - start,
            )
        )


def _is_recording(devices: Sequence[torch.device]) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be read."""
    return any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing()
