import pytest

pytest_plugins = ("pytester",)

_FILE = """
from omnicomp.testing.conformance import pytest_checks

test_mine = pytest_checks("cpu", groups=["contract", "errors", "operators"], operators="add,mm")
"""


def test_the_checks_are_tests_of_pytest(pytester):
    pytester.makepyfile(test_device=_FILE)
    chosen = "add or bad_arguments or fault_copy"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", chosen, "-rs")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["skipped"]) == (2, 1)
    result.stdout.fnmatch_lines(["*torch.cpu has no inject_fault*"])


@pytest.mark.slow
def test_the_plug_in_takes_the_device_from_the_command_line(pytester):
    result = pytester.runpytest_inprocess(
        "-p", "omnicomp.testing.conformance.plugin", "--pyargs", "omnicomp.testing.conformance.test_device",
        "--device", "gxu", "--quick", "-k", "bad_arguments", "-p", "no:cacheprovider",
    )  # fmt: skip
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*unknown device 'gxu'*"])
