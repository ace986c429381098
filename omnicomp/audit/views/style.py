"""Style sheets, scripts and colours of the HTML pages."""

import functools
import zlib
from collections.abc import Iterable
from importlib.resources import files
from typing import Final

__all__ = ["ENGINES", "asset", "tones"]


@functools.cache
def asset(name: str) -> str:
    """The text of a file in `omnicomp/audit/page`."""
    return files("omnicomp.audit").joinpath("page").joinpath(name).read_text(encoding="utf-8")


ENGINES: Final = 6
"""How many colours there are for engines: the classes `engine-0`, … of `page/base.css`."""

_KNOWN: Final = ("inductor", "override", "eager")


def tones(lowerings: Iterable[str]) -> dict[str, str]:
    """The style class of each lowering.

    An engine's is chosen by a hash of its name, so that it has one colour in every report. Of two engines of one report
    for which that is the same, the second in order of name takes the next one that is free, as long as there are some.
    """
    found = {name: name for name in _KNOWN}
    taken: set[int] = set()
    for name in sorted({name for name in lowerings if name} - found.keys()):
        first = zlib.crc32(name.encode("utf-8", "backslashreplace")) % ENGINES
        free = (number % ENGINES for number in range(first, first + ENGINES) if number % ENGINES not in taken)
        number = next(free, first)
        taken.add(number)
        found[name] = f"engine-{number}"
    return found
