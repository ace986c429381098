"""Certificates for what is put into a graph beside the passes: overrides, weights that were cast once, called regions.

What is no operator of torch is run as what it stands for: an override as its reference, a weight that was cast once as
the cast of the parameter.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node

from omnicomp._torch.fx import copy_module, traced_again
from omnicomp.analysis.certify import NO_OVERFLOW, REFUTED, ROUNDING, Assumption, check
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.override import planned_call, put_references
from omnicomp.options.policy import Policy
from omnicomp.passes.certificates import NotCertifiedError, certified
from omnicomp.timeline import Certified

_ROUNDED = tuple(map(Assumption, (ROUNDING, NO_OVERFLOW)))


def certify_calls(before: GraphModule, after: GraphModule, graph: str) -> Certified:
    """Whether a graph in which bodies are called is the one with their operators in these places."""
    found = check(before, after)
    calls = [node for node in after.graph.nodes if node.op == "call_function" and "invoke_subgraph" in str(node.target)]
    return Certified(
        graph=graph,
        name="regions",
        node=calls[0].name if calls else "",
        verdict=found.verdict,
        sentence=found.reason,
        methods=tuple(each.name for each in found.methods if each.holds),
        nodes=tuple(node.name for node in calls),
        seconds=found.seconds,
    )


def certify_overrides(before: GraphModule, after: GraphModule, graph: str, policy: Policy) -> list[Certified]:
    """Whether overrides stand for what they replaced; one that does not is taken out again.

    Args:
        before: a copy of the graph without them.
        after: the graph with them.
        graph: its id.
        policy: the user's options.

    Returns:
        Certificates under the names of the overrides.
    """
    named = {node.name: call.item.name for node in after.graph.nodes if (call := planned_call(node, "")) is not None}
    try:
        found = _certified("override", before, after, graph, policy, prepare=_with_references)
    except NotCertifiedError as error:
        found = [error.event]
        after.graph = copy_module(before).graph
        after.recompile()
    return [_renamed(event, named) for event in found]


def _certified(
    name: str, before: GraphModule, after: GraphModule, graph: str, policy: Policy, **rest: Any
) -> list[Certified]:
    always = policy.certify == "always"
    return certified(name, _ROUNDED, before, after, graph=graph, known={}, always=always, **rest)


def _renamed(event: Certified, named: Mapping[str, str]) -> Certified:
    names = dict.fromkeys(named[node] for node in (event.node, *event.nodes) if node in named)
    return dataclasses.replace(event, name=", ".join(names) or event.name)


def _with_references(after: GraphModule) -> GraphModule:
    """A graph with the references in the places of overrides, in operators of ATen."""
    if all(planned_call(node, "") is None for node in after.graph.nodes):
        return after
    return _traced(put_references(copy_module(after, lazy=True)))


def _traced(after: GraphModule) -> GraphModule:
    return traced_again(after, [fake_value(node) for node in after.graph.find_nodes(op="placeholder")])


def certify_weights(
    before: GraphModule,
    after: GraphModule,
    forms: Mapping[str, tuple[str, Callable[[Any], Any]]],
    graph: str,
    policy: Policy,
) -> list[Certified]:
    """Whether a graph that takes parameters in another form is the one that makes these forms itself.

    Args:
        before: the graph as it was.
        after: the graph as it is.
        forms: for each new placeholder its parameter, and what makes the one of the other.
        graph: its id.
        policy: the user's options.
    """
    made = copy_module(after, lazy=True)
    nodes = {node.name: node for node in made.graph.nodes}
    for node in reversed(before.graph.find_nodes(op="placeholder")):
        with made.graph.inserting_before(next(iter(made.graph.nodes))):
            again = made.graph.create_node("placeholder", node.target)
        again.meta = dict(node.meta)
        if node.name in nodes:
            nodes[node.name].replace_all_uses_with(again)
            made.graph.erase_node(nodes[node.name])
        again.name = node.name
        nodes[node.name] = again
    for name, (parameter, form) in forms.items():
        with made.graph.inserting_before(nodes[name]):
            body = _traced(_calling(form, nodes[parameter])).graph
            (given,) = body.find_nodes(op="placeholder")
            value: Any = made.graph.graph_copy(body, {given: nodes[parameter]})
        nodes[name].replace_all_uses_with(value)
        made.graph.erase_node(nodes[name])
    made.recompile()
    try:
        return _certified("weights", before, made, graph, policy)
    except NotCertifiedError as error:
        return [error.event]


def _calling(function: Callable[[Any], Any], operand: Node) -> GraphModule:
    graph = Graph()
    given = graph.placeholder("given")
    given.meta = dict(operand.meta)
    graph.output(graph.call_function(function, (given,)))
    return GraphModule({}, graph)


def refuted(events: list[Certified]) -> str:
    """Why one of them does not hold, or an empty text."""
    return next((event.sentence for event in events if event.verdict == REFUTED), "")
