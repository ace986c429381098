"""Several threads that do a thing at once, and forked workers of a data loader that do one."""

import concurrent.futures
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

THREADS = 8
Work = Callable[[], None]

# Everything, where a few stand for all otherwise: `OMNICOMP_WIDE=1 pytest tests/e2e/test_hard_programs.py`.
WIDE = bool(os.environ.get("OMNICOMP_WIDE"))
# GNU's OpenMP has no threads left behind a fork, and code for several waits for them for ever.
ONE_THREAD = {"cpp.threads": 1}
# Dynamo asks for the state of the GPU's generator when it compiles, which a forked process may not.
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process can't compile beside a GPU")


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Do a thing in threads that begin together and take turns often; raise what the first of them raises."""
    # Torch looks a backend up without a lock: of threads that ask for the first time, all but one may raise.
    torch._dynamo.lookup_backend("omni")
    barrier = threading.Barrier(threads)

    def begin(index: int) -> None:
        barrier.wait()
        work(index)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(begin, index) for index in range(threads)]:
                done.result()
    finally:
        sys.setswitchinterval(before)


def many_compilations() -> contextlib.AbstractContextManager[Any]:
    """Inside, functions of one code object may all be compiled: each thread has one of its own."""
    return torch._dynamo.config.patch(recompile_limit=64)


class _Works(Dataset[str]):
    def __init__(self, works: Sequence[Work], parent: int) -> None:
        self.works, self.parent = works, parent

    def __len__(self) -> int:
        return len(self.works)

    def __getitem__(self, index: int) -> str:
        assert os.getpid() != self.parent
        try:
            self.works[index]()
        except BaseException:
            return traceback.format_exc()
        return ""


def behind_a_fork(works: Sequence[Work], *, workers: int = 2, timeout: float = 300) -> None:
    """Do things in forked workers of a data loader; raise if one of them does, with its traceback.

    Args:
        works: what to do, each in one of the workers.
        workers: how many there are.
        timeout: seconds for each thing; a worker that hangs is an error then.
    """
    loader = DataLoader(
        _Works(works, os.getpid()),
        batch_size=None,
        num_workers=min(workers, len(works)),
        multiprocessing_context="fork",
        timeout=timeout,
    )
    failures = [f"{index}: {text}" for index, text in enumerate(loader) if text]
    assert not failures, "\n".join(failures)
