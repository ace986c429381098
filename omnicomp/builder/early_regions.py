"""Repeated regions of a Dynamo graph: AOTAutograd, decompositions and Inductor see each body once.

An inference graph is rewritten in front of AOTAutograd: each occurrence of a run of operators that repeats becomes an
`invoke_subgraph` of one body (docs/adr/0021). Behind it, a part is read with the bodies in their places, so that
placement, records, the guard and verification see every operator; Inductor gets the calls, if it gets the whole part.
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.dynamo import regions as traced
from omnicomp._torch.fx import copy_module, effects
from omnicomp._torch.inductor import shared_code
from omnicomp._torch.symbols import free_symbols
from omnicomp.analysis.hashes import node_text
from omnicomp.analysis.nodes import fake_value, module_path
from omnicomp.analysis.repeats import Rules, find_repeats
from omnicomp.builder import regions
from omnicomp.builder.regions import Body, Shared, title

_NAME: Final = "omnicomp_repeated_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyRegions:
    """What is called in a Dynamo graph."""

    module: GraphModule  # the rewritten graph, a copy
    titles: Mapping[str, str]  # what the audit calls each body, by its name
    # For each call of each body, where the operators of the first occurrence are in that one: by module path and by
    # stack trace.
    places: Mapping[str, Sequence[Mapping[str, Mapping[str, Any]]]]

    def inlined(self, part: GraphModule) -> "InlinedPart | None":
        """A part with the bodies in the places of their calls; None if it calls none."""
        if not traced.calls(part, _NAME):
            return None
        module = copy_module(part, lazy=True)
        calls: dict[str, int] = {}
        for call, body, name, number in traced.calls(module, _NAME):
            calls[self.titles[name]] = calls.get(self.titles[name], 0) + 1
            places = self.places[name]
            _inline(call, body, places[number] if 0 <= number < len(places) else {})
        for node in module.graph.find_nodes(op="get_attr"):
            if not node.users:
                module.graph.erase_node(node)
        module.graph.lint()
        module.recompile()
        return InlinedPart(module=module, calling=part, shared=Shared(calls=calls), content=_content(module))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InlinedPart:
    """A part with the bodies in the places of their calls."""

    module: GraphModule  # that part
    calling: GraphModule  # the part with the calls
    shared: Shared  # what is called
    content: frozenset[tuple[str, str]]  # the nodes of the former, when it was made

    def calls_for(self, module: GraphModule) -> GraphModule | None:
        """The part with the calls, if a graph is still the inlined one: overrides may have been put in, for example."""
        return self.calling if _content(module) == self.content else None


def settle(module: GraphModule) -> None:
    """Give the operators of an inlined part memory of their own: those of all calls have the fake values of a body."""
    traced.propagate(module, [fake_value(node) for node in module.graph.find_nodes(op="placeholder")])


def call_regions(module: GraphModule, *, always: bool, device: str, options: Mapping[str, Any]) -> EarlyRegions | None:
    """Find what repeats in an inference graph, and have it called, if that pays and is safe.

    Args:
        module: a Dynamo graph behind the passes, which stays as it is.
        always: whether calls are made where they were not measured.
        device: the type of the device.
        options: Inductor's, of the program.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    if len(nodes) < regions.PAYS or not (always or device in regions.MEASURED) or any(map(traced.sets_state, nodes)):
        return None
    with torch._inductor.config.patch(dict(options)):  # type: ignore[attr-defined]
        if shared_code.unshareable(module, before_autograd=True):
            return None
    facts = _Facts()
    laid_out = any(facts.of(node).is_convolution for node in nodes)
    rules = Rules(
        refused=lambda node: not facts.of(node).is_pure or facts.of(node).is_convolution,
        stops_fusion=lambda node: facts.of(node).is_called,
        is_view=facts.is_view,
        stays=lambda node: laid_out and regions.is_image(node),
        smallest=regions.SMALLEST,
        worth=regions.WORTH,
        text=facts.text,
    )
    repeats = find_repeats(nodes, rules)
    if sum(repeat.saved for repeat in repeats) < regions.PAYS:
        return None
    names = [node.name for node in nodes]
    copy = copy_module(module, lazy=True)
    by_name = {node.name: node for node in copy.graph.nodes}
    titles: dict[str, str] = {}
    places: dict[str, list[Mapping[str, Mapping[str, Any]]]] = {}
    saved = 0
    for index, repeat in enumerate(repeats):
        runs = [[by_name[each] for each in names[start : start + repeat.length]] for start in repeat.starts]
        body = Body(copy, runs, facts.is_view)
        while len(runs) > 1 and facts.are_same(body.operands(runs[0])):
            # AOTAutograd traces the first call: what it is given twice there would be one operand in all.
            runs = runs[1:]
            body = Body(copy, runs, facts.is_view)
        if len(runs) < 2 or not _is_sound(body, runs):
            continue
        name = f"{_NAME}{index}"
        titles[name] = title(runs[0])
        places[name] = [_places(runs[0], run) for run in runs]
        for number, call in enumerate(body.put_calls(copy, name)):
            traced.number_call(call, number)
        saved += (len(runs) - 1) * repeat.length
    if saved < regions.PAYS:
        return None
    copy.graph.lint()
    copy.recompile()
    return EarlyRegions(module=copy, titles=titles, places=places)


class _Facts:
    """What nodes consist of: equal ones are asked about once."""

    def __init__(self) -> None:
        self._texts: dict[Node, str] = {}
        self._facts: dict[str, traced.Facts] = {}

    def text(self, node: Node) -> str:
        found = self._texts.get(node)
        if found is None:
            found = self._texts[node] = f"{node.op}:{node_text(node)}"
        return found

    def of(self, node: Node) -> traced.Facts:
        text = self.text(node)
        if text not in self._facts:
            self._facts[text] = traced.facts_of(node)
        return self._facts[text]

    def are_same(self, nodes: Sequence[Node]) -> bool:
        """Whether two of some nodes return the same tensor: `contiguous` may return what it takes, and `add_` does."""
        return len(set(map(self._made_by, nodes))) < len(nodes)

    def _made_by(self, node: Node) -> Node:
        while node.op in ("call_function", "call_method"):
            index = self.of(node).returned_input
            if index is None:
                return node
            node = node.all_input_nodes[index]
        return node

    def is_view(self, node: Node) -> bool:
        if node.target is operator.getitem and not isinstance(fake_value(node.args[0]), torch.Tensor):
            return isinstance(node.args[0], Node) and self.is_view(node.args[0])
        return self.of(node).is_view


def _is_sound(body: Body, runs: Sequence[Sequence[Node]]) -> bool:
    """Whether a body takes and returns tensors in memory of their own, like the operators that it stands for."""
    operands = [fake_value(node) for node in body.operands(runs[0])]
    expected = [fake_value(runs[0][index]) for index in body.outputs]
    if not expected or not all(isinstance(each, torch.Tensor) for each in expected):
        return False
    for run in runs:
        if not all(isinstance(fake_value(node), (torch.Tensor, torch.SymInt)) for node in body.operands(run)):
            return False
    sizes = {symbol for node in body.sizes for symbol in free_symbols(fake_value(node))}
    if not sizes.issuperset(symbol for each in (*operands, *expected) for symbol in free_symbols(each)):
        return False
    found = effects(body.module, operands)
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    own = found.shared[len(tensors) :]
    if found.written or own != tuple(range(len(tensors), len(tensors) + len(own))):
        return False
    return list(map(_layout, found.outputs)) == list(map(_layout, expected))


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _places(first: Sequence[Node], run: Sequence[Node]) -> dict[str, dict[str, Any]]:
    places: dict[str, dict[str, Any]] = {}
    for node, other in zip(first, run, strict=True):
        for key, meta in ((module_path(node), "nn_module_stack"), (node.meta.get("stack_trace"), "stack_trace")):
            if key and meta in other.meta:
                places.setdefault(key, {meta: other.meta[meta]})
    return places


def _inline(call: Node, body: GraphModule, places: Mapping[str, Mapping[str, Any]]) -> None:
    graph, module = call.graph, call.graph.owning_module
    assert module is not None
    operands = iter(call.args[2:])
    values: dict[Node, Any] = {}
    results: Any = body.graph.output_node().args[0]
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(operands)
            elif node.op != "output":
                copy = values[node] = graph.node_copy(node, values.__getitem__)
                if node.op == "get_attr":
                    copy.target = _held(body, str(node.target), module)
                for key in (module_path(node), node.meta.get("stack_trace", "")):
                    copy.meta.update(places.get(key, {}))
    for user in list(call.users):
        result = results[user.args[1]]
        user.replace_all_uses_with(values[result] if isinstance(result, Node) else result)
        graph.erase_node(user)
    graph.erase_node(call)


def _held(body: GraphModule, name: str, module: GraphModule) -> str:
    """The name under which a graph holds a constant of a body, or a graph that it calls."""
    value: Any = body
    for part in name.split("."):
        value = getattr(value, part)
    for known, held in (*vars(module).items(), *module.named_children(), *module.named_buffers(recurse=False)):
        if held is value:
            return known
    free = next(each for index in itertools.count() if not hasattr(module, each := f"{_NAME}held_{index}"))
    setattr(module, free, value)
    return free


def _content(module: GraphModule) -> frozenset[tuple[str, str]]:
    return frozenset((node.name, str(node.target)) for node in module.graph.nodes)
