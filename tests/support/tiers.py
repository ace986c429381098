"""Which cases of a grid are in the fast tier: each thing that it proves once; the others have the marker `slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast(values: Iterable[Any], chosen: Callable[[Any], Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which those that are not chosen are slow.

    Args:
        values: one for each case, a tuple where the case has several arguments.
        chosen: whether a value is in the fast tier.
    """
    return [value if chosen(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
