"""A method of torch's that is another one for a while, also when threads that want it overlap."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Exchange"]


class Exchange:
    """Inside, a method is what is made of it; it is put back by whoever leaves last.

    Saving and restoring it for each by itself would put back another's, where two don't leave in the order of nesting.
    """

    def __init__(self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Name the method.

        Args:
            owner: the class that has it.
            name: of it.
            make: gets the method, and returns what takes its place.
        """
        self._owner, self._name, self._make = owner, name, make
        self._lock = threading.Lock()
        self._inside = 0
        self._original: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._make(self._original))
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                setattr(self._owner, self._name, self._original)
