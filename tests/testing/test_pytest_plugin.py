"""The plug-in for pytest, in runs of pytest of its own: processes, as torch can't be imported twice in one."""

import importlib
from pathlib import Path

import pytest

from omnicomp.options.acknowledged import _toml

pytest_plugins = ["pytester"]

PLUGIN = "omnicomp.testing.pytest_plugin"
COMPILED = """
import pytest
import torch


def program(x):
    return torch.topk(x * 2, 2)[0].exp() + 1


def compiled(function=program, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="omni", options={"lowerings": ["toy", "eager"], "summary": False, **options})
"""
TESTS = """
def test_fixture_passes(omni_audit):
    assert not omni_audit.audit.graphs
    compiled()(torch.rand(3, 4))
    assert [fallback.op for fallback in omni_audit.audit.fallbacks if fallback.node] == ["aten.topk.default"]


def test_fixture_passes_without_what_another_test_compiled(omni_audit):
    assert not omni_audit.audit.graphs
    compiled(torch.exp)(torch.rand(3))
    assert len(omni_audit.audit.graphs) == 1
    omni_audit.assert_no_fallback()


def test_fixture_fails(omni_audit):
    compiled()(torch.rand(3, 4))
    omni_audit.assert_no_fallback()


def test_allowed_passes(omni_audit):
    compiled()(torch.rand(3, 4))
    omni_audit.assert_no_fallback(allow=["aten.topk"])
    omni_audit.assert_no_fallback(max_nodes=1)


def never_called():
    import omnicomp
    omnicomp.omni(torch.fx.symbolic_trace(lambda x: x.sin()), [torch.rand(3)], options={"lowerings": ["eager"]})


def test_never_called_fails(omni_audit):
    never_called()
    omni_audit.assert_no_fallback()


def test_never_called_passes_where_that_is_allowed(omni_audit):
    never_called()
    omni_audit.assert_no_fallback(allow_unfinished=True)


def test_text_is_no_list_passes(omni_audit):
    with pytest.raises(TypeError, match="takes a list"):
        omni_audit.assert_no_fallback(allow="aten.topk")


@pytest.fixture
def made():
    return compiled()(torch.rand(3, 4))


@pytest.mark.omni_no_fallback
def test_marker_fails():
    compiled()(torch.rand(3, 4))


@pytest.mark.omni_no_fallback
def test_marker_fails_for_what_a_fixture_compiled(made):
    pass


@pytest.mark.omni_no_fallback(allow=["aten.topk"])
def test_marker_passes():
    compiled()(torch.rand(3, 4))


@pytest.mark.omni_no_fallback
def test_own_error_fails():
    compiled()(torch.rand(3, 4))
    raise ValueError("the test's own")


@pytest.mark.omni_no_fallback(["aten.topk"])
def test_marker_by_position_fails():
    compiled(torch.exp)(torch.rand(3))


@pytest.mark.omni_no_fallback(alow=["aten.topk"])
def test_marker_with_a_wrong_name_fails():
    compiled(torch.exp)(torch.rand(3))


@pytest.mark.omni_no_fallback
class TestOfAClass:
    @pytest.mark.omni_no_fallback(allow={"aten.topk"})
    def test_the_closest_marker_passes(self):
        compiled()(torch.rand(3, 4))

    def test_the_marker_of_the_class_fails(self):
        compiled()(torch.rand(3, 4))


def test_wrong_values_are_refused_passes(omni_audit):
    for wrong in ({"max_nodes": "3"}, {"max_nodes": -1}, {"allow": [3]}, {"allow": 3}):
        with pytest.raises(TypeError, match="assert_no_fallback: (allow|max_nodes) "):
            omni_audit.assert_no_fallback(**wrong)


@pytest.mark.omni_no_fallback
def test_nothing_compiled_fails():
    pass
"""


def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, text: str, *words: str) -> pytest.RunResult:
    # The plug-in is named, as it may be installed or not.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (pytester.path / ".git").mkdir(exist_ok=True)
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", *words)


def test_fixture_marker_and_summary(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, COMPILED + TESTS, "-rA")
    lines = result.stdout.str().splitlines()
    # "PASSED test_….py::test_… - error": every test says in its name how it ends.
    ended = [line.split(" - ")[0].split() for line in lines if line.startswith(("PASSED ", "FAILED ", "ERROR "))]
    assert len(ended) == 17
    for word, name in ended:
        assert ("_passes" in name) == (word == "PASSED"), (word, name)
        assert ("_fails" in name) == (word == "FAILED"), (word, name)
    result.stdout.fnmatch_lines(
        [
            "*- aten.topk.default at *.py:*: toy: it has no form of the operator*",
            "*ValueError: the test's own*",
            "*takes allow=*by name, not ?'aten.topk'?*",
            "*takes allow=*by name, not 'alow'*",
            "*omni compiled nothing in this test*",
        ]
    )
    summary = result.stdout.str().partition("omni: fallbacks to eager")[2]
    assert summary.splitlines()[1].startswith("aten.topk.default at ")
    assert summary.splitlines()[1].endswith(" (9 tests)")
    # The lines of the test and its verdict, and not those of the plug-in.
    assert "result = yield" not in result.stdout.str()


def test_a_project_file_that_is_no_toml_is_told_and_ends_no_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
from pathlib import Path
from omnicomp.timeline import Capture, current


def test_broken_meanwhile():
    Path("pyproject.toml").write_text("[[tool.")
    current().append(Capture(graph="g0"))
"""
    result = run(pytester, monkeypatch, text)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["what fell back can't be told: AcknowledgeError: *pyproject.toml is no TOML*(1 test)"])


@pytest.mark.slow
def test_what_the_project_acknowledges_is_neither_a_failure_nor_in_the_summary(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyprojecttoml(
        '[[tool.omnicomp.acknowledge]]\nselector = "aten.topk"\nreason = "later"\nexpires = 9999-01-01'
    )
    marked = "\n\n@pytest.mark.omni_no_fallback\ndef test_acknowledged():\n    compiled()(torch.rand(3, 4))\n"
    result = run(pytester, monkeypatch, COMPILED + marked)
    result.assert_outcomes(passed=1)
    assert "fallbacks to eager" not in result.stdout.str()


def test_a_run_that_compiles_nothing_does_not_import_torch(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import sys


def test_one(omni_audit):
    assert not omni_audit.audit.graphs
    assert "torch" not in sys.modules


def test_two():
    assert "torch" not in sys.modules
"""
    run(pytester, monkeypatch, text).assert_outcomes(passed=2)


def test_the_package_declares_it() -> None:
    project = _toml.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert module == PLUGIN
    assert importlib.import_module(module).omni_audit


def test_the_marker_is_declared(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(pytester, monkeypatch, "", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.omni_no_fallback(allow=(), max_nodes=0): what the test compiles must*"])
