"""A forked child of a process with many threads takes every lock of ours, and compiles."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import omnicomp
from omnicomp.safety.forks import new_lock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_a_child(act: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether an action is true in a forked child, and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if act() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def held_by_another_thread(lock: object) -> Callable[[], None]:
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:  # type: ignore[attr-defined]
            held.set()
            ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)

    def end() -> None:
        ended.set()
        thread.join()

    return end


def test_a_lock_that_another_thread_held_is_free_in_the_child_which_is_told() -> None:
    lost: list[int] = []
    lock, other = new_lock(lambda: lost.append(1)), new_lock(lambda: lost.append(2))
    end = held_by_another_thread(lock)
    try:
        assert in_a_child(lambda: lock.acquire(blocking=False) and other.acquire(blocking=False) and lost == [1])
        assert not lock.acquire(blocking=False), "the parent's is as it was"
    finally:
        end()


def test_a_lock_of_the_thread_that_forks_stays_its_own() -> None:
    lock = new_lock()

    def act() -> bool:
        lock.release()  # raises if it were not
        return lock.acquire(blocking=False)

    with lock:
        assert in_a_child(act)


def test_a_child_compiles_whatever_the_threads_of_its_parent_held() -> None:
    from omnicomp.lowerings.engines.store import store
    from omnicomp.lowerings.overrides import registry
    from omnicomp.weights import cast_copies

    omnicomp.timeline.current().clear()  # which takes its lock
    ends = [held_by_another_thread(lock) for lock in (store._lock, registry._lock, cast_copies._making)]
    ends.append(held_by_another_thread(omnicomp.timeline.current()._lock))

    def act() -> bool:
        model, x = torch.nn.Linear(4, 4).eval(), torch.ones(1, 4)
        options = {"lowerings": ["eager"], "dtype_policy": "bf16"}
        with torch.no_grad():
            found = torch.compile(model, backend="omni", options=options)(x)
        store.get("key", "engine", lambda: held_by_another_thread, None, None)
        return found.shape == (1, 4) and "1 graph" in omnicomp.audit().summary()

    try:
        assert in_a_child(act)
    finally:
        for end in ends:
            end()


def test_every_lock_of_the_package_is_one_of_these() -> None:
    package = Path(omnicomp.__file__).parent
    found = subprocess.run(
        ["grep", "-rnE", r"threading\.(R?Lock|Condition|Semaphore)\(", package, "--include=*.py"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    names = {re.sub(r":.*", "", str(Path(line).relative_to(package))) for line in found}
    anew_by_themselves = {"timeline/progress_line.py", "backend/background.py", "backend/worker_pool.py"}
    unused_in_children = {"_torch/inductor/cuda_graphs.py"}  # no forked child can use CUDA
    assert names == {"safety/forks.py", *anew_by_themselves, *unused_in_children}
