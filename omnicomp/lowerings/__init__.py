"""Lowerings turn a subgraph into an executable; the policy gives their order, and eager is always the last."""

if __name__ != "omnicomp.lowerings":
    raise ImportError(
        "import omnicomp.lowerings; the folder lowerings at the root of the checkout is a link to it, "
        "and importing it by that name would make a second copy of every class"
    )


from typing import Final

from omnicomp.lowerings.base import (
    Executable,
    GraphRecord,
    KeyParts,
    Lowering,
    LoweringContext,
    Support,
    WholeLowering,
    names_in_order,
)
from omnicomp.lowerings.device import DeviceLowering
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering
from omnicomp.lowerings.override import OverrideLowering

__all__ = [
    "LOWERINGS",
    "MAIN",
    "Executable",
    "GraphRecord",
    "KeyParts",
    "Lowering",
    "LoweringContext",
    "Support",
    "WholeLowering",
    "in_order",
    "lowering",
]

MAIN: Final[WholeLowering] = InductorLowering()
"""The lowering that a part goes to as it is, where nothing in it has to run elsewhere."""
LOWERINGS: Final[dict[str, Lowering]] = {
    "override": OverrideLowering(),
    "device": DeviceLowering(),
    MAIN.name: MAIN,
    "eager": EagerLowering(),
}


def lowering(name: str) -> Lowering:
    """The lowering of a name, which may be an engine's.

    Raises:
        EngineError: the engine can't be loaded.
    """
    if name in LOWERINGS:
        return LOWERINGS[name]
    from omnicomp.lowerings.engines import resolve_engine
    from omnicomp.lowerings.engines.program import EngineLowering

    return EngineLowering(resolve_engine(name))


def in_order(names: tuple[str, ...], served: tuple[str, ...]) -> list[Lowering]:
    """The lowerings of a policy that a device has; see `names_in_order`."""
    return [lowering(name) for name in names_in_order(names, served)]
