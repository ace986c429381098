"""Launch limits of a device hold for its kernels, as the driver launches them, and for no other device's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    """Of three functions, grid and block of each kernel: on CUDA, on a device with limits, and on CUDA again."""
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1]), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(SUPPORT / "limited_launches.py")],
        env={**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_devices_kernels_have_one_warp_and_a_grid_in_multiples(launched: dict[str, Any]) -> None:
    assert all(launched["limited"])
    for grid, block in (kernel for kernels in launched["limited"] for kernel in kernels):
        assert block == [32, 1, 1]
        assert all(programs <= 48 or programs % 48 == 0 for programs in grid)
    assert any(grid[0] > 48 for kernels in launched["limited"] for grid, _ in kernels)


def test_programs_beyond_the_end_write_nothing(launched: dict[str, Any]) -> None:
    assert launched["guards"]
    assert max(launched["errors"]) < 1e-2


def test_cuda_is_launched_as_before(launched: dict[str, Any]) -> None:
    assert all(launched["before"])
    assert launched["after"] == launched["before"]
    assert any(block[0] > 32 for kernels in launched["before"] for _, block in kernels)
