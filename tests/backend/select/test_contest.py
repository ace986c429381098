"""Which of two functions is faster, by clocks that are made up."""

import itertools
import random
from collections.abc import Callable

import pytest

from omnicomp.backend.select import contest as duels
from omnicomp.backend.select.contest import MARGIN, Duel, duel


class Clock:
    """A clock that functions push on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def function(self, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds()

        return run


def contest(old: Callable[[], float], new: Callable[[], float], seconds: float = 0.5) -> Duel:
    clock = Clock()
    return duel(clock.function(old), clock.function(new), seconds=seconds, read=clock)


def noisy(mean: float, share: float, seed: int) -> Callable[[], float]:
    source = random.Random(seed)
    return lambda: mean * (1 + share * source.random())


def test_the_faster_one_wins() -> None:
    found = contest(lambda: 2e-3, lambda: 1e-3)
    assert found.won
    assert found.ratio == pytest.approx(2)
    assert found.rounds == 5, "nothing is left to doubt"


def test_the_slower_one_loses() -> None:
    found = contest(lambda: 1e-3, lambda: 1.5e-3)
    assert not found.won
    assert found.rounds == 5


@pytest.mark.parametrize("seed", range(20))
def test_the_same_function_does_not_beat_itself(seed: int) -> None:
    assert not contest(noisy(1e-3, 0.5, seed), noisy(1e-3, 0.5, seed + 100)).won


@pytest.mark.parametrize("seed", range(20))
def test_a_gain_is_seen_through_noise(seed: int) -> None:
    assert contest(noisy(1.4e-3, 0.1, seed), noisy(1e-3, 0.1, seed + 100)).won


def test_a_gain_below_the_margin_is_not_worth_it() -> None:
    assert not contest(lambda: 1e-3 * (1 + MARGIN / 2), lambda: 1e-3).won


def test_a_drift_of_the_machine_is_no_gain() -> None:
    """Everything gets slower all the time, so that what runs first always looks faster."""
    number = itertools.count()

    def slower() -> float:
        return 1e-3 * 1.0001 ** next(number)

    found = contest(slower, slower)
    assert not found.won
    assert found.ratio == pytest.approx(1, abs=0.02)


def test_doubt_asks_for_more_rounds() -> None:
    clear = contest(lambda: 2e-3, lambda: 1e-3)
    doubtful = contest(noisy(1.05e-3, 0.6, 1), noisy(1e-3, 0.6, 2), seconds=60)
    assert doubtful.rounds > clear.rounds
    assert doubtful.rounds <= 41


def test_a_hopeless_one_is_timed_once() -> None:
    assert contest(lambda: 1e-3, lambda: 1.0).rounds == 1


def test_the_clock_is_the_process_own_where_others_keep_the_processors_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duels.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(duels.os, "getloadavg", lambda: (8.0, 1.0, 1.0))
    assert duels.fitting_clock() == "cpu"
    monkeypatch.setattr(duels.os, "getloadavg", lambda: (0.5, 1.0, 1.0))
    assert duels.fitting_clock() == "wall"


def test_without_a_load_average_the_clock_is_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("not here")

    monkeypatch.setattr(duels.os, "getloadavg", unknown)
    assert duels.fitting_clock() == "wall"
