import hashlib
import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from omnicomp.cli.new import TEMPLATES, check_name, write_device
from omnicomp.errors import DeviceError, OmnicompError
from omnicomp.testing.conformance.suite import check_names

Command = Callable[..., tuple[int, str, str]]


def test_the_package_is_complete(omnicomp: Command, tmp_path: Path) -> None:
    code, out, err = omnicomp("new", "device", "gx_one", "--path", tmp_path)
    assert (code, err) == (0, "")
    target = tmp_path / "omnicomp-gx_one"
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml",
        "README.md",
        "tests/test_device.py",
        *(f"omnicomp_gx_one/{name}" for name in ("__init__.py", "device.py", "driver.py", "inductor.py", "module.py")),
        *(
            f"omnicomp_gx_one/csrc/{name}"
            for name in (
                "all.cpp",
                "driver.h",
                "driver.cpp",
                "operators.cpp",
                "layers.cpp",
                "autocast.cpp",
                "autograd.cpp",
            )
        ),
    }
    assert all(str(target / name) in out for name in files)
    assert f"pip install --no-build-isolation -e {target}" in out
    assert "omnicomp conformance gx_one --quick" in out


def test_every_place_is_filled_in(tmp_path: Path) -> None:
    written = write_device("gxu", tmp_path)
    assert len(written) == len(list(TEMPLATES.rglob("*.in")))
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert "$" + "{" not in text
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    project = (tmp_path / "omnicomp-gxu" / "pyproject.toml").read_text(encoding="utf-8")
    assert 'name = "omnicomp-gxu"' in project
    assert '[project.entry-points."omnicomp.devices"]\ngxu = "omnicomp_gxu.device:GxuDevice"\n' in project


@pytest.mark.parametrize("name", ["Gxu", "gx2", "gx-u", "2gx", "", "class", "gxu:0", "../gxu"])
def test_a_name_that_is_no_word(omnicomp: Command, tmp_path: Path, name: str) -> None:
    code, out, err = omnicomp("new", "device", "--path", tmp_path, "--", name)
    assert (code, out) == (2, "")
    assert err == (
        "omnicomp: error: a device type is a word of lower-case letters and underscores, as torch has it, "
        f"not {name!r}\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu", "sim", "meta", "hpu", "auto", "privateuseone"])
def test_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(DeviceError, match=f"there already is a device type '{name}'"):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "owner"), [("softmax", "torch"), ("backward", "torch.Tensor"), ("forward", "torch.Module")]
)
def test_a_name_that_is_something_else_in_torch(name: str, owner: str) -> None:
    with pytest.raises(DeviceError, match=rf"{owner}\.{name} is something else already"):
        check_name(name)


def test_nothing_is_overwritten(omnicomp: Command, tmp_path: Path) -> None:
    target = tmp_path / "omnicomp-gxu"
    target.mkdir()
    code, out, err = omnicomp("new", "device", "gxu", "--path", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"omnicomp: error: {target} exists already; name another folder with --path\n"
    assert list(target.iterdir()) == []


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OmnicompError, match="can't be written"):
        write_device("gxu", tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "it can't be registered:\n  - scheduling is 'cp'\n  - no wrapper",
            "registered: - scheduling is 'cp' - no wrapper",
        ),
        (
            "Error building\nc++ -c a.cpp\na.cpp:3:5: error: expected ';'\nninja: stopped",
            "Error building a.cpp:3:5: error:",
        ),
    ],
)
def test_its_problem_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    write_device("gxu", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "omnicomp-gxu"))
    driver = importlib.import_module("omnicomp_gxu.driver")

    def fails() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(driver, "enable", fails)
    try:
        assert told in driver.problem()
        assert "\n" not in driver.problem()
    finally:
        for name in [name for name in sys.modules if name.startswith("omnicomp_gxu")]:
            del sys.modules[name]


def test_its_sources_are_right_in_cpp(tmp_path: Path) -> None:
    """Without code or a linker, which take minutes; what was right is not read again."""
    write_device("gxu", tmp_path)
    folder = tmp_path / "omnicomp-gxu" / "omnicomp_gxu" / "csrc"
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.*")))
    read = hashlib.sha256(sources + repr((torch.__version__, sys.version)).encode()).hexdigest()
    right = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / f"right_cpp_{read}"
    if right.exists():
        return
    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command = [cpp_extension.get_cxx_compiler(), "-fsyntax-only", "-w", "-std=c++20", "-DTORCH_EXTENSION_NAME=gxu"]
    command += [f"-I{each}" for each in folders]
    done = subprocess.run([*command, "all.cpp"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    right.touch()


@pytest.mark.inductor
@pytest.mark.slow
def test_it_installs_and_passes_its_own_tests(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Built from nothing; all of its tests, of the conformance suite the contract alone."""
    write_device("gxu", tmp_path)
    target, site = tmp_path / "omnicomp-gxu", tmp_path / "site"
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"),
        "MAX_JOBS": "2",
    }

    def run(*command: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            cwd=target, capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site, target)
    assert (site / "omnicomp_gxu" / "csrc" / "driver.cpp").is_file()
    out = run("pytest", "-q", "-p", "no:cacheprovider", "tests", "-k", "not conformance or contract")
    assert f"{19 + len(check_names(groups=['contract']))} passed" in out
    out = run("omnicomp", "doctor", "--device", "gxu")
    assert "ok      gxu scheduling" in out
    assert "missing" not in out
