"""The option `background` with real workers: streams of sizes, kills at any moment, forks."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from processes import python

pytestmark = pytest.mark.slow

BEGIN = """
import json, os, signal, sys, time
import torch, omnicomp
from omnicomp.backend.worker_pool import pool
torch.set_grad_enabled(False)

def states():
    return [event.state for event in omnicomp.timeline.events() if event.type == "background"]

def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)
"""


def run(program: str, *words: Any, cache: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return python("-c", BEGIN + program, *words, environment={"TORCHINDUCTOR_CACHE_DIR": str(cache)}, check=check)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and " Z " not in _stat(pid)]


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return " Z "


KILLED = """
def f(x, n):
    for i in range(3):
        x = torch.nn.functional.gelu(x * (n + i)).cumsum(0) + x.sin()
    return x

n, moment = float(sys.argv[1]), float(sys.argv[2])
x = torch.randn(40, 30)
call = torch.compile(f, backend="omni", options={"background": True})
assert close(call(x, n), f(x, n))
if moment < 0:
    over = omnicomp.wait(400)
    assert close(call(x, n), f(x, n))
    print(json.dumps([over, states()[-1], pool().pids()]))
else:
    while not pool().pids():
        time.sleep(0.01)
    print(json.dumps(pool().pids()), flush=True)
    time.sleep(moment)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 10))])
def test_a_program_that_is_killed_leaves_no_worker_and_no_half_artefact(number: int, tmp_path: Path) -> None:
    for _ in range(2):
        died = run(KILLED, number + 0.5, random.uniform(0, 15), cache=tmp_path, check=False)
        assert died.returncode == -signal.SIGKILL, died.stderr
        pids = json.loads(died.stdout)
        end = time.monotonic() + 120
        while alive(pids) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive(pids)
    over, state, pids = json.loads(run(KILLED, number + 0.5, -1, cache=tmp_path).stdout)
    assert over
    assert state == "swapped"
    assert not alive(pids)


WORKER_KILLED = """
def f(x):
    return torch.nn.functional.gelu(x @ x.T).sum(-1)

x = torch.randn(8, 8)
call = torch.compile(f, backend="omni", options={"background": True})
for _ in range(int(sys.argv[1])):
    call(x)
    while not (pids := pool().pids()) or pids == killed:
        time.sleep(0.01)
    killed = pids
    os.killpg(pids[0], signal.SIGKILL)
over = omnicomp.wait(400)
assert close(call(x), f(x))
print(json.dumps([over, states()[-1]]))
""".replace("for _", "killed = []\nfor _")


@pytest.mark.parametrize(("kills", "state"), [(1, "swapped"), (2, "failed")])
def test_a_worker_that_is_killed_is_replaced_once(kills: int, state: str, tmp_path: Path) -> None:
    assert json.loads(run(WORKER_KILLED, kills, cache=tmp_path).stdout) == [True, state]


STREAM = """
class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
        self.layers = torch.nn.ModuleList(layer() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return x.sum(0)

model = Layers().eval()

def stream(call):
    took = []
    for size in range(2, 32):
        x = torch.randn(size, 64)
        begun = time.thread_time()
        result = call(x)
        took.append(time.thread_time() - begun)
        assert close(result, model(x))
        time.sleep(0.02)
    return took

def traced(backend, **more):
    torch.compiler.reset()
    model.scale = time.time() % 1  # no cache knows the graph
    return stream(torch.compile(model, backend=backend, **more))

background = {"options": {"background": True}}
traced("omni", **background)  # imports
while "started" in states() and not pool().pids():
    time.sleep(0.01)
for pid in pool().pids():
    os.killpg(pid, signal.SIGSTOP)
omnicomp.timeline.clear()
traced("omni", **background)
stopped = states()
for pid in pool().pids():
    os.killpg(pid, signal.SIGCONT)
rounds = [(traced("eager"), traced("omni", **background)) for _ in range(4)]
eager, own = (sorted(map(min, zip(*side))) for side in zip(*rounds))
print(json.dumps([eager, own, stopped, states()]))
"""


def test_a_stream_of_thirty_sizes_waits_for_dynamo_and_for_nothing_else(tmp_path: Path) -> None:
    eager, own, stopped, states = json.loads(run(STREAM, cache=tmp_path).stdout)
    # No call needs the worker: all of them came back while it was stopped.
    assert set(stopped) == {"started", "eager"}
    assert "foreground" not in states
    # Nor does the calling thread do its work. These are its own seconds of processor, which other processes do not
    # take. Dynamo traces twice in either: the worst stall is that trace, and the third worst is a call.
    assert own[-1] <= 2 * eager[-1]
    assert own[-3] <= 2 * eager[-3] + 0.005


FORKED = """
def f(x):
    return torch.nn.functional.gelu(x @ x.T).sum(-1)

x = torch.randn(8, 8)
call = torch.compile(f, backend="omni", options={"background": True, "lowerings": ["eager"]})
call(x)
child = os.fork()
right = close(call(x), f(x)) and omnicomp.wait(400) and close(call(x), f(x)) and states()[-1] == "swapped"
if child == 0:
    os._exit(0 if right else 1)
print(json.dumps([right, os.waitpid(child, 0)[1], pool().pids()]))
"""


def test_a_forked_child_builds_for_itself_and_ends_its_worker(tmp_path: Path) -> None:
    right, status, pids = json.loads(run(FORKED, cache=tmp_path).stdout)
    assert right
    assert status == 0
    assert not alive(pids)
