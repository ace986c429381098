"""Bisection for the nodes that make Inductor fail, so that only they leave it.

The search finds the shortest beginning of a run that fails. It ends with a node that fails alone, and has to leave, or
that fails only together with the nodes before it, and then a cut in front of it is enough. Inductor's exception often
names the node, as its graph interpreter was at it; otherwise beginnings are tried by bisection. The longest beginning
that works stays in front of the node, and is not built again.
"""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Final

from torch.fx import Node

from omnicomp import records
from omnicomp._torch.inductor import compile_fx
from omnicomp._torch.inductor.failures import kind_of
from omnicomp.analysis.hashes import exact_hash
from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.errors import first_line
from omnicomp.lowerings import MAIN
from omnicomp.timeline import Reason

Build = Callable[[Sequence[Node]], Exception | None]
"""Tries to build a run of nodes; returns the exception, or None if it worked."""

Unit = tuple[Node, ...]
"""An operator and the `getitem`s of its result, which never part."""

# Nodes that are the same as one that fails are tried for so long.
_SECONDS: Final = 20.0
_SPENT: Final = "the number of builds allowed by max_builds is spent, so it was not narrowed down further"


class _Spent(Exception):
    """No build is left."""


class Prober:
    """Tries runs of nodes, a bounded number of them, and remembers which failed."""

    def __init__(self, build: Build, builds: int) -> None:
        """Remember how to build and how often."""
        self._build = build
        self._left = builds
        self._passed: set[tuple[str, ...]] = set()
        self._failed: dict[tuple[str, ...], Exception] = {}
        self._seconds = 0.0

    @property
    def spent(self) -> bool:
        """Whether no build is left."""
        return self._left <= 0

    def failure(self, nodes: Sequence[Node]) -> Exception | None:
        """What the run fails with, or None.

        Raises:
            _Spent: it would have to be built, and no build is left.
        """
        names = _names(nodes)
        if names in self._passed or names in self._failed:
            return self._failed.get(names)
        if self.spent:
            raise _Spent
        self._left -= 1
        return self._tried(nodes)

    def fails_alike(self, nodes: Sequence[Node]) -> bool:
        """Whether a run of the content of one that failed fails too; taken for granted if trying so takes too long."""
        names = _names(nodes)
        if names in self._passed or names in self._failed or self._seconds > _SECONDS:
            return names not in self._passed
        start = time.perf_counter()
        failure = self._tried(nodes)
        self._seconds += time.perf_counter() - start
        return failure is not None

    def failed(self, nodes: Sequence[Node], error: Exception) -> None:
        """Remember that a run failed."""
        self._failed[_names(nodes)] = error

    def _tried(self, nodes: Sequence[Node]) -> Exception | None:
        failure = self._build(nodes)
        if failure is None:
            self._passed.add(_names(nodes))
        else:
            self.failed(nodes, failure)
        return failure


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


@records.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The changes that let a run of nodes build."""

    cut: dict[str, Reason]  # nodes that must leave Inductor, by name, with the reason
    boundaries: frozenset[str] = frozenset()  # nodes before which the run must be cut
    smallest: tuple[Node, ...] = ()  # the shortest run of nodes that was seen to fail; empty if the machine is to blame
    error: Exception  # what that failed with
    exact: bool = True  # whether no smaller change would do; not if the builds were spent before it was found
    untuned: Reason | None = None  # why all of it is built again without autotuning; None if it is not
    script: str = ""  # path of a script that shows it, once one is written

    @property
    def lasting(self) -> bool:
        """Whether it will be the same in another process: not where memory, time or a tool was missing."""
        return kind_of(self.error) == "graph"


def find_failing(nodes: Sequence[Node], error: Exception, prober: Prober, alike: Sequence[Node] = ()) -> Verdict:
    """Find the first thing that makes a run fail.

    Nodes behind it were not examined: they are built next, and may fail on their own.

    Args:
        nodes: the run that failed.
        error: what it failed with.
        prober: tries parts of the run; when its builds are spent, nodes that are not known to work are cut.
        alike: more nodes of the graph; those that are the same as one that fails alone are cut with it.
    """
    if kind_of(error) == "machine":
        note = "no node is to blame, so all of them leave"
        lever = (
            "install a C++ compiler (g++ or clang) or name one in CXX; `omnicomp doctor` shows what is found"
            if compile_fx.is_missing_tool(error)
            else "let it write to its cache folder, which TORCHINDUCTOR_CACHE_DIR names"
        )
        return Verdict(cut={node.name: _reason(node, error, note, lever) for node in nodes}, error=error)
    units = _units(nodes)
    prober.failed(nodes, error)
    low, high, named = 0, len(units), _named_unit(units, error)
    while named is None and high - low > 1:
        middle = (low + high) // 2
        try:
            failure = prober.failure(_joined(units[:middle]))
        except _Spent:
            return _cut(units[low:high], error, _joined(units[:high]), _SPENT, exact=False)
        if failure is None:
            low = middle
        else:
            error, high, named = failure, middle, _named_unit(units[:middle], failure)
    return _settle(units[:high], low if named is None else named, error, prober, _units([*nodes, *alike]))


def _settle(units: Sequence[Unit], index: int, error: Exception, prober: Prober, alike: Sequence[Unit]) -> Verdict:
    """Whether a unit fails by itself, or only beside its neighbours."""
    unit, whole = units[index], _joined(units)
    try:
        alone = error if len(units) == 1 else prober.failure(unit)
    except _Spent:
        return _cut([unit], error, whole, _SPENT, exact=False)
    if alone is not None:
        return _cut(_same(unit, alike, prober), alone, unit)
    # In front of it; where there is nothing in front, it fails with what is behind it.
    before = unit if index else units[1]
    return Verdict(cut={}, boundaries=frozenset({before[0].name}), smallest=whole, error=error)


def _same(unit: Unit, alike: Sequence[Unit], prober: Prober) -> list[Unit]:
    """The unit and those of the same content that fail by themselves as well, as in a model of equal layers."""
    candidates = [other for other in alike if other[0].target == unit[0].target and other[0] is not unit[0]]
    content = exact_hash(unit) if candidates else ""
    found = {unit[0].name: unit}
    for other in candidates:
        if other[0].name not in found and exact_hash(other) == content:
            if not prober.fails_alike(other):
                break  # then content is not what decides
            found[other[0].name] = other
    return list(found.values())


def _cut(
    units: Sequence[Unit], error: Exception, smallest: Sequence[Node], note: str = "", *, exact: bool = True
) -> Verdict:
    cut = {node.name: _reason(node, error, note) for unit in units for node in unit}
    return Verdict(cut=cut, smallest=tuple(smallest), error=error, exact=exact)


def _units(nodes: Sequence[Node]) -> list[Unit]:
    units: list[list[Node]] = []
    for node in nodes:
        if units and node.target is operator.getitem and node.args and node.args[0] in units[-1]:
            units[-1].append(node)
        else:
            units.append([node])
    return [tuple(unit) for unit in units]


def _joined(units: Sequence[Unit]) -> Unit:
    return tuple(node for unit in units for node in unit)


def _named_unit(units: Sequence[Unit], error: Exception) -> int | None:
    """The node at which Inductor failed; None if its own rewrites made that node."""
    at = compile_fx.failing_node(error)
    if at is None:
        return None
    return next(
        (i for i, unit in enumerate(units) if any(n.name == at.name and n.target == at.target for n in unit)), None
    )


def _reason(node: Node, error: Exception, note: str = "", lever: str = "") -> Reason:
    return Reason(
        code="cut_out",
        by=MAIN.name,
        sentence=f"Inductor can't build it: {first_line(error)}{f' ({note})' if note else ''}",
        observed=type(getattr(error, "inner_exception", error)).__name__,
        node=f"{node.name} ({op_name(node)})",
        source=source_line(node),
        lever=lever or "register an override for the operator, or report the error to PyTorch",
    )


def refused_by(
    nodes: Sequence[Node], verdict: Verdict | None, error: Exception, lowering: str, device_type: str
) -> dict[str, Reason]:
    """The nodes that leave another compiler than Inductor, by name, with the reason.

    Args:
        nodes: the run that it failed on.
        verdict: the smallest change that was found; None if it compiles nothing at all, so that all nodes leave.
        error: what the run failed with.
        lowering: that could not build them.
        device_type: the device.
    """
    compiler, lever = _described(lowering, device_type)
    leaving = [node for node in nodes if verdict is None or node.name in verdict.cut]
    shown = error if verdict is None else verdict.error
    return {
        node.name: Reason(
            code="cut_out",
            by=lowering,
            sentence=f"{compiler} can't build it: {first_line(shown)}",
            observed=type(shown).__name__,
            node=f"{node.name} ({op_name(node)})",
            source=source_line(node),
            lever=lever,
        )
        for node in leaving
    }


def _described(name: str, device_type: str) -> tuple[str, str]:
    """The name of the compiler behind a lowering, and the lever if it fails."""
    if name == "device":
        return (
            f"the compiler of {device_type}",
            "register an override for the operator, or teach it to Device.compile_subgraph",
        )
    return f"the engine {name}", f"report the error, or take {name} out of options={{'lowerings': [...]}}"
