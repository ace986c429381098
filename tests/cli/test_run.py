import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omnicomp.cli.run import redirected
from omnicomp.timeline import read_events

Command = Callable[..., tuple[int, str, str]]
Calls = list[dict[str, Any]]

USE = """
import torch
@torch.compile
def f(x):
    return x.sin() + 1
print(f(torch.ones(2)).shape)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


Script = Callable[[str], Path]


def test_a_script_runs_as_python_would_run_it(omnicomp: Command, script: Script) -> None:
    path = script(
        "import sys\nprint(sys.argv, __name__, sys.path[0], __file__)\nimport __main__\nprint(__main__.sys.argv[0])"
    )
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"], torch.compile)
    code, out, err = omnicomp("run", path, "a", "--mode", "-m", "--", "x")
    assert code == 0
    assert out == f"{[str(path), 'a', '--mode', '-m', '--', 'x']} __main__ {path.parent} {path}\n{path}\n"
    assert err == "omni: nothing was compiled: the program made no torch.compile call\n"
    assert (sys.path, sys.modules["__main__"], torch.compile) == before[1:]


def test_compiled_code_goes_to_omni(omnicomp: Command, script: Script, calls: Calls) -> None:
    code, out, err = omnicomp("run", script(USE))
    assert (code, out) == (0, "torch.Size([2])\n")
    assert calls == [{}]
    assert err.startswith("omni: 1 graph, 1 subgraph: eager 100.0 % of FLOPs")


def test_every_spelling_of_compile(omnicomp: Command, script: Script, calls: Calls) -> None:
    path = script(
        """
import torch
x = torch.ones(2)
class M(torch.nn.Module):
    def forward(self, x):
        return x.cos()
m = M()
m.compile(dynamic=False)
m(x)
@torch.compile(mode="max-autotune", fullgraph=True)
def f(x): return x.sin()
f(x)
torch.compile(lambda x: x.tan(), backend="inductor", options={"max_autotune": True})(x)
torch.compile(lambda x: x.exp(), backend="omni")(x)
torch.compile(lambda x: x.log(), backend="eager")(x)
torch.compile(lambda x: x.abs(), backend=lambda gm, inputs: gm)(x)
"""
    )
    code, _, err = omnicomp("run", path)
    assert code == 0
    assert calls == [{}, {"mode": "max-autotune"}, {"options": {"max_autotune": True}}, {}]
    assert "note: 1 torch.compile call named the backend 'eager' and kept it" in err
    assert "note: 1 torch.compile call named the backend '<lambda>' and kept it" in err


def test_options_of_the_command_line_join_those_of_the_call(omnicomp: Command, script: Script, calls: Calls) -> None:
    path = script(
        """
import torch
x = torch.ones(2)
torch.compile(lambda x: x.sin())(x)
torch.compile(lambda x: x.cos(), mode="reduce-overhead")(x)
torch.compile(lambda x: x.tan(), options={"max_autotune": True, "check_passes": False})(x)
"""
    )
    code, _, err = omnicomp("run", "--option", "check_passes=true", "--option", "lowerings=inductor,eager", path)
    own = {"check_passes": True, "lowerings": ["inductor", "eager"]}
    assert (code, err[:4]) == (0, "omni")
    assert calls == [
        {"options": own},
        {"mode": "reduce-overhead", "options": own},
        {"options": {"max_autotune": True, **own}},
    ]


def test_mode_of_the_command_line(omnicomp: Command, script: Script, calls: Calls) -> None:
    assert omnicomp("run", "--mode", "max-autotune", script(USE))[0] == 0
    assert calls == [{"mode": "max-autotune"}]


def test_mode_and_options_together_are_still_refused_in_a_call(omnicomp: Command, script: Script, calls: Calls) -> None:
    path = script('import torch\ntorch.compile(abs, mode="default", options={"check_passes": True})')
    code, _, err = omnicomp("run", path)
    assert code == 1
    assert "Either mode or options can be specified" in err


def test_a_call_inside_compiled_code_is_traced(calls: Calls) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    with redirected(None, {}) as counts:

        @torch.compile(fullgraph=True)
        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.compile(g)(x) + 1

        f(torch.ones(2))
    assert counts.sent == 1
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("text", "expected", "message"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('bye')", 1, "bye\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("x = (", 1, "SyntaxError"),
    ],
)
def test_the_exit_status_is_the_scripts(
    omnicomp: Command, script: Script, tmp_path: Path, text: str, expected: int, message: str
) -> None:
    code, _, err = omnicomp("run", "--audit", tmp_path / "a.txt", script(text))
    assert code == expected
    assert message in err
    assert "omni: nothing was compiled" in err
    assert (tmp_path / "a.txt").read_text().startswith("omni: nothing was compiled")


def test_a_traceback_has_the_scripts_frames_alone(omnicomp: Command, script: Script, calls: Calls) -> None:
    path = script(
        """
import torch
def fail():
    try:
        torch.compile(abs, no_such_argument=1)
    except TypeError as error:
        raise ValueError("outer") from error
fail()
"""
    )
    code, _, err = omnicomp("run", path)
    assert code == 1
    frames = [line for line in err.splitlines() if line.lstrip().startswith("File")]
    assert len(frames) == 3
    assert all(str(path) in frame for frame in frames)
    assert "ValueError: outer" in err


def test_a_scripts_own_excepthook_is_used(omnicomp: Command, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    path = script("import sys\nsys.excepthook = lambda *found: print('hook', found[1])\nraise ValueError('boom')")
    code, out, err = omnicomp("run", path)
    assert (code, out) == (1, "hook boom\n")
    assert "Traceback" not in err


def test_compile_is_restored_after_a_failure(omnicomp: Command, script: Script) -> None:
    original = torch.compile
    omnicomp("run", script("raise ValueError"))
    assert torch.compile is original


def test_compiled_but_never_called(omnicomp: Command, script: Script, calls: Calls) -> None:
    code, _, err = omnicomp("run", script("import torch\ntorch.compile(abs)"))
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("omni: nothing was compiled: Dynamo gave no graph for a torch.compile call; ")


def test_the_audit_is_written_in_the_format_of_its_name(
    omnicomp: Command, script: Script, calls: Calls, tmp_path: Path
) -> None:
    for name, start in (("a.html", "<!doctype html>"), ("a.json", "{"), ("new/a.txt", "omni: 1 graph")):
        assert omnicomp("run", "--audit", tmp_path / name, script(USE))[0] == 0
        assert (tmp_path / name).read_text().startswith(start)
        torch.compiler.reset()
        from omnicomp.timeline import current

        current().clear()


def test_the_timeline_is_written(omnicomp: Command, script: Script, calls: Calls, tmp_path: Path) -> None:
    assert omnicomp("run", "--timeline", tmp_path / "t.jsonl", script(USE))[0] == 0
    assert [event.type for event in read_events(tmp_path / "t.jsonl")] == ["capture", "subgraph", "ran"]


def test_a_module(omnicomp: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("")
    (tmp_path / "some_package" / "tool.py").write_text(
        "import sys\nprint(sys.argv, __name__, __package__, sys.path[0])"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = omnicomp("run", "--mode", "default", "-m", "some_package.tool", "--mode", "x", "-m", "y")
    assert code == 0
    words = [str(tmp_path / "some_package" / "tool.py"), "--mode", "x", "-m", "y"]
    assert out == f"{words} __main__ some_package {tmp_path}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "there is no script nope.py"),
        (["-m", "no_such_module"], "there is no module no_such_module"),
        ([], "run needs a script"),
        (["--option", "check_passes", "s.py"], "--option can't be 'check_passes'; it takes KEY=VALUE, for example"),
        (["--option", "check_pases=true", "s.py"], 'did you mean "check_passes"'),
        (["--mode", "max-autotun", "s.py"], 'did you mean "max-autotune"'),
        (["--audit", "a.pdf", "s.py"], "no known extension"),
        (["--audit", "s.py/a.html", "s.py"], "can't be written"),
        (["--timeline", "s.py/t.jsonl", "s.py"], "can't be written"),
    ],
)
def test_bad_input_is_one_sentence_and_runs_nothing(
    omnicomp: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("print('ran')")
    code, out, err = omnicomp("run", *words)
    assert (code, out) == (2, "")
    assert err.startswith("omnicomp: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_directory_with_a_main(omnicomp: Command, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("import other")
    (tmp_path / "other.py").write_text("print('other')")
    assert omnicomp("run", tmp_path)[:2] == (0, "other\n")


def test_json_of_a_run_can_be_read(omnicomp: Command, script: Script, calls: Calls, tmp_path: Path) -> None:
    omnicomp("run", "--audit", tmp_path / "a.json", script(USE))
    assert json.loads((tmp_path / "a.json").read_text())["graphs"][0]["nodes"] == 1


def test_the_graph_after_each_stage_is_written(omnicomp: Command, script: Script, tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    assert omnicomp("run", "--dump", folder, "--option", "lowerings=eager", script(USE))[0] == 0
    names = sorted(path.name for path in folder.rglob("*.py"))
    assert names == ["00_dynamo.py", "01_autograd_inference.py", "02_placement_inference.py"]
    code, _, err = omnicomp("run", "--dump", folder, script(USE))
    assert (code, "is not empty" in err) == (2, True)
