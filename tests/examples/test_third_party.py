"""The package of `examples/third_party`, installed by pip: omnicomp finds its pass, override, engine and device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "third_party"


@pytest.mark.slow  # each of the four is found by a test of its room
def test_all_four_are_found_do_their_work_and_are_shown(tmp_path: Path) -> None:
    """By the package's own tests, in a process of its own: `import torch` there makes the device known."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source)  # pip leaves files beside the sources
    path = os.pathsep.join(filter(None, (str(site), str(ROOT), os.environ.get("PYTHONPATH"))))

    def run(*command: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", site, source)
    assert "8 passed" in run("pytest", "-q", "-p", "no:cacheprovider", source / "tests")
