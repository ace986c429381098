"""Which of two functions is faster, on a machine that does other work too.

They run in turn, and the one that is to be beaten runs twice in each round, so that the noise is seen beside the
difference. The other wins if it is faster by a margin that is worth it, and by three times the noise of the median.
"""

import dataclasses
import gc
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp import records
from omnicomp._torch.autograd.run_in_precision import InPrecision, on_real_tensors
from omnicomp._torch.dynamo import control_flow, late_compile
from omnicomp._torch.fx import copy_module
from omnicomp.analysis.accuracy import PRECISIONS, copy_of, judge
from omnicomp.analysis.nodes import module_path
from omnicomp.analysis.random_state import generator_states
from omnicomp.backend.autograd import compile_parts
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.select.candidates import Option
from omnicomp.errors import first_line
from omnicomp.lowerings.engines.subgraph import weights_of
from omnicomp.options.placement_rules import Rule
from omnicomp.passes.dtypes.trial_runs import written_inputs
from omnicomp.timeline import Candidate, Event, Ran, Reason, Retreat, Timeline, progress_line
from omnicomp.timeline.recorder import drafting

MARGIN: Final = 0.03
"""How much faster a candidate has to be, so that the choice does not change from day to day."""

_HOPELESS: Final = 1 / 3  # no noise makes up for that, and each round would take long
_ROUNDS: Final = (5, 41)  # least and most
_BURST: Final = 0.02  # seconds that one turn takes, about; a call that takes longer is one turn
# 1.4826 makes a standard deviation of a median absolute deviation, and 1.2533 that of a median of one of a mean.
_SIGMA: Final = 1.4826 * 1.2533


@records.dataclass(frozen=True, kw_only=True)
class Duel:
    """What was measured.

    Attributes:
        rounds: how many.
        ratio: median time of the one to be beaten over the other's: more than 1 if the other is faster.
        spread: three standard deviations of that median, as a share of it.
        noise: the same ratio of the one to be beaten to itself, less 1: how far it is off.
        old, new: median seconds a call of both.
        old_fastest, new_fastest: seconds of the fastest turn, a call.
        clock: `wall` or `cpu`.
    """

    rounds: int
    ratio: float
    spread: float
    noise: float
    old: float
    new: float
    old_fastest: float
    new_fastest: float
    clock: str

    @property
    def won(self) -> bool:
        """Whether the new one is to be preferred."""
        fastest = self.old_fastest / self.new_fastest if self.new_fastest else 1.0
        return self.ratio - 1 > max(MARGIN, self.spread, 3 * self.noise) and fastest > 1 + MARGIN / 2

    @property
    def clear(self) -> bool:
        """Whether more rounds are unlikely to change the answer."""
        doubt = max(self.spread, 3 * self.noise)
        return abs(self.ratio - 1 - MARGIN) > doubt


def fitting_clock() -> str:
    """The clock to read: what the process has used where other work keeps more processors busy than there are."""
    try:
        busy, processors = os.getloadavg()[0], os.cpu_count() or 1
    except OSError:  # not known here
        return "wall"
    return "cpu" if busy > 1.5 * processors else "wall"


def duel(
    old: Callable[[], object],
    new: Callable[[], object],
    *,
    seconds: float,
    clock: str = "wall",
    wait: Callable[[], object] = lambda: None,
    read: Callable[[], float] | None = None,
) -> Duel:
    """Time two functions against each other.

    Args:
        old: the one to be beaten; warmed up.
        new: the other; warmed up.
        seconds: how long it may take, about; five rounds are made in any case.
        clock: `wall`, or `cpu` for the time that the process uses on all its threads.
        wait: waits for the device.
        read: reads the clock in seconds, for tests.
    """
    read = read or (time.process_time if clock == "cpu" else time.perf_counter)
    calls_old, calls_new = (_calls(function, wait, read) for function in (old, new))

    def turn(function: Callable[[], object], calls: int) -> float:
        wait()
        start = read()
        for _ in range(calls):
            function()
        wait()
        return max((read() - start) / calls, 1e-12)

    began = time.perf_counter()
    firsts: list[float] = []
    seconds_: list[float] = []
    news: list[float] = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        while True:
            # Old, new, old: a drift of the machine is the same for both.
            firsts.append(turn(old, calls_old))
            news.append(turn(new, calls_new))
            seconds_.append(turn(old, calls_old))
            result = _judge(firsts, seconds_, news, clock)
            if result.ratio < _HOPELESS:
                return result
            spent = time.perf_counter() - began
            if result.rounds >= _ROUNDS[0] and (result.clear or spent > seconds or result.rounds >= _ROUNDS[1]):
                return result
    finally:
        if enabled:
            gc.enable()


def _calls(function: Callable[[], object], wait: Callable[[], object], read: Callable[[], float]) -> int:
    wait()
    start = read()
    function()
    wait()
    return max(1, min(1000, int(_BURST / max(read() - start, 1e-7))))


def _judge(firsts: list[float], seconds: list[float], news: list[float], clock: str) -> Duel:
    ratios = [math.log((a + b) / 2 / n) for a, b, n in zip(firsts, seconds, news, strict=True)]
    same = [math.log(a / b) for a, b in zip(firsts, seconds, strict=True)]
    middle = statistics.median(ratios)
    deviation = statistics.median(abs(value - middle) for value in ratios)
    return Duel(
        rounds=len(ratios),
        ratio=math.exp(middle),
        spread=3 * _SIGMA * deviation / math.sqrt(len(ratios)),
        noise=abs(statistics.median(same)),
        old=statistics.median([*firsts, *seconds]),
        new=statistics.median(news),
        old_fastest=min([*firsts, *seconds]),
        new_fastest=min(news),
        clock=clock,
    )


# More parts than that are not tried; each is a build of the model.
_MOST: Final = 4
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def parts_of(gm: GraphModule) -> list[str]:
    """Selectors of rules, one a part, the one with most operators first; empty where the graph has no parts."""
    paths = [module_path(node) for node in gm.graph.nodes if node.op.startswith("call_")]
    longest = max((path.count(".") + 1 for path in paths if path), default=0)
    for depth in range(1, longest + 1):
        heads = Counter(".".join(path.split(".")[:depth]) for path in paths if path)
        alike = Counter(_NUMBER.sub("*", head) for head in heads.elements())
        found = heads if len(heads) <= _MOST + 2 else alike
        if len(found) > 1:
            return [head for head, _ in found.most_common(_MOST)]
    return []


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

    def __init__(
        self, gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph, values: Sequence[Any] | None = None
    ) -> None:
        """Prepare to compile the graph several times.

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
        values = inputs if values is None else values
        self._inputs = [copy_of(v) if i in written else late_compile.hinted(v) for i, v in enumerate(values)]
        self._first = {index: copy_of(self._inputs[index]) for index in written}
        self._devices = {v.device for v in values if isinstance(v, torch.Tensor)}
        self._truth: tuple[list[Any], list[Any]] | None = None
        self._clock = fitting_clock() if graph.device.type == "cpu" else "wall"
        self._events: list[Candidate] = []

    @property
    def events(self) -> tuple[Candidate, ...]:
        """What was found, one candidate each."""
        return tuple(self._events)

    def run(self, options: Sequence[Option], refused: Mapping[str, str]) -> Option:
        """Find the fastest.

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
            code = "engine_missing" if self._graph.values is None else "not_in_background"
            self._lost(Option(name=name), code, why)
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
                    lambda fakes: compile_parts(self._gm, fakes, graph, self._weights),
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
    return [_detached(value) for value in leaves]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
