"""One cache folder for many threads and processes, some of them killed: whoever comes next is right and complete."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import ROOT, python

PROGRAM = """
import sys, threading, torch, omnicomp
from concurrent.futures import ThreadPoolExecutor
tag, threads = sys.argv[1], int(sys.argv[2])
def work(number):
    def function(x): return (x @ x.mT / (number + 2)).softmax(-1) @ torch.digamma(x.abs() + 1).sin() + int(tag)
    compiled = torch.compile(function, backend="omni", options={"summary": False})
    x = torch.arange(24.0).reshape(1, 4, 6).sin()
    torch.testing.assert_close(compiled(x), function(x))
work(0)
with ThreadPoolExecutor(max(threads, 1)) as pool: list(pool.map(work, range(threads)))
if len(sys.argv) > 3: print(omnicomp.save(sys.argv[3]).state)
audit = omnicomp.audit()
assert not audit.mismatches
assert {row.ran for row in audit.subgraphs} == {"inductor"}, audit
print("complete")
"""


def environment(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMNICOMP_CACHE_DIR": str(folder / "omnicomp")}


@pytest.mark.slow
@pytest.mark.inductor
def test_threads_of_processes_share_one_folder(tmp_path: Path) -> None:
    def run(number: int) -> str:
        words = ("0", "4", tmp_path / "file")
        return python("-c", PROGRAM, *words, environment=environment(tmp_path), fresh=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == ["saved\ncomplete\n"] * 3


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.long)])
def test_a_process_killed_at_any_moment_leaves_a_folder_that_the_next_one_can_use(moments: int, tmp_path: Path) -> None:
    """The whole group dies, with the compiler in the middle of a library."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    folder = tmp_path / "folder"
    for number in (-2, -1):  # the first builds the headers
        begun = time.monotonic()
        python("-c", PROGRAM, number, "0", environment=environment(folder), fresh=True, check=True)
        whole = time.monotonic() - begun
    for number in range(moments):
        command = [sys.executable, "-c", PROGRAM, str(number), "0", str(tmp_path / "file")]
        process = subprocess.Popen(
            command,
            env={**variables, **environment(folder)},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(random.uniform(0.2, 1) * whole)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        done = python("-c", PROGRAM, number, "0", environment=environment(folder))
        assert done.stdout == "complete\n", done.stderr
