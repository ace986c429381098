"""Recording once, and without harm to the program."""

import logging
import threading

import pytest

from omnicomp.errors import Once, first_line, harmless


def test_it_runs_once_however_many_threads_come() -> None:
    calls: list[int] = []
    once = Once(lambda: calls.append(1))
    threads = [threading.Thread(target=once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]


def test_what_raises_is_logged_with_its_traceback_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("planted failure")

    once = Once(fail)
    once()
    once()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


def test_an_interruption_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt), harmless("anything"):
        raise KeyboardInterrupt


def test_the_first_line_names_the_error_once() -> None:
    assert first_line(RuntimeError("\n  broken\nmore")) == "RuntimeError: broken"
    assert first_line(ValueError()) == "ValueError: no message"
