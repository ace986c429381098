"""The event about what goes from one subgraph of a part to another."""

import dataclasses

from omnicomp.timeline.events import Event

__all__ = ["Boundary"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary(Event):
    """Values that one subgraph of a part makes and another one reads.

    Attributes:
        part: `forward`, `backward` or `inference`.
        source: id of the subgraph that makes them.
        target: id of the subgraph that reads them.
        tensors: number of tensors.
        bytes: their bytes, as a SymPy expression in the graph's own symbols.
        bytes_hint: the same for the sizes seen at compile time; -1 if unknown.
        copies: operators that copy one of them as the last thing before the boundary, or the first behind it.
        casts: likewise, those that change its dtype.
    """

    part: str
    source: str
    target: str
    tensors: int
    bytes: str = "0"
    bytes_hint: int = 0
    copies: int = 0
    casts: int = 0
