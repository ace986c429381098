"""Doing something once, whichever of several threads comes first."""

from collections.abc import Callable

__all__ = ["Once"]


class Once:
    """A function that runs at its first call and never again, also when threads race for it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._pending = [function]

    def __call__(self) -> None:
        """Run the function, unless it has run or is running."""
        try:
            function = self._pending.pop()  # atomic: exactly one thread gets it
        except IndexError:
            return
        function()
