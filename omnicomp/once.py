"""Recording something once, and without harm: what is lost if that fails is the record, not the program."""

import logging
from collections.abc import Callable

__all__ = ["Once", "harmless"]

log = logging.getLogger("omnicomp")


class harmless:
    """Inside, an exception is logged with its traceback, and what follows the block goes on.

    For what only tells of the program: its results are there already, and must not be lost with the record of them.
    """

    def __init__(self, what: str) -> None:
        """Say what is lost, should it raise."""
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        said = "omni: %s could not be recorded, and the program goes on without that; report the error"
        log.warning(said, self._what, exc_info=error)
        return True


class Once:
    """A function that runs at its first call and never again, also when threads race for it.

    It records something: should it raise, that is logged, and the caller goes on.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._pending = [function]

    def __call__(self) -> None:
        """Run the function, unless it has run or is running."""
        try:
            function = self._pending.pop()  # atomic: exactly one thread gets it
        except IndexError:
            return
        with harmless("what ran"):
            function()
