"""Recording once, and without harm to the program; wrong values, told in one voice."""

import logging

import pytest
from concurrency import in_threads

from omnicomp.errors import Once, OptionError, first_line, harmless, wrong_value
from omnicomp.options.policy import SPECS, parse


def test_it_runs_once_however_many_threads_come() -> None:
    calls: list[int] = []
    once = Once(lambda: calls.append(1))
    in_threads(lambda _: once())
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (wrong_value("verify", True, known=("off", "first")), "verify can't be True; it takes off or first"),
        (
            wrong_value("a", "frist", known=("off", "first")),
            "a can't be 'frist'; it takes off or first; did you mean \"first\"?",
        ),
        (wrong_value("c", 3, known=("a", "a, fast")), "c can't be 3; it takes a or 'a, fast'"),
        (wrong_value("n", -1, "a number", example=8), "n can't be -1; it takes a number, for example 8"),
        (
            wrong_value("n", 0, "a number", example=0, verb="contain"),
            "n can't contain 0; it takes a number, for example 0",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_is_accepted_and_an_example(error: Exception, said: str) -> None:
    assert said in str(error)
    assert isinstance(error, OptionError)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.check is not None])
def test_every_option_says_it_in_one_voice(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(None, {name: object()})
    assert "it takes" in str(caught.value) or "known" in str(caught.value)
    assert "\n" not in str(caught.value)
