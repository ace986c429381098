import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnicomp.cli.new import ENGINE_TEMPLATES, check_engine_name, write_engine
from omnicomp.errors import EngineError

Command = Callable[..., tuple[int, str, str]]


def test_the_package_is_complete(omnicomp: Command, tmp_path: Path) -> None:
    code, out, err = omnicomp("new", "engine", "gx_1", "--path", tmp_path)
    assert (code, err) == (0, "")
    target = tmp_path / "omnicomp-gx_1"
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml", "README.md", "tests/test_engine.py", "omnicomp_gx_1/__init__.py", "omnicomp_gx_1/engine.py",
    }  # fmt: skip
    assert all(str(target / name) in out for name in files)
    assert f"pip install --no-deps --no-build-isolation -e {target}" in out


def test_every_place_is_filled_in(tmp_path: Path) -> None:
    written = write_engine("gxu", tmp_path)
    assert len(written) == len(list(ENGINE_TEMPLATES.rglob("*.in")))
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert "$" + "{" not in text
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    project = (tmp_path / "omnicomp-gxu" / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."omnicomp.engines"]\ngxu = "omnicomp_gxu.engine:GxuEngine"\n' in project


@pytest.mark.parametrize("name", ["Gxu", "gx-u", "2gx", "", "class", "../gxu"])
def test_a_name_that_is_no_word(omnicomp: Command, tmp_path: Path, name: str) -> None:
    code, out, err = omnicomp("new", "engine", "--path", tmp_path, "--", name)
    assert (code, out) == (2, "")
    assert err == (
        "omnicomp: error: the name of an engine is a word of lower-case letters, digits and underscores, "
        f"not {name!r}\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["toy", "openvino", "eager", "inductor", "override", "device"])
def test_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(EngineError, match=f"there already is a lowering '{name}'"):
        check_engine_name(name)


def test_nothing_is_overwritten(omnicomp: Command, tmp_path: Path) -> None:
    (tmp_path / "omnicomp-gxu").mkdir()
    code, _, err = omnicomp("new", "engine", "gxu", "--path", tmp_path)
    assert code == 2
    assert err == f"omnicomp: error: {tmp_path / 'omnicomp-gxu'} exists already; name another folder with --path\n"


@pytest.mark.slow
def test_it_installs_and_passes_its_own_tests(tmp_path: Path) -> None:
    write_engine("gxu", tmp_path)
    target, site = tmp_path / "omnicomp-gxu", tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*command: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            cwd=target, capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site, target)
    assert "22 passed" in run("pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert "ok      engine gxu" in run("omnicomp", "doctor")
