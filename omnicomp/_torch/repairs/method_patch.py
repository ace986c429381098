"""A function of torch's that is another one for a while, also when threads that want it overlap."""

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from omnicomp.forks import new_lock

__all__ = ["Exchange"]


class Exchange:
    """Inside, a method or a function is what is made of it; it is put back by whoever leaves last.

    Saving and restoring it for each by itself would put back another's, where two don't leave in the order of nesting.
    A wrapper that another library puts over ours meanwhile is left where it is, and ours then passes its calls on.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Name the method.

        Args:
            owner: the class, the module or the object that has it.
            name: of it.
            make: gets the method, and returns what takes its place.
        """
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
