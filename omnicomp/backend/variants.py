"""Variants of one graph, and the choice between them at each call.

An *assumed* variant is right only where what was assumed of the inputs holds: a condition, or the classes of masks.
The *general* one is right always. Whichever the first call needs is compiled while Dynamo compiles, others when a call
needs them. What Dynamo gets is one callable.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from omnicomp._torch.autograd.compiled_function import saves_are_hooked
from omnicomp._torch.dynamo import control_flow, late_compile
from omnicomp.analysis.random_state import generator_states
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.retreat import graph_compiler, record_eager
from omnicomp.backend.saved import State, state_of
from omnicomp.errors import Once, first_line
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.mask_classes import GENERAL as ANY_MASK
from omnicomp.passes.mask_classes import MaskClass, shown, unusable, usual_name
from omnicomp.passes.verdicts import Checker, Look, Memo
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Reason, Speculation, Timeline, current

log = logger("omnicomp")

ASSUMED: Final = "assumed"
GENERAL: Final = "general"

PATIENCE: Final = 3
"""After so many calls of which none was as assumed, nothing is checked any more."""

# From so many calls of a variant on it is recorded how many there were, whenever there are twice as many.
_MANY_CALLS: Final = 8

MOST_VARIANTS: Final = 4
"""How many assumed variants of a graph are compiled at most; other cases are for the general one."""

Case = tuple[MaskClass | None, ...]
"""What a variant assumes: for each assumption the class of the mask, or None where it is a condition that holds."""


class Checks:
    """The checks of all assumptions on the inputs of a call."""

    def __init__(self, assumptions: Sequence[Assumption], placeholders: Sequence[str]) -> None:
        """Bind the assumptions to the placeholders of their graph."""
        self.assumptions, self.placeholders = tuple(assumptions), tuple(placeholders)
        self._positions = sorted({placeholders.index(name) for item in assumptions for name in item.inputs})
        self._wanted = [
            [self._positions.index(placeholders.index(name)) for name in item.inputs] for item in assumptions
        ]
        self._constants = [constant for item in assumptions for constant in item.constants]
        self._checker = Checker(assumptions)

    @property
    def assumed(self) -> Case | None:
        """The case that the assumptions were made for; None if they leave nothing that is assumed."""
        return _case([item.holds if item.accepts else True for item in self.assumptions])

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """Those of the graph's inputs that the checks read."""
        return [args[position] for position in self._positions]

    def memo(self) -> Memo:
        """A memory of what was found for the inputs of the last call."""
        return Memo(self._positions, self._constants)

    def begin(self, args: Sequence[Any]) -> Look:
        """Recall what is known of the inputs of a call.

        On an accelerator, the verdicts wait for the device, unless those on these tensors are known.
        """
        values = self.inputs(args)
        return self._checker.begin([[values[i] for i in wanted] for wanted in self._wanted])

    def names(self, args: Sequence[Any], case: Case | None) -> list[str]:
        """What people call the masks of a call, where the classes of a case do not say all of them; else empty texts.

        Raises:
            Exception: whatever a check raises.
        """
        values = self.inputs(args)
        found: list[str] = []
        for index, (item, wanted) in enumerate(zip(self.assumptions, self._wanted, strict=True)):
            known = case[index] if case else None
            if not item.accepts or (known is not None and known.is_known):
                found.append("")
                continue
            with torch.no_grad():
                visible, other = shown(item.check.forward(*[values[i] for i in wanted]))
                name = usual_name(visible)
                if other is not None and bool(other):
                    name = f"{name}, by numbers that may not hide a key" if name else "a bias"
                found.append(name)
        return found


def _case(verdicts: Sequence[bool | MaskClass | None]) -> Case | None:
    if any(verdict is False for verdict in verdicts) or all(verdict == ANY_MASK for verdict in verdicts):
        return None
    return tuple(verdict if isinstance(verdict, MaskClass) else None for verdict in verdicts)


@dataclasses.dataclass(kw_only=True)
class Variant:
    """One variant."""

    name: str  # `assumed`, `assumed2` and so on, or `general`
    graph: str  # id of its events in the timeline
    # Compiles it; the argument is whether Dynamo's own compilation of it is over.
    build: Callable[[bool], Callable[..., Any]] | None
    call: Callable[..., Any] | None = None  # the compiled function, or None
    calls: int = 0  # how many had it
    noted: int = 1  # something is recorded in its call of this number
    # The compiled function for where Dynamo traces nothing anyway; None before the first call.
    run: Callable[..., Any] | None = None


class Variants:
    """The callable that Dynamo gets: runs the checks, and calls the variant that is right for the inputs."""

    def __init__(
        self,
        *,
        checks: Checks,
        assumed: Mapping[Case, Variant],
        general: Variant,
        eager: Callable[..., Any],
        timeline: Timeline,
        on_cuda: bool,
        graph: str,
        another: Callable[[Case, int], Variant] | None = None,
        repeatable: bool = False,
    ) -> None:
        """Set up the choice; nothing is compiled yet.

        Args:
            checks: what decides.
            assumed: the variants for inputs that pass, by case.
            general: the variant for all.
            eager: the graph itself, for a call in which nothing can be compiled.
            timeline: gets the events.
            on_cuda: whether an input is on a CUDA device.
            graph: the id of the graph.
            another: makes the variant for one more case, given its number; None if there are to be no more.
            repeatable: whether a call leaves nothing behind but its results and random numbers that it drew.
        """
        self._checks, self._assumed, self._general, self._eager = checks, dict(assumed), general, eager
        self._timeline, self._on_cuda, self._graph, self._another = timeline, on_cuda, graph, another
        self._repeatable, self._memo = repeatable, checks.memo()
        self._order: Callable[[Case, Sequence[Any]], None] | None = None
        self._stopped = self._held = self._told_slower = False
        self._failures = 0
        self._say_capture = Once(self._record_capture)
        for item in checks.assumptions:
            self._record("assumed", ASSUMED, item)

    def compile_first(self, inputs: Sequence[Any]) -> None:
        """Compile the variant that the first call will need; called while Dynamo compiles.

        Args:
            inputs: what Dynamo passed to the backend; if it passed fake tensors, a variant that is assumed is compiled.

        Raises:
            Exception: whatever the compilation raises.
        """
        if any(map(late_compile.is_fake, self._checks.inputs(inputs))):
            variant = self._variant(self._checks.assumed)
        else:
            values = [late_compile.hinted(value) for value in inputs]
            look = self._begun(values)
            variant = self._general if look is None else self._found(look, values)
        self._compiled(variant, after_dynamo=False)

    def compile_all(self) -> None:
        """Compile what was not compiled yet, for a graph that may be saved; called while Dynamo compiles."""
        for variant in (*self._assumed.values(), self._general):
            self._compiled(variant, after_dynamo=True)
        self._another = None

    def saved_state(self) -> State:
        """What it is restored from: the checks, and all variants."""
        calls = {case: variant.call for case, variant in self._assumed.items()}
        if self._general.call is None or any(call is None for call in calls.values()):
            raise ValueError("one of its variants is not compiled; compile with options={'speculate': False}")
        return SavedVariants(
            assumptions=tuple(item.as_text() for item in self._checks.assumptions),
            placeholders=self._checks.placeholders,
            assumed=tuple((case, state_of(call)) for case, call in calls.items() if call is not None),
            general=state_of(self._general.call),
            on_cuda=self._on_cuda,
        )

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        variant: Variant | None = self._memo.recall(args)
        if variant is None or variant.run is None or (self._on_cuda and self._capturing()):
            return self._looked(args)
        result = variant.run(*args)
        calls = variant.calls = variant.calls + 1
        if calls >= variant.noted:
            self._note(variant, args)
        return result

    def _looked(self, args: Sequence[Any]) -> Any:
        """A call whose inputs have to be looked at."""
        look = self._begun(args)
        if look is None:
            return self._run(self._general, args)
        likely = self._likely(look)
        if likely is None:
            return self._run(self._found(look, args), args)
        # The device would idle until the host has read the verdict: the likely variant is launched behind the check.
        try:
            look.ask()
        except Exception as error:  # noqa: BLE001 - as below
            self._give_up(error)
            return self._run(self._general, args)
        states = generator_states({x.device for x in args if isinstance(x, torch.Tensor) and x.is_cuda})
        error: Exception | None = None
        result = None
        try:
            result = likely.call(*args) if likely.call is not None else None
        except Exception as raised:  # noqa: BLE001 - raised below, if it is the right variant
            error = raised
        variant = self._found(look, args)
        if variant is likely:
            if error is not None:
                raise error
            self._count(variant, args)
            return result
        del result
        if states.changed():
            states.restore()
        return self._run(variant, args)

    def _run(self, variant: Variant, args: Sequence[Any]) -> Any:
        call = variant.call
        if call is None:
            if self._capturing():
                self._say_capture()
                return self._eager(*args)
            call = self._compiled(variant, after_dynamo=True)
        result = call(*args)
        self._count(variant, args)
        return result

    def _count(self, variant: Variant, args: Sequence[Any]) -> None:
        if not self._stopped and not (variant is self._general and self._capturing()):
            variant.calls += 1
            if variant.calls >= variant.noted:
                self._note(variant, args)

    def _begun(self, args: Sequence[Any]) -> Look | None:
        """What is known of a call's inputs; None if the general variant serves it anyway."""
        if self._stopped or self._capturing():
            # What is captured is replayed with other values in the same tensors.
            return None
        try:
            return self._checks.begin(args)
        except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline, and the general variant is right
            self._give_up(error)
            return None

    def _likely(self, look: Look) -> Variant | None:
        """The variant that a call needs if its masks are what the last ones were, where it can be run before."""
        guess = look.guess if self._repeatable and not saves_are_hooked() else None
        case = None if guess is None else _case(guess)
        variant = self._general if case is None else self._assumed.get(case)
        return variant if guess is not None and variant is not None and variant.calls else None

    def _found(self, look: Look, args: Sequence[Any]) -> Variant:
        """The variant for the verdicts of a call; waits for the device."""
        try:
            case = _case(look.verdicts())
            if (reason := unusable()) is not None and not self._told_slower:
                self._told_slower = True
                self._record("slower", GENERAL, reason=reason)
        except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline, and the general variant is right
            self._give_up(error)
            return self._general
        if self._order is not None and case is not None and case not in self._assumed:
            self._order(case, args)
            return self._variant(case)
        variant = self._variant(case)
        self._memo.keep(args, variant)
        return variant

    def _give_up(self, error: Exception) -> None:
        reason = Reason(
            code="check_failed",
            by="speculation",
            sentence=f"the check raised, and the general variant is taken from now on: {first_line(error)}",
            observed=type(error).__name__,
            lever="switch it off with options={'speculate': False}, and report the error",
        )
        self._stop(reason)

    def _variant(self, case: Case | None) -> Variant:
        """The variant for a case."""
        if case is None:
            return self._general
        found = self._assumed.get(case)
        if found is not None:
            return found
        with control_flow.compile_lock:
            if case not in self._assumed:
                if self._another is None or len(self._assumed) >= MOST_VARIANTS:
                    return self._general
                self._assumed[case] = self._another(case, len(self._assumed) + 1)
            return self._assumed[case]

    def on_new_case(self, order: Callable[[Case, Sequence[Any]], None]) -> None:
        """Have variants for other cases built elsewhere; until `add` brings one, calls go to the general one.

        Args:
            order: called with a case that there is no variant for, and a call's arguments; it must not raise.
        """
        if any(item.accepts for item in self._checks.assumptions):
            self._order = order

    def add(self, case: Case, variant: Variant) -> None:
        """Take a compiled variant; the next call of its case runs it."""
        with control_flow.compile_lock:
            if not self._stopped:
                self._assumed[case] = variant
                self._memo.clear()
                self._record("compiled", variant.name, case=case)

    @property
    def cases(self) -> tuple[Case, ...]:
        """What there are variants for beside the general one."""
        return tuple(self._assumed)

    def _capturing(self) -> bool:
        return self._on_cuda and torch.cuda.is_current_stream_capturing()

    def _note(self, variant: Variant, args: Sequence[Any]) -> None:
        """Record an outcome the first time that it is seen, and stop checking an assumption that never holds."""
        calls = variant.calls
        if variant.call is not None:
            variant.run = control_flow.undisabled(variant.call)
        if calls == 1:
            state = "failed" if variant is self._general else "held"
            self._record(state, variant.name, case=self._case_of(variant), names=self._names(variant, args))
        elif calls >= _MANY_CALLS:
            self._record("ran", variant.name, case=self._case_of(variant), calls=variant.noted)
        self._held = self._held or variant is not self._general
        variant.noted = max(_MANY_CALLS, 2 * variant.noted) if self._held else calls + 1
        if calls >= PATIENCE and not self._held:
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
            self._memo.clear()
            self._another = self._order = None  # they hold a copy of the graph
            for variant in self._assumed.values():
                variant.build = None
            self._record("stopped", GENERAL, reason=reason)

    def _compiled(self, variant: Variant, *, after_dynamo: bool) -> Callable[..., Any]:
        with control_flow.compile_lock, control_flow.unseen_by_hooks():
            if variant.call is None:
                if variant.build is None:  # another thread gave up on it after this one chose it
                    return self._compiled(self._general, after_dynamo=after_dynamo)
                variant.call = variant.build(after_dynamo)
                variant.build = None
                self._record("compiled", variant.name, case=self._case_of(variant))
            return variant.call

    def _names(self, variant: Variant, args: Sequence[Any]) -> list[str]:
        """What people call the masks of a call whose classes do not say all of them."""
        try:
            return self._checks.names(args, self._case_of(variant))
        except Exception as error:  # noqa: BLE001 - becomes a reason in the timeline; the call has its result
            self._give_up(error)
            return []

    def _case_of(self, variant: Variant) -> Case | None:
        # Another thread may add one meanwhile.
        return next((case for case, known in tuple(self._assumed.items()) if known is variant), None)

    def _record_capture(self) -> None:
        reason = Reason(
            code="assumption_failed",
            by="speculation",
            sentence="a CUDA graph is captured before the general variant was compiled: the graph runs eager there",
            lever="capture with options={'speculate': False}, or call once before with a mask that is not full",
        )
        self._record("captured", GENERAL, reason=reason)

    def _record(
        self,
        state: str,
        variant: str,
        item: Assumption | None = None,
        reason: Reason | None = None,
        case: Case | None = None,
        names: Sequence[str] = (),
        calls: int = 0,
    ) -> None:
        sentences = [item.sentence] if item else _sentences(self._checks.assumptions, case, names)
        sentence = "; ".join(dict.fromkeys(sentences))
        log.info("omni: %s: %s: %s (%s variant)", self._graph, sentence, state, variant)
        self._timeline.append(
            Speculation(
                graph=self._graph,
                state=state,
                variant=variant,
                sentence=sentence,
                inputs=item.inputs if item else (),
                saves=item.saves if item else "",
                source=item.source if item else "",
                reason=reason,
                calls=calls,
            )
        )


def _sentences(assumptions: Sequence[Assumption], case: Case | None, names: Sequence[str]) -> list[str]:
    """What is assumed, with the classes of masks where they are known, and what people call these masks."""
    found: list[str] = []
    for index, item in enumerate(assumptions):
        known, name = case[index] if case else None, names[index] if names else ""
        words = [*([str(known)] if known is not None else []), *([name] if name else [])]
        found.append(": ".join([item.sentence, *([" (".join(words) + ")" * (len(words) - 1)] if words else [])]))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedVariants(State):
    """What variants are restored from."""

    assumptions: tuple[Assumption, ...]  # what they are chosen by
    placeholders: tuple[str, ...]  # the names of the graph's inputs
    assumed: tuple[tuple[Case, State], ...]  # the variants by case
    general: State  # the one for all
    on_cuda: bool  # whether an input is on a CUDA device

    def restore(self, id: str) -> Callable[..., Any]:
        """The choice among them."""
        other = f"{id}:{GENERAL}"
        assumed: dict[Case, Variant] = {}
        for number, (case, state) in enumerate(self.assumed, 1):
            name = variant_name(number)
            graph = id if number == 1 else f"{id}:{name}"
            assumed[case] = Variant(name=name, graph=graph, build=None, call=state.restore(graph))
        general = self.general.restore(other)
        return Variants(
            checks=Checks(self.assumptions, self.placeholders),
            assumed=assumed,
            general=Variant(name=GENERAL, graph=other, build=None, call=general),
            eager=general,
            timeline=current(),
            on_cuda=self.on_cuda,
            graph=id,
        ).__call__


def variant_name(number: int) -> str:
    """The name of an assumed variant: `assumed`, then `assumed2` and so on."""
    return ASSUMED if number == 1 else f"{ASSUMED}{number}"


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
