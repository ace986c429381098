import json

import pytest

from omnicomp.errors import OmnicompError
from omnicomp.testing.conformance import Report, Result, conformance, results, to_text


@pytest.mark.slow
def test_a_crash_of_the_interpreter_in_one_operator_is_a_result():
    found = conformance("cpu", setup="job_suites:crash_in_exp", operators="exp,sin", groups=["operators"])
    verdicts = {result.name: result.verdict for result in found.results}
    # On the CPU a kernel is compared with itself.
    assert verdicts == {"operators.exp": "crashed", "operators.sin": "passed"}
    (crashed,) = (result for result in found.results if result.verdict == "crashed")
    assert "SIGABRT" in crashed.found
    assert not found.ok
    body = json.loads(found.to_json())
    assert (body["ok"], body["counts"]["crashed"], body["checks"][0]["name"]) == (False, 1, "operators.exp")
    assert "does not conform: 1 passed, 1 crashed" in found.summary()


def test_one_line_a_check_and_one_on_what_to_do():
    wrong = Result(name="errors.x", verdict="failed", found="it raises nothing", todo="throw")
    assert to_text(wrong).splitlines()[1].strip() == "-> throw"
    right = Result(name="errors.y", verdict="passed", found="twice")
    assert len(to_text(right).splitlines()) == 1
    assert Report(device="x", quick=True, results=(right,)).ok
    assert not Report(device="x", quick=True, results=(right, wrong)).ok


def test_an_unknown_group_is_an_error():
    with pytest.raises(OmnicompError, match=r"group can't be 'contracts'.*did you mean .contract."):
        list(results("cpu", groups=["contracts"]))
