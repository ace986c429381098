"""What is installed works from anywhere, and the links at the root are refused as packages."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PROGRAM = """
import torch
f = torch.compile(lambda x: torch.softmax(x, -1), backend="omni", options={"lowerings": ["eager"]})
assert torch.equal(f(torch.ones(2, 3)), torch.softmax(torch.ones(2, 3), -1))
import omnicomp
print(omnicomp.__file__)
"""


def run(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that the build leaves nothing behind in the checkout.
    source = tmp_path_factory.mktemp("source") / "omnicomp"
    copy = run("git", "clone", "--quiet", str(ROOT), str(source), folder=folder)
    if copy.returncode != 0:
        pytest.skip(f"the checkout is no git repository: {copy.stderr}")
    built = run(
        *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source), folder=folder
    )
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_package_and_nothing_at_the_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"omnicomp", "omnicomp_graphs.py"}
    assert {"omnicomp/passes/attention_fusion.py", "omnicomp/passes/attention/match.py"} <= set(names)
    assert "omnicomp/lowerings/overrides/softmax_topk/cpu.py" in names
    assert {"omnicomp/py.typed", "omnicomp/audit/schema/report-2.json"} <= set(names)
    assert {"omnicomp/audit/page/page.css", "omnicomp/audit/page/app.js"} <= set(names)
    assert {"omnicomp/devices/sim/csrc/runtime.cpp", "omnicomp/devices/sim/csrc/runtime.h"} <= set(names)
    assert {
        "omnicomp/cli/templates/device/pyproject.toml.in",
        "omnicomp/cli/templates/engine/package/engine.py.in",
        "omnicomp/cli/templates/device/package/csrc/driver.cpp.in",
    } <= set(names)


def test_an_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    installed = run(*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    result = run(sys.executable, "-c", PROGRAM, folder=tmp_path, PYTHONPATH=str(target))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(target / "omnicomp" / "__init__.py")


@pytest.mark.parametrize("name", ["passes", "lowerings"])
def test_importing_the_links_at_the_root_is_refused(name: str) -> None:
    assert (ROOT / name).is_symlink()
    result = run(sys.executable, "-c", f"import {name}", folder=ROOT)
    assert result.returncode != 0
    assert f"import omnicomp.{name}" in result.stderr


def test_torch_internals_are_imported_in_one_place() -> None:
    """Only omnicomp._torch may import from torch's private packages; it is what breaks with a new version."""
    private = (
        "torch._inductor",
        "torch._dynamo",
        "torch._functorch",
        "torch._guards",
        "torch._subclasses",
        "functorch",
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in ROOT.glob("omnicomp/**/*.py")
        if "_torch" not in path.parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(tuple(f"{verb} {name}" for verb in ("import", "from") for name in private))
    ]
    assert found == []
