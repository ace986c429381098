"""Repeated regions of a part: one body is built, and each occurrence calls it.

The graph after autograd is rewritten: each occurrence of a run of operators that repeats becomes an `invoke_subgraph`
of one body (docs/adr/0018). The part stays one graph of Inductor's, with its cache key, its CUDA graph and its guard.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor import shared_code
from omnicomp._torch.inductor.group_casts import cast_together
from omnicomp._torch.symbols import free_symbols
from omnicomp._torch.user_code import may_raise
from omnicomp.analysis.nodes import fake_value, module_path
from omnicomp.analysis.repeats import Repeat, Rules, find_repeats
from omnicomp.builder.partition import gather_getitems
from omnicomp.lowerings.base import LoweringContext
from omnicomp.timeline import Certified, Reason
from omnicomp.timeline.reasons import common_path

SMALLEST: Final = 32
"""Operators that a region has at least: a call of less costs more than 1 % of what it does."""
WORTH: Final = 48
"""Operators that a region must save to be worth its calls."""
PAYS: Final = 120
"""Operators that must be saved in a part, about two seconds on one core, before anything is rewritten."""


MEASURED: Final = ("cpu", "cuda")
"""Types of devices on which what calls cost was measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """What of a graph is built once."""

    # How often a region is called, by the module path of its first call and the number of its operators.
    calls: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    left_whole: Reason | None = None  # why nothing is; None also where the graph is too small to tell of
    certificates: tuple[Certified, ...] = ()  # of the graph with calls


def share_regions(module: GraphModule, context: LoweringContext) -> Shared:
    """Rewrite a graph in place so that what repeats is built once, if that pays.

    Args:
        module: a graph after autograd with `meta["val"]`, in which a `getitem` stands behind what it takes apart.
        context: what it belongs to.
    """
    policy, graph = context.policy, module.graph
    if policy.regions == "never" or context.undecomposed:
        return Shared()
    if sum(1 for node in graph.nodes if node.op == "call_function") < PAYS:
        return Shared()
    if policy.regions == "auto" and context.device.type not in MEASURED:
        why = f"calls of regions are not measured on {context.device.type}"
        return Shared(left_whole=left_whole(why, lever="options={'regions': 'always'} builds repeated regions once"))
    why = shared_code.unshareable(module)
    if why:
        return Shared(left_whole=left_whole(why))
    if context.part != "inference" and policy.dtype_policy.rewrites:
        cast_together(graph)
    before = copy_module(module, lazy=True) if policy.certifies else None
    _gather_results(graph)
    gather_getitems(module)
    nodes = [node for node in graph.nodes if node.op == "call_function" and not shared_code.is_seed(node)]
    # Nothing that is laid out for a convolution goes in or out of a run: it would be converted on each side.
    laid_out = shared_code.wants_layouts(module, is_inference=context.part == "inference")
    rules = Rules(
        refused=lambda node: not _may_move(node, module) or (laid_out and shared_code.is_convolution(node)),
        stops_fusion=shared_code.is_called,
        is_view=shared_code.is_view,
        stays=lambda node: laid_out and is_image(node),
        smallest=SMALLEST,
        worth=WORTH,
    )
    repeats = find_repeats(nodes, rules)
    saved = sum(repeat.saved for repeat in repeats)
    if saved < PAYS:
        why = f"{saved} operators repeat in regions between which nothing is fused"
        why += ", and no tensor that Inductor may lay out for a convolution is passed" if laid_out else ""
        return Shared(left_whole=left_whole(why))
    _fetch_first(graph)
    calls: dict[str, int] = {}
    for index, repeat in enumerate(repeats):
        where = _share(module, nodes, repeat, f"repeated_{index}")
        calls[where] = calls.get(where, 0) + len(repeat.starts)
    graph.lint()
    certificates: tuple[Certified, ...] = ()
    if before is not None:
        from omnicomp.builder.certificates import certify_calls, refuted

        found = certify_calls(before, module, context.graph_id)
        certificates = (found,)
        if refuted([found]):
            module.graph = before.graph
            return Shared(left_whole=left_whole(refuted([found])), certificates=certificates)
    module.recompile()
    return Shared(calls=calls, certificates=certificates)


def left_whole(why: str, *, lever: str = "options={'regions': 'never'} does not look for any") -> Reason:
    """The reason for which nothing of a graph is shared."""
    return Reason(
        code="left_whole",
        by="regions",
        sentence=why,
        needed=f"{PAYS} operators or more that repeat",
        lever=lever,
    )


def _gather_results(graph: Graph) -> None:
    """Move what only outputs are made of right behind what it is computed from.

    The partitioner leaves what is computed for the backward at the end of a forward, in the order of the backward.
    """
    place: dict[Node, tuple[int, ...]] = {node: (index,) for index, node in enumerate(graph.nodes)}
    ends: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and all(user.op == "output" or user in ends for user in node.users):
            ends.add(node)
    for node in graph.nodes:
        if node in ends and shared_code.is_movable(node):
            last = max(node.all_input_nodes, key=place.__getitem__, default=node)
            if last.op == "call_function":
                place[node] = (*place[last], *place[node])
    for before, node in itertools.pairwise(sorted(place, key=place.__getitem__)):
        if node.prev is not before:
            before.append(node)


def _fetch_first(graph: Graph) -> None:
    """Move what is fetched, and seeds, to the front, so that nothing else is in a run."""
    front = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op == "get_attr" and node is not front:
            front.prepend(node)
    for node in list(graph.nodes):
        if shared_code.is_seed(node):
            node.all_input_nodes[0].append(node)


def _may_move(node: Node, module: GraphModule) -> bool:
    if not shared_code.is_movable(node) or may_raise(node):
        return False
    fetched = [source for source in node.all_input_nodes if source.op == "get_attr"]
    graphs = [getattr(module, str(source.target), None) for source in fetched]
    if any(isinstance(each, GraphModule) and shared_code.has_constants(each) for each in graphs):
        return False
    values = [fake_value(each) for each in (node, *node.all_input_nodes)]
    return all(not isinstance(value, torch.Tensor) or value.layout == torch.strided for value in values)


def _share(module: GraphModule, nodes: Sequence[Node], repeat: Repeat, name: str) -> str:
    runs = [nodes[start : start + repeat.length] for start in repeat.starts]
    body = Body(module, runs, shared_code.is_view)
    where = title(runs[0])
    body.put_calls(module, name)
    return where


def is_image(node: Node) -> bool:
    """Whether Inductor may lay out what a node computes for a convolution."""
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.dim() >= 4


def title(run: Sequence[Node]) -> str:
    """What the audit calls a region."""
    where = common_path(filter(None, map(module_path, run)))
    return f"{where or run[0].name} ({len(run)} operators)"


def _read_outside(run: Sequence[Node], is_view: Callable[[Node], bool]) -> list[int]:
    """Indices of the nodes whose value the body has to return, for this occurrence.

    What is read outside through views is the tensor that they are views of; the views are made again outside, as
    Inductor takes all that a call returns for memory of its own.
    """
    members = {node: index for index, node in enumerate(run)}
    needed: set[int] = set()
    for node in run:
        if any(user not in members for user in node.users):
            needed.update(members[each] for each in _bases(node, members, is_view))
    return sorted(needed)


def _bases(node: Node, members: Iterable[Node], is_view: Callable[[Node], bool]) -> list[Node]:
    """The members whose memory, or value, a node is made of without computing anything."""
    if not _made_again(node, is_view):
        return [node]
    return [base for source in node.all_input_nodes if source in members for base in _bases(source, members, is_view)]


def _made_again(node: Node, is_view: Callable[[Node], bool]) -> bool:
    if node.target is operator.getitem:
        return is_view(node) or not isinstance(fake_value(node.args[0]), (tuple, list))
    return is_view(node) or not isinstance(fake_value(node), torch.Tensor)


class Body:
    """The graph of a run of nodes that repeats, and how its operands are found in each occurrence.

    Args:
        module: the graph with the runs.
        runs: the occurrences.
        is_view: whether the result of a node is in the memory of what it takes.
    """

    def __init__(self, module: GraphModule, runs: Sequence[Sequence[Node]], is_view: Callable[[Node], bool]) -> None:
        run = runs[0]
        self._runs = runs
        self.outputs = sorted({index for each in runs for index in _read_outside(each, is_view)})
        self.sizes = _sizes(module, run)
        graph, values, constants = Graph(), dict[Node, Node](), dict[str, Any]()
        for index, node in enumerate(self.operands(run)):
            values[node] = graph.placeholder(f"shared_{index}")
            values[node].meta = {"val": fake_value(node)}
        for node in run:
            for source in node.all_input_nodes:
                if _is_graph(source) and source not in values:
                    constants[str(source.target)] = getattr(module, str(source.target))
                    values[source] = graph.node_copy(source)
            values[node] = graph.node_copy(node, values.__getitem__)
        result = graph.output(tuple(values[run[index]] for index in self.outputs))
        result.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        self.module = GraphModule(constants, graph)

    def operands(self, run: Sequence[Node]) -> list[Node]:
        """What an occurrence reads from outside, in the order of the placeholders."""
        members = set(run)
        read = (source for node in run for source in node.all_input_nodes)
        return list(dict.fromkeys([*self.sizes, *(s for s in read if s not in members and not _is_graph(s))]))

    def put_calls(self, module: GraphModule, name: str) -> list[Node]:
        """Put a call of the body in the place of each occurrence."""
        setattr(module, name, self.module)
        first = next(node for node in module.graph.nodes if node.op != "placeholder")
        with module.graph.inserting_before(first):
            fetched = module.graph.get_attr(name)
        return [_call(run, self, fetched, name) for run in self._runs]


def _is_graph(node: Node) -> bool:
    module = node.graph.owning_module
    return node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), GraphModule)


def _sizes(module: GraphModule, run: Sequence[Node]) -> list[Node]:
    """The symbolic sizes among the part's inputs that the shapes in a run are made of."""
    values = [fake_value(each) for node in run for each in (node, *node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, (torch.Tensor, torch.SymInt))]
    symbols = {symbol for value in tensors for symbol in free_symbols(value)}
    placeholders = module.graph.find_nodes(op="placeholder")
    sized = [node for node in placeholders if isinstance(fake_value(node), torch.SymInt)]
    return [node for node in sized if fake_value(node).node.expr in symbols]


def _call(run: Sequence[Node], body: Body, fetched: Node, name: str) -> Node:
    graph, members = run[0].graph, set(run)
    results: dict[Node, Node] = {}
    with graph.inserting_before(run[0]):
        made = [run[index] for index in body.outputs]
        call = shared_code.invoke(fetched, name, body.operands(run), tuple(map(fake_value, made)))
        call.meta.update(_provenance(run[0]))
        for index, node in enumerate(made):
            results[node] = graph.call_function(operator.getitem, (call, index))
            # AOTAutograd's cache keeps no graph with a method of a node that has no example.
            known = [key for key in ("val", "example_value") if key == "val" or key in node.meta]
            values = dict.fromkeys(known, fake_value(node))
            results[node].meta.update(_provenance(node), **values)

        def again(node: Node) -> Node:
            if node not in members:
                return node
            if node not in results:
                results[node] = graph.node_copy(node, again)
            return results[node]

        for node in run:
            outside = [user for user in node.users if user not in members]
            if outside:
                value = again(node)
                for user in outside:
                    user.replace_input_with(node, value)
    for node in reversed(run):
        graph.erase_node(node)
    return call


def _provenance(node: Node) -> dict[str, Any]:
    return {
        key: node.meta[key] for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack") if key in node.meta
    }
