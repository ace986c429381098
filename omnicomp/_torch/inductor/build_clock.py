"""A clock for one build: how much of its time is left, and what the rest went on.

It is read by the thread that builds and by the threads that compile for it; what the time went on is noted by the first
alone. Nothing here knows of torch but `torch.fx.Node`.
"""

import contextlib
import threading
import time
from collections.abc import Generator, Hashable
from typing import Final

from torch.fx import Node

__all__ = ["AUTOTUNING", "Meter", "Spent", "active", "carrying", "metered", "own"]

AUTOTUNING: Final = "autotuning"
OTHER: Final = "other"

clock = time.monotonic


class Spent(BaseException):
    """The time of a build is used up.

    Inductor catches `Exception` in places where one kernel of several may fail, and would go on without it; and it
    keeps what failed there, such as the time of a choice, for other builds. So this is none, and it is caught where the
    build began.
    """

    def __init__(self, meter: "Meter") -> None:
        """Say whose time it was."""
        super().__init__("the time of the build is used up")
        self.meter = meter


class Meter:
    """The time that several builds may take together."""

    def __init__(self, allowed: float) -> None:
        """Begin with nothing used.

        Args:
            allowed: seconds.
        """
        self.allowed = allowed
        self.phases: dict[str, float] = {}
        self.nodes: dict[Node, float] = {}
        self.kernels: dict[str, float] = {}
        self.origins: dict[str, frozenset[str]] = {}
        self.names: dict[int, str] = {}
        self.compiler = "C++ compile"
        self.under_way = self.at = ""
        self.raised = False
        self._outer: Meter | None = None
        self._used = 0.0
        self._since: float | None = None
        self._stack: list[str] = []
        self._mark = 0.0
        self._timed: set[Hashable] = set()

    @property
    def used(self) -> float:
        """Seconds that went on builds so far."""
        since = self._since
        return self._used if since is None else self._used + clock() - since

    @property
    def left(self) -> float:
        """Seconds that are left, of this and of a build that this one is inside of; negative if there are none."""
        left = self.allowed - self.used
        return left if self._outer is None else min(left, self._outer.left)

    def check(self) -> None:
        """Raise if no time is left.

        Raises:
            Spent: no time is left.
        """
        if self._outer is not None:
            self._outer.check()
        if self.allowed - self.used <= 0:
            if not self.raised:
                self.raised, self.at = True, self.under_way
            raise Spent(self)

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What the thread that builds does inside; all that is inside of autotuning is autotuning."""
        self._note()
        self._stack.append(AUTOTUNING if AUTOTUNING in self._stack else name)
        try:
            yield
        finally:
            self._note()
            self._stack.pop()

    @contextlib.contextmanager
    def timed(self, key: Node | str) -> Generator[None]:
        """The node that is lowered inside, or the kernel that is waited for; the outermost of each counts."""
        kind = type(key)
        if kind in self._timed:
            yield
            return
        start = clock()
        self._timed.add(kind)
        if isinstance(key, str):
            self.under_way = f"the kernel {key}"
        try:
            yield
        finally:
            self._timed.discard(kind)
            seconds = clock() - start
            if isinstance(key, str):
                self.under_way = ""
                self.kernels[key] = self.kernels.get(key, 0.0) + seconds
            else:
                self.nodes[key] = self.nodes.get(key, 0.0) + seconds

    def start(self, outer: "Meter | None") -> None:
        """A build begins, inside of what `outer` measures."""
        self._outer = outer
        self._since = self._mark = clock()

    def stop(self) -> None:
        """The build is over."""
        self._note()
        self._used, self._since, self._outer = self.used, None, None
        self.names.clear()

    def _note(self) -> None:
        now = clock()
        name = self._stack[-1] if self._stack else OTHER
        self.phases[name] = self.phases.get(name, 0.0) + now - self._mark
        self._mark = now


_local = threading.local()


def active() -> Meter | None:
    """The meter of the build that this thread works for; None if no time is set."""
    return getattr(_local, "meter", None)


def own() -> Meter | None:
    """The same in the thread that builds; None in those that compile for it."""
    return None if getattr(_local, "helps", False) else active()


@contextlib.contextmanager
def metered(meter: Meter) -> Generator[None]:
    """Inside, this thread builds in the time of a meter."""
    before, helped = active(), getattr(_local, "helps", False)
    _local.meter, _local.helps = meter, False
    meter.start(before)
    try:
        yield
    finally:
        meter.stop()
        _local.meter, _local.helps = before, helped


@contextlib.contextmanager
def carrying(meter: Meter | None) -> Generator[None]:
    """Inside, this thread works for the build of another one."""
    before, helped = active(), getattr(_local, "helps", False)
    _local.meter, _local.helps = meter, True
    try:
        yield
    finally:
        _local.meter, _local.helps = before, helped
