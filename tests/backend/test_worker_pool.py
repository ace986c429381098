"""Workers of the option `background`: none is left, however the program ends, and one that dies is replaced once."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import ROOT

from omnicomp.backend import worker_pool
from omnicomp.backend.worker_pool import Pool

SUPPORT = ROOT / "tests" / "support"


class Order:
    def __init__(self, data: bytes, *, wanted: bool = True) -> None:
        self.data, self.wanted = data, wanted
        self.reply, self.why, self.over = b"", "", threading.Event()

    def is_wanted(self) -> bool:
        return self.wanted

    def done(self, reply: bytes) -> None:
        self.reply = reply
        self.over.set()

    def failed(self, why: str) -> None:
        self.why = why
        self.over.set()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setattr(worker_pool, "MODULE", "echo_worker")
    monkeypatch.syspath_prepend(str(SUPPORT))
    made = Pool()
    yield made
    made.close()
    assert not made.pids()


def built(pool: Pool, *messages: bytes) -> list[Order]:
    orders = [Order(each) for each in messages]
    for order in orders:
        pool.submit(order)
    for order in orders:
        assert order.over.wait(60)
    return orders


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


def test_large_messages_come_back_from_no_more_workers_than_are_allowed(pool: Pool) -> None:
    messages = [bytes([number]) * 3_000_000 for number in range(6)]
    orders = built(pool, *messages)
    assert [order.reply for order in orders] == messages
    assert 1 <= len(pool.pids()) <= worker_pool.most_workers()


def test_a_graph_whose_worker_dies_twice_fails_and_the_next_one_is_built(pool: Pool) -> None:
    died, fine = built(pool, b"die", b"fine")
    assert "signal 9" in died.why
    assert fine.reply == b"fine"


def test_a_graph_that_nobody_wants_is_not_built(pool: Pool) -> None:
    unwanted = Order(b"die", wanted=False)
    pool.submit(unwanted)
    (fine,) = built(pool, b"fine")
    assert fine.reply
    assert not unwanted.why


def test_a_worker_ends_that_has_had_nothing_to_do_for_a_while(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 0.05)
    built(pool, b"first")
    assert eventually(lambda: not pool.pids())
    assert built(pool, b"second")[0].reply == b"second"


def test_a_worker_leaves_the_processors_to_the_program(pool: Pool) -> None:
    built(pool, b"first")
    (pid,) = pool.pids()
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + worker_pool._NICE
    of_session = Path(f"/proc/{pid}/autogroup")
    if of_session.exists():
        assert of_session.read_text(encoding="utf-8").endswith(f"nice {worker_pool._NICE}\n")


def test_a_worker_that_can_not_be_started_is_a_reason(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    (order,) = built(pool, b"x")
    assert "can't be started" in order.why


PROGRAM = """
import os, signal, sys, time
from omnicomp.backend import worker_pool
worker_pool.MODULE = "echo_worker"
class Order:
    data = b"hang " + sys.argv[1].encode()
    def is_wanted(self): return True
    def done(self, reply): pass
    def failed(self, why): pass
worker_pool.pool().submit(Order())
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read().endswith("\\n"):
    time.sleep(0.01)
{end}
"""
ENDS = {
    "exit": "sys.exit(0)",
    "error": "raise RuntimeError",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "terminate": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)",
    "os._exit": "os._exit(0)",
    "kill with a forked child": "\nif os.fork() == 0: time.sleep(5); os._exit(0)\nos.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_no_process_is_left_however_the_program_ends(end: str, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    path = os.pathsep.join((str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")))
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end=ENDS[end]), str(told)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert program.wait(60) in {
        "exit": (0,),
        "error": (1,),
        "interrupt": (-signal.SIGINT, 1),
        "terminate": (-signal.SIGTERM,),
        "os._exit": (0,),
    }.get(end, (-signal.SIGKILL,))
    pids = list(map(int, told.read_text(encoding="utf-8").split()))
    assert len(pids) == 2
    # A forked child lives on; it does not keep the workers.
    assert eventually(lambda: not any(map(is_alive, pids)), 3 if "forked" in end else 20)
