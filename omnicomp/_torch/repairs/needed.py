"""How torch is repaired: by whom a fault is discussed, which releases have it, and functions replaced for a while."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

import torch

from omnicomp.safety.forks import new_lock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needed:
    """The releases of torch that have a fault."""

    first: str  # the oldest supported release that has it
    fixed: str = ""  # the first release that was seen without it; empty while none was
    issue: str = ""  # torch's issue or pull request; empty where nobody reported it, and the repair has a reproducer

    @property
    def here(self) -> bool:
        """Whether the torch of this process has the fault; nightly builds count as the release that they lead to."""
        return self.of(torch.__version__)

    def of(self, version: str) -> bool:
        """Whether a release has the fault."""
        return _release(self.first) <= _release(version) and not (
            self.fixed and _release(self.fixed) <= _release(version)
        )

    @contextlib.contextmanager
    def exchanging(self, *exchanges: "Exchange") -> Generator[None]:
        """Inside, functions of torch are exchanged, if the torch of this process has the fault."""
        with contextlib.ExitStack() as stack:
            for exchange in exchanges if self.here else ():
                stack.enter_context(exchange)
            yield


def _release(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


class Exchange:
    """Inside, a method or a function is what is made of it; it is put back by whoever leaves last.

    Saving and restoring it for each by itself would put back another's, where two don't leave in the order of nesting.
    A wrapper that another library puts over ours meanwhile is left where it is, and ours then passes its calls on.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Name the method."""
        self._owner, self._name, self._make = owner, name, make
        self._lock = new_lock()
        self._inside = 0
        self._leave: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._leave = self._replaced()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._leave()

    def _replaced(self) -> Callable[[], None]:
        """Replace it; returns what puts it back."""
        original = getattr(self._owner, self._name)
        static = isinstance(inspect.getattr_static(self._owner, self._name), staticmethod)
        now = self._make(original)

        @functools.wraps(original)
        def mine(*args: Any, **kwargs: Any) -> Any:
            return now(*args, **kwargs)

        def leave() -> None:
            nonlocal now
            now = original
            if getattr(self._owner, self._name) is mine:
                setattr(self._owner, self._name, staticmethod(original) if static else original)

        setattr(self._owner, self._name, staticmethod(mine) if static else mine)
        return leave
