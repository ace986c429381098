"""Certificates for what is put into a graph beside the passes: overrides, weights cast once, called regions.

And for the passes of Inductor's own.

What is no operator of torch is run as what it stands for: an override as its reference, a weight that was cast once as
the cast of the parameter.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp._torch.fx import copy_module, traced_again
from omnicomp._torch.inductor import own_passes
from omnicomp.analysis import certify
from omnicomp.analysis.certify import (
    ASSUMED,
    DRAWS,
    FINITE_INPUTS,
    NO_EMPTY_ROW,
    NO_GRADIENTS,
    NO_OVERFLOW,
    REFUTED,
    ROUNDING,
    Assumption,
    Certificate,
)
from omnicomp.analysis.nodes import fake_value
from omnicomp.builder.on_failure import write_script
from omnicomp.errors import first_line
from omnicomp.lowerings.override import planned_call, put_references
from omnicomp.options.policy import Policy
from omnicomp.passes.certificates import NotCertifiedError, certified
from omnicomp.passes.changes import Change
from omnicomp.passes.check_budget import CheckBudget
from omnicomp.timeline import Certified, current
from omnicomp.weights.cast_copies import Form

_ROUNDED = tuple(map(Assumption, (ROUNDING, NO_OVERFLOW, FINITE_INPUTS, NO_EMPTY_ROW)))
# Attention's patterns take a dropout into the kernel, which draws by itself.
_RENUMBERED = (*_ROUNDED, Assumption(DRAWS))


def certify_calls(before: GraphModule, after: GraphModule, graph: str) -> Certified:
    """Whether a graph in which bodies are called is the one with their operators in these places."""
    try:
        found = certify.check(before, after)
    except CONTROL_FLOW:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the sentence of the event
        return _unchecked("regions", graph, error)
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


def inductors_certified(graph: str) -> AbstractContextManager[None]:
    """Inside, what each of Inductor's own passes changes is checked; what computes something else is put back."""
    known: dict[str, Certificate] = {}

    def script(change: Change, event: Certified) -> Certified:
        region = (change.read() or change).before
        inputs = [fake_value(node) for node in region.graph.find_nodes(op="placeholder")]
        try:
            path = write_script(region, inputs, f"{event.name}: {event.sentence}", values=True, whole=True)
        except Exception as error:  # noqa: BLE001 - a graph that can't be written down costs the script alone
            return dataclasses.replace(event, sentence=f"{event.sentence}; no script: {first_line(error)}")
        return dataclasses.replace(event, reproducer=str(path))

    def look(name: str, before: GraphModule, after: GraphModule) -> None:
        claims = _RENUMBERED if "pass_pattern" in name else _ROUNDED
        try:
            found = certified(f"inductor.{name}", claims, before, after, graph=graph, known=known, refuting=script)
        except NotCertifiedError as error:
            found = [error.event]
            own_passes.put_back(after, before)
        for event in found:
            current().append(event)

    return own_passes.watched(look)


def certify_overrides(before: GraphModule, after: GraphModule, graph: str, policy: Policy) -> list[Certified]:
    """Whether overrides stand for what they replaced; one that does not is taken out again.

    Returns:
        Certificates under the names of the overrides.
    """
    called = [[(node.name, node.target) for node in module.graph.nodes] for module in (before, after)]
    if called[0] == called[1]:  # as in most graphs: no override takes a node of them
        return []
    named = {node.name: call.item.name for node in after.graph.nodes if (call := planned_call(node, "")) is not None}
    try:
        found = _certified("override", _ROUNDED, before, after, graph, policy, prepare=_with_references)
    except NotCertifiedError as error:
        found = [error.event]
        after.graph = copy_module(before).graph
        after.recompile()
    return [_renamed(event, named) for event in found]


def _certified(
    name: str,
    claims: Sequence[Assumption],
    before: GraphModule,
    after: GraphModule,
    graph: str,
    policy: Policy,
    **rest: Any,
) -> list[Certified]:
    always = policy.certify == "always"
    budget = None if always else CheckBudget.of(before)
    return certified(name, claims, before, after, graph=graph, known={}, always=always, budget=budget, **rest)


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
    forms: Mapping[str, tuple[str, Form]],
    graph: str,
    policy: Policy,
) -> list[Certified]:
    """Whether a graph that takes parameters in another form is the one that makes these forms itself.

    Args:
        before: the graph as it was.
        after: the graph as it is.
        forms: for each new placeholder its parameter, and the form in which it has that.
        graph: its id.
        policy: the user's options.
    """
    try:
        made = _from_parameters(before, after, forms)
        return _certified("weights", (*_ROUNDED, Assumption(NO_GRADIENTS)), before, made, graph, policy)
    except NotCertifiedError as error:
        return [error.event]
    except CONTROL_FLOW:
        raise
    except Exception as error:  # noqa: BLE001 - becomes the sentence of the event
        return [_unchecked("weights", graph, error)]


def _unchecked(name: str, graph: str, error: Exception) -> Certified:
    sentence = f"the check failed: {first_line(error)}"
    return Certified(graph=graph, name=name, node="", verdict=ASSUMED, sentence=sentence)


def _from_parameters(before: GraphModule, after: GraphModule, forms: Mapping[str, tuple[str, Form]]) -> GraphModule:
    """The graph with the placeholders that it had, of which it makes the forms itself."""
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
    bodies: dict[tuple[Form, str], Graph] = {}
    for name, (parameter, form) in forms.items():
        with made.graph.inserting_before(nodes[name]):
            key = form, _described(fake_value(nodes[parameter]))
            body = bodies[key] = bodies.get(key) or _traced(_calling(form.of, nodes[parameter])).graph
            (given,) = body.find_nodes(op="placeholder")
            value: Any = made.graph.graph_copy(body, {given: nodes[parameter]})
        nodes[name].replace_all_uses_with(value)
        made.graph.erase_node(nodes[name])
    made.recompile()
    return made


def _described(value: Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"


def _calling(function: Callable[[Any], Any], operand: Node) -> GraphModule:
    graph = Graph()
    given = graph.placeholder("given")
    given.meta = dict(operand.meta)
    graph.output(graph.call_function(function, (given,)))
    return GraphModule({}, graph)


def refuted(events: list[Certified]) -> str:
    """Why one of them does not hold, or an empty text."""
    return next((event.sentence for event in events if event.verdict == REFUTED), "")
