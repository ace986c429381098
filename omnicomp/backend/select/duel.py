"""Which of two functions is faster, on a machine that does other work too.

They run in turn, and the one that is to be beaten runs twice in each round, so that the noise is seen beside the
difference. The other wins if it is faster by a margin that is worth it, and by three times the noise of the median.
"""

import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Final

__all__ = ["MARGIN", "Duel", "duel", "fitting_clock"]

MARGIN: Final = 0.03
"""How much faster a candidate has to be, so that the choice does not change from day to day."""

_HOPELESS: Final = 1 / 3  # no noise makes up for that, and each round would take long
_ROUNDS: Final = (5, 41)  # least and most
_BURST: Final = 0.02  # seconds that one turn takes, about; a call that takes longer is one turn
# 1.4826 makes a standard deviation of a median absolute deviation, and 1.2533 that of a median of one of a mean.
_SIGMA: Final = 1.4826 * 1.2533


@dataclasses.dataclass(frozen=True, kw_only=True)
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
