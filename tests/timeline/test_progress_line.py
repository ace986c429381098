"""The progress line, on a pseudo terminal."""

import io
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

terminal = pytest.importorskip("terminal", reason="needs a pseudo terminal")

from omnicomp.options.policy import parse  # noqa: E402
from omnicomp.timeline import progress_line as progress  # noqa: E402

HEAD = """
import sys, time, threading
from omnicomp.timeline import progress_line as progress
from omnicomp.timeline.progress_line import step
progress._PATIENCE, progress._INTERVAL = 0.3, 0.05
"""
BUILD = (
    HEAD + "\nwith step('g0 Model.forward'):\n    with step('Inductor builds g0.forward.0'):\n        time.sleep(1.2)\n"
)
PICTURE = re.compile(r"^. omni \d s: g0 Model\.forward > Inductor builds g0\.forward\.0 \(\d s\)$")


def test_a_long_step_is_shown_and_goes_away() -> None:
    seen = terminal.run(BUILD + "print('done')", {})
    pictures = [line for screen in seen.screens for line in screen.splitlines() if "omni" in line]
    assert len(pictures) > 5
    assert all(PICTURE.match(line) for line in pictures)
    assert {"(0 s)", "(1 s)"} == {line.split("0.forward.0 ")[-1].split("forward.0 ")[-1] for line in pictures}
    assert seen.last == "done"
    assert seen.status == 0


def test_a_short_step_writes_nothing() -> None:
    assert terminal.run(HEAD + "with step('x'):\n    time.sleep(0.1)\nprint('done')", {}).raw == b"done\r\n"


def test_the_line_comes_after_two_seconds() -> None:
    assert progress._PATIENCE == 2.0


@pytest.mark.parametrize(
    "environment",
    [
        {"OMNICOMP_PROGRESS": "0"},
        {"CI": "true"},
        {"TERM": "dumb"},
        {"RANK": "1"},
        {"LOCAL_RANK": "3"},
    ],
)
def test_where_no_line_is_wanted(environment: dict[str, str]) -> None:
    assert terminal.run(BUILD + "print('done')", environment).raw == b"done\r\n"


@pytest.mark.parametrize("environment", [{"CI": "true", "OMNICOMP_PROGRESS": "1"}, {"RANK": "0", "LOCAL_RANK": "0"}])
def test_where_it_is_wanted_after_all(environment: dict[str, str]) -> None:
    assert b"Inductor builds" in terminal.run(BUILD, environment).raw


def test_off_by_option() -> None:
    program = HEAD + "with step('outer', shown=False):\n    with step('inner'):\n        time.sleep(0.8)\n"
    assert terminal.run(program, {}).raw == b""
    assert parse(None, {"progress": False}).progress is False
    assert parse(None, {}).progress is True


OUTPUT = """
print("Loading... ", end="", flush=True)
with step("g0"):
    time.sleep(0.6)
    print("half", end="")
    time.sleep(0.3)
    print(" done")
    time.sleep(0.3)
    print("a warning", file=sys.stderr)
    print("one\\ntwo\\nthree")
    time.sleep(0.3)
    sys.stdout.writelines(["four\\n", "five, not ended"])
    time.sleep(0.3)
print(" and now it is")
"""
EXPECTED = "Loading... half done\na warning\none\ntwo\nthree\nfour\nfive, not ended and now it is"


@pytest.mark.parametrize("rows", [24, 4])
def test_the_programs_own_output_is_left_as_it_is(rows: int) -> None:
    seen = terminal.run(HEAD + OUTPUT, {}, rows=rows)
    assert b"omni" in seen.raw
    lines = EXPECTED.splitlines()
    assert seen.last == "\n".join(lines if rows > len(lines) else lines[-rows + 1 :])
    for screen in seen.screens:
        shown = [line for line in screen.splitlines() if line]
        own = [line for line in shown if "omni" not in line]
        assert "\n".join(own) in EXPECTED or EXPECTED.startswith("\n".join(own)) or rows < len(lines)
        assert all("omni" not in line for line in shown[:-1]), screen
    assert seen.raw.count(b"a warning") == 1  # `print` writes the end of the line by itself: a picture may come before


def test_what_is_redirected_gets_no_picture(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    seen = terminal.run(HEAD + OUTPUT, {}, stdout=str(out))
    assert b"omni" in seen.raw
    assert out.read_text() == EXPECTED.replace("a warning\n", "") + "\n"
    assert seen.last == "a warning"


def test_an_exception_is_shown_as_ever() -> None:
    seen = terminal.run(HEAD + "with step('x'):\n    time.sleep(0.7)\n    raise ValueError('boom')\n", {})
    assert b"omni" in seen.raw
    assert seen.status == 1
    assert seen.last.splitlines()[0].startswith("Traceback")
    assert seen.last.splitlines()[-1] == "ValueError: boom"
    assert "omni 0 s" not in seen.last


def test_streams_are_the_same_objects_and_get_their_methods_back() -> None:
    program = """
before = (sys.stdout, sys.stderr, sys.stdout.__dict__.copy())
with step("g0"):
    time.sleep(0.7)
    assert "write" in sys.stderr.__dict__, "nothing was drawn"
    assert (sys.stdout, sys.stderr) == before[:2]
assert (sys.stdout, sys.stderr, sys.stdout.__dict__) == before
assert progress._state.painter is None
time.sleep(0.2)
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
print("fine")
"""
    assert terminal.run(HEAD + program, {}).last == "fine"


def test_a_stream_that_was_exchanged_or_closed_meanwhile_is_no_obstacle() -> None:
    program = """
import io
with step("g0"):
    time.sleep(0.6)
    sys.stderr.close()
    sys.stderr = io.StringIO()
    time.sleep(0.3)
print("fine")
"""
    seen = terminal.run(HEAD + program, {})
    assert seen.status == 0
    assert "fine" in seen.last


FORK = """
import os
with step("g0"):
    time.sleep(0.6)
    child = os.fork()
    if child == 0:
        assert "write" not in sys.stderr.__dict__
        assert not progress.wanted()
        with step("in the child"):
            time.sleep(0.8)
            print("child")
            sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_draws_nothing() -> None:
    seen = terminal.run(HEAD + FORK, {})
    assert b"g0" in seen.raw
    assert b"in the child" not in seen.raw
    assert b"child\r\n" in seen.raw


THREADS = """
def work(name):
    for number in range(20):
        with step(f"graph {name}"):
            with step(f"part {number}"):
                time.sleep(0.02)
                sys.stdout.write(f"{name}{number:02}\\n")  # at once: print writes the end of the line by itself

threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
with step("all"):
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    time.sleep(0.3)
"""


def test_threads_share_the_line() -> None:
    seen = terminal.run(HEAD + THREADS, {}, rows=100)
    assert b"omni" in seen.raw
    assert sorted(seen.last.split()) == sorted(f"{name}{number:02}" for name in "abcd" for number in range(20))


def test_a_hidden_step_of_another_thread_does_not_keep_the_line() -> None:
    program = """
def hidden():
    with step("hidden", shown=False):
        time.sleep(1.2)
thread = threading.Thread(target=hidden)
thread.start()
with step("g0"):
    time.sleep(0.6)
print("after", flush=True)
thread.join()
"""
    seen = terminal.run(HEAD + program, {})
    assert any("g0" in screen for screen in seen.screens)
    assert seen.last == "after"


def test_names_cannot_move_the_cursor_and_long_ones_are_cut() -> None:
    program = "with step('evil \\x1b[2J\\nname ' + 'x' * 300):\n    time.sleep(0.7)\n"
    seen = terminal.run(HEAD + program, {}, columns=60)
    assert b"[2J" not in seen.raw.replace("\ufffd[2J".encode(), b"")
    assert [line for screen in seen.screens for line in screen.splitlines() if len(line) >= 60] == []
    assert max(len(screen.splitlines()) for screen in seen.screens) == 2  # an empty line, and the picture below it


def test_text_can_change_and_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "clock", lambda: now[0])
    monkeypatch.setattr(progress, "wanted", lambda: True)
    monkeypatch.setattr(progress._Painter, "start", lambda self: None)
    monkeypatch.setattr(progress, "waits_for", {threading.get_ident(): "waiting for the C++ compiler"}.__getitem__)
    assert progress.current_line() == ""
    with progress.step("a graph") as outer:
        outer.say("g0")
        now[0] = 62.0
        with progress.step("Inductor builds g0.forward"):
            now[0] = 74.0
            expected = "omni 1 min 14 s: g0 > Inductor builds g0.forward (12 s), waiting for the C++ compiler"
            assert progress.current_line() == expected
        assert progress.current_line() == "omni 1 min 14 s: g0, waiting for the C++ compiler"
    assert progress.current_line() == ""
    assert not progress._state.steps


@pytest.mark.parametrize("stream", [None, io.StringIO(), object()])
def test_what_is_no_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert not progress.wanted()


def test_the_line_is_written_by_a_compilation() -> None:
    program = """
import torch
from omnicomp.timeline import progress_line as progress
progress._PATIENCE, progress._INTERVAL = 0.0, 0.005
x = torch.ones(4, requires_grad=True)
torch.compile(lambda x: (x.sin() + 1).sum(), backend="omni", options={"lowerings": ["eager"]})(x).backward()
print("done")
"""
    seen = terminal.run(program, {"OMP_NUM_THREADS": "1"})
    assert re.search(rb"omni \d s: g0[ >]", seen.raw)
    assert re.search(rb"omni \d s: g0\.backward", seen.raw)
    assert seen.last == "done"
