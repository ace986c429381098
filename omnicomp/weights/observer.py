"""Writes to parameters that torch does not count, seen for all that is made of parameters.

`omnicomp._torch.parameters.observe` reports them. Who makes something of a parameter follows it, and compares the
number of touches in each call; `mark` is one object to compare where nothing was touched at all.
"""

import weakref
from typing import Final

from torch import Tensor

from omnicomp._torch import parameters
from omnicomp._torch.parameters import owns_alone
from omnicomp.safety.forks import new_lock


class Followed:
    """A parameter that something was made of; it is forgotten when nobody holds this.

    Attributes:
        parameter: a weak reference to it.
        touches: how often it may have been written without being counted.
        holders: objects that hold its memory beside it, and how often each does.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.touches = 0
        self.holders: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @property
    def allowed(self) -> int:
        """How many owners its memory has if nobody can write to it but through the parameter."""
        return owns_alone + sum(list(self.holders.values()))


class _Sight:
    """A token that is replaced whenever a followed parameter may have changed."""

    mark: object = object()


_followed: Final[weakref.WeakValueDictionary[int, Followed]] = weakref.WeakValueDictionary()
_following: Final = new_lock()


def mark() -> object:
    """Another object whenever a followed parameter was touched."""
    return _Sight.mark


def find(parameter: Tensor) -> Followed | None:
    """What is known of a parameter; None if nobody follows it."""
    found = _followed.get(id(parameter))
    return found if found is not None and found.parameter() is parameter else None


def follow(parameter: Tensor) -> Followed:
    """Observe a parameter for as long as the returned object lives."""
    with _following:
        if not parameters.is_observed():
            parameters.observe(touched)
        found = find(parameter)
        if found is None:
            found = _followed[id(parameter)] = Followed(parameter)
        return found


def touched(parameter: Tensor) -> None:
    """A parameter may have been written without being counted."""
    found = _followed.get(id(parameter))
    if found is not None:
        found.touches += 1
        _Sight.mark = object()


def stop() -> None:
    """Give torch back what observing replaced; who follows a parameter compares its contents, or observes it again."""
    with _following:
        parameters.stop_observing()
        for found in list(_followed.values()):
            found.touches += 1
        _Sight.mark = object()
