"""A contest: candidates are built in turn, checked against a higher precision, and timed against the best so far.

Only the best and its challenger are alive at a time. What is timed is a call of the whole graph, so that copies, casts
and lost fusion at the boundaries of subgraphs count: a subgraph that is faster alone and slower in the model loses.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.autograd.run_in_precision import InPrecision, on_real_tensors
from omnicomp._torch.dynamo import control_flow, late_compile
from omnicomp._torch.fx import copy_module
from omnicomp.analysis.accuracy import PRECISIONS, copy_of, judge
from omnicomp.analysis.random_state import generator_states
from omnicomp.backend.autograd import compile_parts
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.select.candidates import Option
from omnicomp.backend.select.duel import Duel, duel, fitting_clock
from omnicomp.backend.select.model_parts import parts_of
from omnicomp.errors import first_line
from omnicomp.lowerings.engines.inputs import weights_of
from omnicomp.options.placement_rules import Rule
from omnicomp.passes.dtypes.trial_runs import written_inputs
from omnicomp.timeline import Candidate, Event, Ran, Reason, Retreat, Timeline, progress_line
from omnicomp.timeline.recorder import drafting

__all__ = ["Contest", "Unmeasurable"]

# Calls before anything is timed: the first builds, attests and verifies, and the second is the first as it will be.
_WARM: Final = 3
# Share of the best one's speed from which on another lowering is tried for parts of the model.
_NEAR: Final = 0.75


class Unmeasurable(Exception):
    """The graph can't be tried without harm, or there is nothing to compare with."""


@dataclasses.dataclass(kw_only=True)
class _Entrant:
    """A candidate that was built."""

    option: Option
    call: Callable[[], Any]
    build_seconds: float
    error: float = -1.0
    own: float = -1.0


class Contest:
    """The candidates for one graph, on the inputs of the call that it is compiled for."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph) -> None:
        """Prepare to compile the graph several times.

        Args:
            gm: a copy of the Dynamo graph behind the passes.
            inputs: real tensors and symbolic sizes.
            graph: what it belongs to.

        Raises:
            Unmeasurable: the graph can't be compiled apart from Dynamo's compilation.
        """
        self._gm, self._graph = gm, graph
        try:
            self._scene = late_compile.keep_scene(inputs)
        except Exception as error:
            raise Unmeasurable(f"no candidate could be compiled apart: {first_line(error)}") from error
        self._weights = weights_of(gm, inputs)
        written = written_inputs(gm)
        # What the graph writes to is a copy, so that the program finds its own as it was.
        self._inputs = [copy_of(v) if i in written else late_compile.hinted(v) for i, v in enumerate(inputs)]
        self._first = {index: copy_of(self._inputs[index]) for index in written}
        self._devices = {v.device for v in inputs if isinstance(v, torch.Tensor)}
        self._truth: tuple[list[Any], list[Any]] | None = None
        self._clock = fitting_clock() if graph.device.type == "cpu" else "wall"
        self._events: list[Candidate] = []

    @property
    def events(self) -> tuple[Candidate, ...]:
        """What was found, one candidate each."""
        return tuple(self._events)

    def run(self, options: Sequence[Option], refused: Mapping[str, str]) -> Option:
        """Find the fastest.

        Args:
            options: the first is the one to be beaten.
            refused: engines that are no candidates, with the reason.

        Raises:
            Unmeasurable: not even the first could be built.
        """
        states, threads = generator_states(self._devices), torch.get_num_threads()
        if self._clock == "cpu":
            # Threads that wait for one that has no processor use up time as if they worked.
            torch.set_num_threads(1)
        try:
            with progress_line.step(f"omni measures {len(options)} ways to run {self._graph.id}") as step:
                return self._run(options, refused, step)
        finally:
            states.restore()
            torch.set_num_threads(threads)
            self._truth = None

    def _run(self, options: Sequence[Option], refused: Mapping[str, str], step: Any) -> Option:
        for name, why in refused.items():
            self._lost(Option(name=name), "engine_missing", why)
        best = self._enter(options[0])
        if best is None:
            why = self._events[-1].reason
            raise Unmeasurable(f"{options[0].name} can't be measured: {why.sentence if why else 'no reason is known'}")
        base = self._seconds(best)
        results: dict[str, tuple[_Entrant, Duel | None, float]] = {best.option.name: (best, None, 1.0)}
        relative = 1.0  # the best one's speed, the first one's being 1
        for number, option in enumerate(options[1:], start=2):
            step.say(f"omni builds {option.name}, {number} of {len(options)} ways to run {self._graph.id}")
            rival = self._enter(option)
            if rival is None:
                continue
            step.say(f"omni times {option.name} against {best.option.name} ({self._graph.id})")
            found = self._duel(best, rival)
            speed = relative * found.ratio
            results[option.name] = (dataclasses.replace(rival, call=_nothing), found, speed)
            if found.won:
                name = best.option.name
                _, old, reached = results[name]
                results[name] = (dataclasses.replace(best, call=_nothing), old, reached)
                best, relative = rival, speed
            del rival
            gc.collect()
        best, relative = self._refine(best, relative, results, step)
        for entrant, found, speed in results.values():
            self._record(entrant, found, speed, base, best.option)
        return best.option

    def _refine(
        self, best: _Entrant, relative: float, results: dict[str, tuple[_Entrant, Duel | None, float]], step: Any
    ) -> tuple[_Entrant, float]:
        """Try the second best for parts of the model, one after the other, and keep what makes the whole faster."""
        others = [
            (speed, entrant.option)
            for entrant, _, speed in results.values()
            if entrant.option.lowerings != best.option.lowerings and speed > _NEAR * relative
        ]
        if not others:
            return best, relative
        _, second = max(others, key=lambda each: each[0])
        base = best.option
        for selector in parts_of(self._gm):
            rule = Rule(selector, second.lowerings)
            name = f"{base.name} in part, {second.name} for {', '.join(r.selector for r in (*best.option.rules, rule))}"
            option = dataclasses.replace(
                base,
                name=name,
                rules=(*best.option.rules, rule),
                engines={**second.engines, **best.option.engines},
                needs=second.needs or base.needs,
            )
            step.say(f"omni tries {second.name} for {selector} ({self._graph.id})")
            rival = self._enter(option)
            if rival is None:
                continue
            found = self._duel(best, rival)
            speed = relative * found.ratio
            results[name] = (dataclasses.replace(rival, call=_nothing), found, speed)
            if found.won:
                best, relative = rival, speed
            del rival
            gc.collect()
        return best, relative

    def _enter(self, option: Option) -> _Entrant | None:
        """Build a candidate, look at what it gives, and call it until it is warm; None if it is out."""
        draft = Timeline()
        graph = option.graph(self._graph)
        start = time.perf_counter()
        try:
            with drafting(draft):
                compiled, sizes = late_compile.compile_late(
                    self._scene,
                    lambda fakes: compile_parts(copy_module(self._gm), fakes, graph, self._weights),
                )
                if sizes.holds is not None:
                    self._lost(option, "not_checkable", f"it is right for some sizes only: {sizes.text}")
                    return None
                inputs = tuple(self._inputs)

                def call() -> Any:
                    return compiled(*inputs)

                with on_real_tensors():
                    self._reset()
                    results = call()
                    seconds = time.perf_counter() - start
                    entrant = _Entrant(option=option, call=call, build_seconds=seconds)
                    if not self._right(entrant, results):
                        return None
                    for _ in range(_WARM - 1):
                        call()
        except control_flow.CONTROL_FLOW:
            raise
        except Exception as error:  # noqa: BLE001 - becomes the reason why it lost
            self._lost(option, "build_failed", f"it can't be built or called: {first_line(error)}")
            return None
        return entrant if self._took_part(option, draft.events()) else None

    def _took_part(self, option: Option, events: Sequence[Event]) -> bool:
        """Whether what a candidate is about ran in its first call, and nothing of it was given up there."""
        left = [event for event in events if isinstance(event, Retreat) and event.source_lowering == option.needs]
        if not option.needs or any(isinstance(event, Ran) and event.lowering == option.needs for event in events):
            return True
        if left:
            reason = left[-1].reason
            self._lost(option, reason.code, reason.sentence, reason.observed)
        else:
            self._lost(option, "unsupported_op", f"{option.needs} takes nothing of the graph")
        return False

    def _right(self, entrant: _Entrant, results: Any) -> bool:
        """Whether what a candidate gives is as near to the truth as eager's."""
        if self._truth is None:
            wide = PRECISIONS[self._graph.policy.reference]
            plain = _leaves(copy_module(self._gm).forward(*self._fresh(None)))
            with InPrecision(wide):
                exact = _leaves(copy_module(self._gm).forward(*self._fresh(wide)))
            self._truth = plain, exact
        plain, exact = self._truth
        judged = judge(_leaves(results), plain, exact)
        entrant.error, entrant.own = judged.error, judged.own
        if judged.worst is None:
            return True
        seen = f"error {judged.error:.1e}, eager's {judged.own:.1e}"
        self._lost(entrant.option, "verification_failed", f"result {judged.worst} is wrong", seen, entrant)
        return False

    def _reset(self) -> None:
        """Let what the graph writes to hold what it held before the call that is compiled for."""
        for index, value in self._first.items():
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    self._inputs[index].copy_(value)

    def _fresh(self, dtype: torch.dtype | None) -> list[Any]:
        return [
            copy_of(value, dtype) if dtype is not None or index in self._first else _detached(value)
            for index, value in enumerate(self._first.get(i, v) for i, v in enumerate(self._inputs))
        ]

    def _duel(self, best: _Entrant, rival: _Entrant) -> Duel:
        with on_real_tensors():
            return duel(
                best.call,
                rival.call,
                seconds=self._graph.policy.measure_seconds,
                clock=self._clock,
                wait=self._wait,
            )

    def _seconds(self, entrant: _Entrant) -> float:
        with on_real_tensors():
            return duel(entrant.call, entrant.call, seconds=0.0, clock=self._clock, wait=self._wait).new

    def _wait(self) -> None:
        self._graph.device.synchronize()

    def _record(self, entrant: _Entrant, found: Duel | None, speed: float, base: float, winner: Option) -> None:
        option = entrant.option
        reason = None
        if option is not winner:
            reason = Reason(
                code="slower",
                by="choice",
                sentence=f"{winner.name} is faster" if found is None or not found.won else "another is faster still",
                observed=f"{speed:.2f} times the speed of the first",
                lever="OMNICOMP_CACHE_DIR holds what was measured; options={'verdicts': 'forget'} measures again",
            )
        self._events.append(
            Candidate(
                graph=self._graph.id,
                candidate=option.name,
                lowerings=option.lowerings,
                selected=option is winner,
                clock=self._clock,
                seconds=base if found is None else found.new,
                fastest=base if found is None else found.new_fastest,
                spread=0.0 if found is None else found.spread,
                speed=speed,
                rounds=0 if found is None else found.rounds,
                error=entrant.error,
                own=entrant.own,
                build_seconds=entrant.build_seconds,
                reason=reason,
            )
        )

    def _lost(
        self, option: Option, code: str, sentence: str, observed: str = "", entrant: _Entrant | None = None
    ) -> None:
        reason = Reason(code=code, by="choice", sentence=sentence, observed=observed)
        error, own = (-1.0, -1.0) if entrant is None else (entrant.error, entrant.own)
        self._events.append(
            Candidate(
                graph=self._graph.id,
                candidate=option.name,
                lowerings=option.lowerings,
                clock=self._clock,
                error=error,
                own=own,
                reason=reason,
            )
        )


def _nothing() -> None:
    raise AssertionError("a candidate that lost was let go")


def _leaves(values: Any) -> list[Any]:
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in leaves]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
