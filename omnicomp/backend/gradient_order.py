"""With `numerics="eager"`, the gradient of an input is added up reader by reader, as eager does it.

Eager adds the gradients of all that read a tensor one after another, the latest reader's first, whatever graphs the
readers are in. A compiled graph is one reader: it would add up its own gradients before, and a sum of floating-point
numbers has other bits with other brackets. So each reader but the latest takes a view of the input, made in front of
the call, and autograd adds what comes back through the views in the order of the readers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp._torch.dynamo.late_compile import is_subclass
from omnicomp._torch.fx import copy_module
from omnicomp._torch.parameters import add_placeholder
from omnicomp.analysis.nodes import evaluate, fake_value
from omnicomp.backend.saved import State, state_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitUses:
    """A graph whose readers take views of their inputs.

    Attributes:
        module: the graph; the views are its last inputs.
        inputs: real or fake, one a placeholder.
        sources: for each view, which input it is one of, in the order in which they are to be made.
    """

    module: GraphModule
    inputs: Sequence[Any]
    sources: tuple[int, ...] = ()

    def followed(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the inputs without the views."""
        return _WithViews(compiled, self.sources).__call__ if self.sources else compiled


def split_uses(module: GraphModule, inputs: Sequence[Any]) -> SplitUses:
    """Give the readers of a graph that will be differentiated views, but for the latest reader of each input.

    Inputs that the graph writes to or returns stay as they are, and so do those that wrap other tensors.

    Args:
        module: a graph in front of autograd, which stays as it is.
        inputs: real or fake, one a placeholder.
    """
    if not any(map(_used_several_times, _placeholders(module))):
        return SplitUses(module=module, inputs=inputs)
    from omnicomp.passes.dtypes.analysis import changed_storages, storages

    # Dynamo reads the inputs of its graph again after the backend.
    module = copy_module(module)
    nodes = _placeholders(module)
    kept = changed_storages(module)
    for node in module.graph.output_node().all_input_nodes:
        kept |= storages(node)
    order = {node: place for place, node in enumerate(module.graph.nodes)}  # users are in another one in a copy
    last, sources, views = nodes[-1], list[int](), list[Any]()
    for place, node in enumerate(nodes):
        if not _used_several_times(node) or storages(node) & kept:
            continue
        # In the order in which their gradients come: of one reader, that of the first operand first.
        users = sorted(node.users, key=order.__getitem__, reverse=True)
        readers = [(user, at) for user in users for at in range(_count_uses(user, node))]
        made: dict[tuple[Node, int], Node] = {}
        for count, reader in enumerate(reversed(readers[1:])):
            last = add_placeholder(last, f"{node.name}_use_{count}", node, evaluate(_view, (node,), {}))
            made[reader] = last
            sources.append(place)
            views.append(_view(inputs[place]))
        for user in users:
            _replace_uses(user, node, [made.get((user, at), node) for at in range(_count_uses(user, node))])
    module.recompile()
    return SplitUses(module=module, inputs=[*inputs, *views], sources=tuple(sources))


def _placeholders(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _used_several_times(node: Node) -> bool:
    """Whether several operands of the graph's operators are an input that a gradient is asked for."""
    value = fake_value(node)
    if not isinstance(value, Tensor) or not value.requires_grad or is_subclass(value):
        return False
    return sum(_count_uses(user, node) for user in node.users) > 1


def _count_uses(user: Node, node: Node) -> int:
    found: list[Node] = []
    map_arg((user.args, user.kwargs), lambda each: found.append(each) if each is node else None)
    return len(found)


def _replace_uses(user: Node, node: Node, values: Sequence[Node]) -> None:
    """Let an operator read these in the place of a node, operand by operand."""
    left = iter(values)
    user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: next(left) if each is node else each)


def _view(value: Tensor) -> Tensor:
    return value.view_as(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SavedWithViews(State):
    target: State
    sources: tuple[int, ...]

    def restore(self, id: str) -> Callable[..., Any]:
        return _WithViews(self.target.restore(id), self.sources).__call__


class _WithViews:
    """Calls a compiled graph with views of its inputs."""

    def __init__(self, target: Callable[..., Any], sources: tuple[int, ...]) -> None:
        self._target, self._sources = target, sources

    def saved_state(self) -> State:
        """What it is restored from."""
        return _SavedWithViews(target=state_of(self._target), sources=self._sources)

    def __call__(self, *args: Any) -> Any:
        return self._target(*args, *[_view(args[place]) for place in self._sources])
