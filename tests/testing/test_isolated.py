import signal

import pytest

from omnicomp.errors import OmnicompError
from omnicomp.testing.isolated import run_isolated


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
