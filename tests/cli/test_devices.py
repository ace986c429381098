"""`omnicomp bringup` and `omnicomp conformance`: status, files, and bad input; what they run has tests of its own."""

import json
from typing import Any

import pytest

from omnicomp.testing.bringup import Bringup, Row
from omnicomp.testing.bringup.ladder import STEPS
from omnicomp.testing.conformance import Report, Result


def table(matched: bool) -> Bringup:
    whole = {"matched": matched, "reason": "" if matched else "it raises", "summary": "", "fallbacks": {}}
    row = Row(
        operator="aten::relu", dtypes=("float32",), shapes=("2d",), calls=2, kernel="native",
        steps=dict.fromkeys(STEPS, "yes"),
    )  # fmt: skip
    return Bringup(model="bert", device="cpu", training=False, graphs=1, note="", rows=(row,), whole=whole)


@pytest.mark.parametrize("matched", [True, False])
def test_bringup_prints_and_writes_the_table(omnicomp, monkeypatch, tmp_path, matched):
    asked: dict[str, Any] = {}

    def bringup(model: str, device: str, **more: Any) -> Bringup:
        asked.update(more, model=model, device=device)
        return table(matched)

    monkeypatch.setattr("omnicomp.cli.bringup.bringup", bringup)
    paths = tmp_path / "new" / "a.json", tmp_path / "a.html"
    words = ("--train", "--lowering", "eager", "--lowering", "override", "--size", "cpu")
    code, out, _ = omnicomp("bringup", "bert", "--device", "cpu", "--json", paths[0], "--html", paths[1], *words)
    assert code == (0 if matched else 1)
    assert "2 of 2 operator calls match the CPU" in out
    assert (asked["model"], asked["device"], asked["training"], asked["size"]) == ("bert", "cpu", True, "cpu")
    assert list(asked["lowerings"]) == ["eager", "override"]
    assert json.loads(paths[0].read_text())["ok"] is matched
    assert "<title>omnicomp bring-up</title>" in paths[1].read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("berd", "--device", "cpu"), 'did you mean "bert"?'),
        (("bert", "--device", "cpu", "--size", "huge"), "size can't be 'huge'; it takes tiny, cpu or gpu"),
        (("bert", "--device", "cpu", "--json", "/proc/none/a.json"), "can't be written"),
    ],
)
def test_bad_input_of_bringup_is_one_sentence(omnicomp, words, message):
    code, out, err = omnicomp("bringup", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("verdict", ["passed", "skipped", "failed", "crashed"])
def test_conformance_prints_each_check_and_says_whether_the_device_conforms(omnicomp, monkeypatch, tmp_path, verdict):
    result = Result(name="errors.x", verdict=verdict, found="seen", todo="")

    def conformance(device: str, *, say: Any, **more: Any) -> Report:
        assert (device, more["quick"], list(more["groups"])) == ("cpu", True, ["errors"])
        say(result)
        return Report(device=device, quick=True, results=(result,))

    monkeypatch.setattr("omnicomp.cli.conformance.conformance", conformance)
    path = tmp_path / "a.json"
    code, out, _ = omnicomp("conformance", "cpu", "--quick", "--group", "errors", "--json", path)
    assert code == (0 if verdict in ("passed", "skipped") else 1)
    assert out.splitlines()[0].split() == [verdict, "errors.x", "seen"]
    assert json.loads(path.read_text())["counts"][verdict] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gxu", "--group", "errrs"), 'did you mean "errors"?'),
        (("gxu", "--group", "errors"), "unknown device 'gxu'"),
        (("cpu", "--group", "errors", "--setup", "nothing.py:here"), "there is no file nothing.py"),
    ],
)
def test_bad_input_of_conformance_is_one_sentence(omnicomp, words, message):
    code, out, err = omnicomp("conformance", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
