import subprocess
from collections.abc import Callable

import pytest
from pages import ROOT, blocks


@pytest.mark.slow
def test_the_example_of_the_page_runs(in_process: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = in_process("\n".join(block.text for block in blocks(ROOT / "docs" / "sim.md", "python")))
    assert done.returncode == 0, done.stderr
