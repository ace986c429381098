"""Locks that a forked child can take: the thread that held one when the parent forked does not exist in the child."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

_locks: Final[weakref.WeakKeyDictionary[Any, Callable[[], object] | None]] = weakref.WeakKeyDictionary()


def new_lock(lost: Callable[[], object] | None = None) -> Any:
    """A reentrant lock that is free in a forked child, unless the thread that forked holds it itself.

    Args:
        lost: called in the child if another thread held the lock: what it guards may be half done.
    """
    lock: Any = threading.RLock()
    _locks[lock] = lost
    return lock


def _renew() -> None:
    for lock, lost in list(_locks.items()):
        if lock.acquire(blocking=False):  # nobody has it, or this thread
            lock.release()
            continue
        lock._at_fork_reinit()
        if lost is not None:
            lost()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
