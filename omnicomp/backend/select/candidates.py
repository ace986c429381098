"""Candidates of `lowerings="measure"`: Inductor in several settings, and the engines."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from torch.fx import GraphModule

from omnicomp import records
from omnicomp.analysis.nodes import all_nodes
from omnicomp.backend.capture import CapturedGraph, graph_digest
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.lowerings.engines.frozen import uses_tanh
from omnicomp.options.checks import engine_names, names
from omnicomp.options.placement_rules import Rule
from omnicomp.options.policy import LOWERINGS, Policy

_TANH: Final[Mapping[str, Any]] = {"cpp.use_decompose_tanh": True}
_CPP: Final[Mapping[str, Any]] = {"cpp_wrapper": True}
# Measured where the user names them alone: the one that teaches runs torch's own operators; `frozen` is a setting of
# Inductor, and among those; and TVM without its tuner was never faster than a hundredth to a half of Inductor.
_NO_RIVALS: Final = ("toy", "frozen", "tvm")
# Each failed build of a candidate is time that the user waits for something that will hardly win.
_BUILDS: Final = 6


@records.dataclass(frozen=True, kw_only=True)
class Option:
    """One way of compiling a graph."""

    name: str  # for people, and in stored results
    lowerings: tuple[str, ...] = LOWERINGS  # the order
    # Options of engines.
    engines: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict[str, Mapping[str, Any]])
    # Inductor's settings beside the user's.
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    rules: tuple[Rule, ...] = ()  # exceptions for some nodes
    needs: str = ""  # the lowering that it tries; it is dropped if that lowering gets no node of the graph
    version: str = ""  # of the engine; part of the key of stored results

    def graph(self, graph: CapturedGraph) -> CapturedGraph:
        """The graph under a policy that says just this."""
        old = graph.policy
        engines = {name: {**old.engines.get(name, {}), **values} for name, values in self.engines.items()}
        policy: Policy = dataclasses.replace(
            old,
            choose="off",
            lowerings=self.lowerings,
            rules=(*old.rules, *self.rules),
            engines={**old.engines, **engines},
            max_builds=min(old.max_builds, _BUILDS),
            inductor={**old.inductor, **self.inductor},
        )
        digest = f"{graph_digest(policy, graph.device)}{self.name}"
        return dataclasses.replace(graph, policy=policy).with_record(digest=digest)


def by_rule(gm: GraphModule, graph: CapturedGraph, *, weights: bool) -> Option:
    """The setting of Inductor that is most likely the best, without measuring.

    On the CPU, weights that can be followed are built in, and `tanh` is decomposed; max-autotune gains nothing there
    over packed weights, and takes far longer to compile.
    """
    if graph.device.type != "cpu":
        return _SETTINGS["inductor"]
    if weights and not graph.training:
        return _SETTINGS["frozen"]
    return _SETTINGS["inductor, tanh decomposed" if _has_tanh(gm) else "inductor"]


def options(gm: GraphModule, graph: CapturedGraph, *, weights: bool) -> tuple[list[Option], dict[str, str]]:
    """The candidates in the order in which they are measured; the first is Inductor with the user's options.

    Returns:
        The candidates, and why engines are none, by name.
    """
    device, refused = graph.device.type, dict[str, str]()
    asked = graph.policy.candidates
    if graph.values is not None:
        return _elsewhere(gm, graph, asked, refused), refused
    if asked is not None:
        every = (_made(name, graph, refused, weights=weights) for name in asked)
        return [option for option in every if option is not None], refused
    found = [Option(name="inductor")]
    cpu = device == "cpu"
    if cpu and _has_tanh(gm):
        found.append(_SETTINGS["inductor, tanh decomposed"])
    if cpu and weights:
        found.append(_SETTINGS["frozen"])
    if cpu:
        found.append(_SETTINGS["frozen, C++ wrapper"])
    rivals = (name for name in engine_names() if name not in _NO_RIVALS)
    made = (_made(name, graph, refused, weights=weights) for name in rivals)
    return [*found, *(option for option in made if option is not None)], refused


def _elsewhere(
    gm: GraphModule, graph: CapturedGraph, asked: tuple[str, ...] | None, refused: dict[str, str]
) -> list[Option]:
    """The candidates of a process that builds for another one: what builds weights in stays with their owner."""
    tanh = _has_tanh(gm) and graph.policy.numerics != "eager"
    owners = [each.name for each in _SETTINGS.values() if each.needs] + list(engine_names())
    for name in owners if asked is None else [name for name in asked if name in owners]:
        refused[name] = "it builds in weights, which are the program's: leave the option background out to try it"
    tried = [_SETTINGS[name] for name in asked or INDUCTORS if name in _SETTINGS and name not in refused]
    cpu = graph.device.type == "cpu"
    return [each for each in tried if (cpu or not each.inductor) and (tanh or not _TANH.keys() & each.inductor.keys())]


def check_candidates(name: str, value: Any) -> tuple[str, ...] | None:
    """Names of ways to compile a graph; at least two, as one needs no measuring.

    Raises:
        OptionError: one of them is unknown, or there are too few.
    """
    known = tuple(dict.fromkeys([*_SETTINGS, *engine_names()]))
    return None if value is None else names(known, several=True)(name, value)


def _made(name: str, graph: CapturedGraph, refused: dict[str, str], *, weights: bool) -> Option | None:
    """The candidate of a name; where there is none, `refused` gets the reason."""
    if name in _SETTINGS:
        return _SETTINGS[name]
    why, version = _looked_up(name, graph.device.type)
    if why:
        refused[name] = why
        return None
    # What it leaves to Inductor should be as good as Inductor can be, unless Inductor itself was not asked for.
    asked = graph.policy.candidates
    inductor = asked is None or any("inductor" in _SETTINGS[each].lowerings for each in asked if each in _SETTINGS)
    rest = ("frozen",) if weights and inductor and graph.device.type == "cpu" else ()
    lowerings = _with(name, *rest) if inductor else ("override", name, "eager")
    return Option(name=name, lowerings=lowerings, needs=name, version=version)


def _with(*engines: str) -> tuple[str, ...]:
    return ("override", *engines, *(name for name in LOWERINGS if name != "override"))


def _looked_up(name: str, device: str) -> tuple[str, str]:
    try:
        engine = resolve_engine(name)
        missing = engine.missing()
    except EngineError as error:
        return str(error), ""
    if missing:
        return missing, ""
    if device not in engine.clustering.devices:
        return f"it is for {', '.join(engine.clustering.devices)}", ""
    return "", engine.version()


def _has_tanh(gm: GraphModule) -> bool:
    return any(uses_tanh(node) for node in all_nodes(gm))


_SETTINGS: Final[dict[str, Option]] = {
    option.name: option
    for option in (
        Option(name="inductor"),
        Option(name="inductor, C++ wrapper", inductor=_CPP),
        Option(name="inductor, tanh decomposed", inductor=_TANH),
        Option(name="inductor, tanh decomposed, C++ wrapper", inductor={**_TANH, **_CPP}),
        Option(name="frozen", lowerings=_with("frozen"), needs="frozen"),
        Option(
            name="frozen, C++ wrapper",
            lowerings=_with("frozen"),
            engines={"frozen": {"cpp_wrapper": True}},
            needs="frozen",
        ),
        Option(name="eager", lowerings=("eager",)),
    )
}
"""The candidates beside the engines."""

INDUCTORS: Final = tuple(name for name, option in _SETTINGS.items() if not option.needs and name != "eager")
"""Those that are Inductor in one setting or another, with weights as inputs; the first is as the user set it."""
