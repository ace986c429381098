"""What this process' timeline has recorded so far."""

from typing import Any

import omnicomp
from omnicomp.timeline import Ran, Retreat


def events(kind: type) -> list[Any]:
    """The events of a class."""
    return [event for event in omnicomp.timeline.events() if isinstance(event, kind)]


def ran() -> set[str]:
    """The lowerings that ran."""
    return {event.lowering for event in events(Ran)}


def retreats() -> list[Retreat]:
    """Each step down."""
    return events(Retreat)
