"""How much may fall back to eager: the option `fallback`, and the bounds of `omnicomp check`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from omnicomp import records
from omnicomp.errors import OptionError, nearest, wrong_value

ON_EXCESS: Final = ("warn", "error")


@records.dataclass(frozen=True, kw_only=True)
class FallbackBudget:
    """Bounds on what runs eager although a compiler was asked first.

    Attributes:
        max_nodes: how many operators may; None for no bound.
        max_flops_share: which part of the work they may have, from 0 to 1; None for no bound. The work is counted in
            FLOPs, or in operators where FLOPs are unknown.
        allow: selectors of operators, modules and nodes that don't count.
        on_excess: `warn`, or `error`, where a graph is compiled.
    """

    max_nodes: int | None = 0
    max_flops_share: float | None = None
    allow: tuple[str, ...] = ()
    on_excess: str = "warn"

    def __str__(self) -> str:
        """The fields that say something, as a person would write them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = {name: ", ".join(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return ", ".join(f"{name}: {value}" for name, value in shown.items() if value not in (None, ""))


def parse_budget(name: str, value: Any) -> FallbackBudget | None:
    """The budget that the option `fallback` asks for; without a bound, nothing may fall back.

    Raises:
        OptionError: a key is unknown, or a value is wrong.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_value(name, value, "a mapping of bounds, or None", example={"max_nodes": 0})
    known = [field.name for field in dataclasses.fields(FallbackBudget)]
    for key in value:
        if key not in known:
            raise OptionError(f"{name} has no key {key!r}{nearest(str(key), known)}; it has {', '.join(known)}")
    on_excess = value.get("on_excess", "warn")
    if on_excess not in ON_EXCESS:
        raise wrong_value(f"{name}: on_excess", on_excess, known=ON_EXCESS)
    share = value.get("max_flops_share")
    return FallbackBudget(
        max_nodes=_count(f"{name}: max_nodes", value.get("max_nodes", None if share is not None else 0)),
        max_flops_share=parse_share(f"{name}: max_flops_share", share),
        allow=_selectors(f"{name}: allow", value.get("allow", ())),
        on_excess=on_excess,
    )


def _count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise wrong_value(name, value, "a number of operators, or None for no bound", example=0)
    return value


def parse_share(name: str, value: Any) -> float | None:
    """A part of the work.

    Raises:
        OptionError: it is not from 0 to 1.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1 or math.isnan(value):
        raise wrong_value(name, value, "a part from 0 to 1, or None for no bound", example=0.01)
    return float(value)


def _selectors(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong_value(name, value, "a list of operators and modules", example=["aten.topk"])
    for item in value:
        if not isinstance(item, str) or not item.strip():
            raise wrong_value(name, item, "names of operators and modules", example="'aten.topk'", verb="contain")
    return tuple(value)
