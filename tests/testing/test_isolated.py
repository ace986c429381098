"""?"""

import signal

import pytest

from omnicomp.errors import OmnicompError
from omnicomp.testing.isolated import find_function, run_isolated


def test_jobs_behind_one_that_crashes_or_hangs_still_run():
    found = {outcome.name: outcome for outcome in run_isolated("job_suites:jobs", {"hang": 600.0}, seconds=2.0)}
    assert list(found) == ["first", "fail", "crash", "wait", "last"]
    assert found["first"].result is not None
    assert "ValueError: no such thing" in found["fail"].raised
    assert found["crash"].crashed == signal.SIGSEGV.name
    assert "the driver says good-bye" in found["crash"].tail
    assert found["wait"].crashed == "no answer in 2 s"
    last = found["last"].result
    assert last is not None
    assert last["pid"] != found["first"].result["pid"]


def test_a_suite_that_can_not_be_made_is_one_error():
    with pytest.raises(OmnicompError, match="there is no suite today"):
        list(run_isolated("job_suites:refused", {}))


def test_functions_are_found_in_files_and_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    return 7\n")
    assert find_function(f"{tmp_path}/mine.py:build")() == 7
    assert find_function("os.path:join")("a", "b") == "a/b"


def test_what_is_not_there_is_one_sentence(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    cases = {
        "build": "names no function",
        f"{tmp_path}/absent.py:build": "there is no file",
        f"{tmp_path}/broken.py:build": "ModuleNotFoundError",
        "nothing_of_that_name:build": "can't be imported",
        "os.path:nothing": "has no function 'nothing'",
    }
    for name, message in cases.items():
        with pytest.raises(OmnicompError, match=message):
            find_function(name)
