"""Inductor's remote cache, by a real Redis server: a second machine builds nothing."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

PROGRAM = """
import sys, torch, omnicomp
def attention(x): return (x @ x.mT / 3).softmax(-1) @ torch.digamma(x.abs() + 1).sin()
x = torch.arange(24.0).reshape(1, 4, 6).sin()
for options in ({}, {"lowerings": {"aten.digamma": "eager"}}, {"dtype_policy": "bf16"}):
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="omni", options={"summary": False, **options})
    tolerance = 0.05 if "dtype_policy" in options else 1e-5
    torch.testing.assert_close(compiled(x), attention(x), rtol=tolerance, atol=tolerance)
assert not omnicomp.audit().mismatches
print(sorted({(e.cache, e.verdict) for e in omnicomp.timeline.events() if e.type == "cache" and e.cache != "verdicts"}))
print([len(graph.rewrites) for graph in omnicomp.audit().graphs])
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("redis", reason="the Python package redis is not installed")
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = str(free.getsockname()[1])
    command = [server, "--port", number, "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(100):
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", int(number))) == 0:
                        break
                time.sleep(0.1)
            yield number
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.inductor
def test_a_second_process_with_another_cache_folder_builds_nothing(port: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()

    def machine(name: str, **more: str) -> list[str]:
        environment = {
            "HOME": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name),
            "OMNICOMP_CACHE_DIR": str(tmp_path / name / "omnicomp"),
            "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_REDIS_HOST": "127.0.0.1",
            "TORCHINDUCTOR_REDIS_PORT": port,
            **more,
        }
        return python("-c", PROGRAM, environment=environment, fresh=True, check=True).stdout.splitlines()

    verdicts, rewrites = machine("one")
    assert "('aot_autograd', 'miss')" in verdicts
    verdicts, again = machine("two", PATH=str(tmp_path / "bin"))
    assert "miss" not in verdicts
    assert "('aot_autograd', 'hit')" in verdicts
    assert again == rewrites
    assert not list((tmp_path / "two").rglob("*.cpp"))
