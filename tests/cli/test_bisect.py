"""`omnicomp bisect` lists what is known to fail, repeats it from a script of torch alone, narrows and forgets it."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from processes import python
from torch._inductor import lowering
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from omnicomp._torch.inductor.repro_script import script_of
from omnicomp._torch.inductor.store import folder
from omnicomp.builder import known_failures
from omnicomp.builder.known_failures import CACHE, Entry
from omnicomp.builder.on_failure import write_script
from omnicomp.cli import app
from omnicomp.cli.bisect import run_script
from omnicomp.errors import OmnicompError
from omnicomp.timeline import Reason

SIN = torch.ops.aten.sin.default


def script(function, *inputs, values: bool = False, mode: str = "fake") -> Path:
    module = make_fx(lambda *args: (function(*args),), tracing_mode=mode)(*inputs)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    return write_script(module, fakes, "RuntimeError: planted", values=values)


def planted(*args, **kwargs):
    raise RuntimeError("planted in sin")


def bisect(*arguments: object):
    return CliRunner().invoke(app, ["bisect", *map(str, arguments)])


def test_nothing_known() -> None:
    result = bisect()
    assert result.exit_code == 0
    assert "Nothing is known to fail" in result.output


def test_what_is_known_is_listed_and_forgotten() -> None:
    path = script(torch.sin, torch.randn(3))
    reason = Reason(code="cut_out", sentence="Inductor can't build it", node="sin (aten.sin.default)")
    untuned = Reason(code="build_failed", sentence="no memory to tune")
    entry = Entry(key="k", graph="g0.forward model.py:3", cut={"sin": reason}, scripts=(str(path),), builds=4)
    entry = dataclasses.replace(entry, untuned=untuned)
    assert known_failures.STORE.write("k", entry) == ""
    (folder() / CACHE / "broken.json").write_text("{")
    output = bisect().output
    for piece in (
        "g0.forward model.py:3",
        "sin (aten.sin.default): Inductor can't build it",
        str(path),
        "can't be read",
        "built without autotuning: no memory to tune",
    ):
        assert piece in output
    assert "Forgot 2 verdicts" in bisect("--forget", path).output
    assert known_failures.entries() == []


@pytest.mark.inductor
def test_a_script_fails_as_long_as_inductor_does_and_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(lambda x: (x + 1).sin() * 2, torch.randn(4, 6).t())
    monkeypatch.setitem(lowering.lowerings, SIN, planted)
    said: list[str] = []
    assert run_script(path, said.append) == 1
    assert "It still fails" in said[0]
    assert "planted in sin" in said[0]
    assert any("sin (aten.sin.default) fails by itself" in line for line in said)
    smaller = Path(said[-1].rpartition(": ")[2])
    assert "aten.mul" not in smaller.read_text()
    monkeypatch.undo()
    python(smaller, check=True)


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_script_ends_with_one_while_it_fails(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(torch.sin, torch.randn(5, 3), mode=mode)
    monkeypatch.setitem(lowering.lowerings, SIN, planted)
    assert bisect(path).exit_code == 1
    monkeypatch.setattr(sys, "argv", [str(path)])
    settings = torch._inductor.config.patch(fx_graph_cache=False, generate_intermediate_hooks=False)
    with settings, pytest.raises(Exception, match="planted in sin"):
        exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})


@pytest.mark.inductor
def test_wrong_values_are_narrowed_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(lambda x: (x + 1).sin() * 2, torch.randn(5), values=True)
    assert run_script(path, print) == 0
    monkeypatch.setitem(lowering.lowerings, SIN, lowering.lowerings[torch.ops.aten.cos.default])
    said: list[str] = []
    assert run_script(path, said.append) == 1
    assert "is wrong on inductor" in said[0]
    assert any("sin (aten.sin.default) fails by itself" in line for line in said)


def test_no_data_of_the_user_is_written() -> None:
    secret = torch.full((3,), 1234.5678)
    module = make_fx(lambda x: (x * secret,))(torch.full((3,), 8765.4321))
    text = script_of(module, [torch.full((3,), 8765.4321)], "an error")
    assert "reader.tensor(buf0, (3,)" in text
    assert "1234" not in text
    assert "8765" not in text


def test_settings_that_are_no_text_are_left_out() -> None:
    module = make_fx(lambda x: (x.sin(),))(torch.randn(3))
    patched = {"max_autotune": True, "post_grad_custom_post_pass": lambda graph: None}
    with torch._inductor.config.patch(patched):
        text = script_of(module, [torch.randn(3)], "an\nerror")
    assert text.startswith("# an error\n")
    assert "max_autotune = True" in text
    assert "custom_post_pass" not in text


def test_a_graph_that_cannot_be_written_down_has_no_script() -> None:
    module = make_fx(lambda x: (x.to_dense(),))(torch.eye(2).to_sparse())
    with pytest.raises(NotImplementedError, match="storage"):
        script_of(module, [torch.eye(2).to_sparse()], "an error")


@pytest.mark.parametrize("text", ["x = (", "x = 1"])
def test_another_script_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text(text)
    with pytest.raises(OmnicompError, match=r"other\.py"):
        run_script(path, print)
    with pytest.raises(OmnicompError, match="no file"):
        run_script(tmp_path / "none.py", print)
