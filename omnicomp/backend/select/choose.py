"""The choice for one graph: stored by an earlier process, measured now, or by rule if it cannot be measured."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp._torch.dynamo import control_flow, samples
from omnicomp._torch.dynamo.late_compile import is_fake, is_subclass, is_tracing
from omnicomp._torch.user_code import user_operators
from omnicomp.analysis.collectives import collectives_of
from omnicomp.backend.capture import CapturedGraph
from omnicomp.backend.select import results
from omnicomp.backend.select.candidates import Option, by_rule, options
from omnicomp.backend.select.contest import Contest, Unmeasurable
from omnicomp.lowerings.engines.subgraph import weights_of
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Option as OptionEvent
from omnicomp.timeline import Reason, current

log = logger("omnicomp.backend.select")


def choose(gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph) -> CapturedGraph:
    """Decide which lowerings a graph goes to, as the policy's `choose` says.

    Args:
        gm: the graph behind the passes.
        inputs: its inputs.
        graph: what it belongs to; its policy has a `choose` other than `off`.

    Returns:
        The graph with a policy that names the lowerings.
    """
    weights = bool(weights_of(gm, inputs))
    chosen = by_rule(gm, graph, weights=weights)
    if graph.policy.choose == "measure":
        values = inputs if graph.values is None else _values(graph.values, inputs)
        obstacle = _obstacle(gm, values, graph)
        if obstacle:
            _record_by_rule(graph, chosen, obstacle)
        else:
            chosen = _measured(gm, inputs, values, graph, chosen, weights=weights)
    return chosen.graph(graph)


def _values(known: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Real inputs in the place of fake ones; made up where the passes asked for copies of weights."""
    same = len(known) == len(inputs) and all(
        not isinstance(fake, torch.Tensor) or samples.fits(value, fake)
        for value, fake in zip(known, inputs, strict=True)
    )
    return list(known) if same else list(map(samples.like, inputs))


def _obstacle(gm: GraphModule, inputs: Sequence[Any], graph: CapturedGraph) -> str:
    """Why a graph can't be measured; empty if it can."""
    if graph.training:
        return "a training step can't be tried: its backward is compiled later, and weights change"
    if not is_tracing():
        return "it is compiled outside of Dynamo"
    if collectives_of(gm):
        return "it communicates with other ranks, which would have to try as often"
    operators = user_operators(gm)
    if operators:
        return f"it calls {', '.join(operators)} of the program, which may have effects"
    for value in inputs:
        if is_subclass(value):
            return "an input is a tensor that wraps others"
        if isinstance(value, torch.Tensor) and (is_fake(value) or value.is_meta):
            return "it is compiled without the inputs of a call"
    return ""


def _measured(
    gm: GraphModule, inputs: Sequence[Any], values: Sequence[Any], graph: CapturedGraph, rule: Option, *, weights: bool
) -> Option:
    """The fastest candidate, as an earlier process or this one measured it."""
    candidates, refused = options(gm, graph, weights=weights)
    if not candidates:
        _record_by_rule(graph, rule, "none of the candidates is there")
        return rule
    key = results.result_key(gm, graph, candidates, list(refused))
    known = results.RESULTS.read(key)[0] if graph.policy.verdicts == "use" else None
    if known is not None:
        option = _named(known, candidates)
        if option is not None:
            for event in known.candidates:
                current().append(dataclasses.replace(event, graph=graph.id, source="kept"))
            return option
    try:
        contest = Contest(gm, inputs, graph, values)
        winner = contest.run(candidates, refused)
    except control_flow.CONTROL_FLOW:
        raise
    except Unmeasurable as error:
        _record_by_rule(graph, rule, str(error))
        return rule
    for event in contest.events:
        current().append(event)
    if graph.policy.verdicts != "off":
        results.RESULTS.write(key, results.Kept(winner=winner.name, rules=winner.rules, candidates=contest.events))
    return winner


def _named(known: results.Kept, candidates: Sequence[Option]) -> Option | None:
    """The candidate that won, with the rules that were found for it."""
    base = known.winner.partition(" in part")[0]
    found = next((option for option in candidates if option.name == base), None)
    return None if found is None else dataclasses.replace(found, name=known.winner, rules=known.rules)


def _record_by_rule(graph: CapturedGraph, rule: Option, why: str) -> None:
    current().append(
        OptionEvent(
            graph=graph.id,
            key="lowerings",
            requested="measure",
            effective=rule.name,
            reason=Reason(
                code="option_ineffective",
                by="choice",
                sentence=f"nothing is measured for this graph, and a rule chooses: {why}",
                lever="compile for inference, under torch.no_grad() or inference_mode()",
            ),
        )
    )
