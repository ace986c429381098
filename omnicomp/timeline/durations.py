"""Events about time: what a compilation spent in its stages, and what the calls of a subgraph took."""

import dataclasses
from typing import Final

from omnicomp.timeline.events import Event

__all__ = ["STAGES", "Stage", "Timing"]

STAGES: Final[dict[str, str]] = {
    "dynamo": "Dynamo traced the frame, up to the call of the backend",
    "autograd": "autograd, decompositions, the partitioner and lookups in caches; without the lowering inside",
    "lowering": "a part was placed, cut and built",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Event):
    """A stage of a compilation is over; recorded at its end.

    The passes have events of their own, with their times.

    Attributes:
        stage: a key of `STAGES`.
        seconds: wall time.
        part: `forward`, `backward` or `inference` where the stage is that of a part; else empty.
    """

    stage: str
    seconds: float
    part: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing(Event):
    """How long the calls of a subgraph took, up to one of them; recorded after 1, 2, 4, 8, … calls.

    The device is waited for before and after each call.

    Attributes:
        part: `forward`, `backward` or `inference`.
        subgraph: its id.
        device: type of the device.
        calls: how many calls it is made of: all so far.
        seconds: wall time of them together.
        fastest: wall time of the fastest.
    """

    part: str
    subgraph: str
    device: str
    calls: int
    seconds: float
    fastest: float
