"""Clustering: which subgraphs an engine gets, as options, and why one is refused."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import free_symbols, known_range
from omnicomp.analysis.nodes import fake_value
from omnicomp.errors import EngineError, nearest, wrong_value

DYNAMIC: Final = ("refused", "classes", "batch", "any")
_DEPRECATED: Final = frozenset({"trial", "trial_seconds"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustering:
    """What may go to an engine together.

    Attributes:
        smallest: operators that a subgraph has at least, views not counted; a smaller one is not worth its boundary.
        strict: whether operators go together only if values flow between them inside the subgraph.
        devices: device types.
        dtypes: of the tensors that it reads and makes; None for all.
        training: whether the graphs of a training step may go to it: a forward that is differentiated, and a backward.
        mutable_inputs: whether a subgraph may write to its inputs.
        aliases: whether a subgraph may return a view of an input. An engine returns new memory for it, which is right
            in the functional graphs behind autograd, but costs the copy.
        dynamic: what is done about symbolic sizes: `refused`; `classes` builds for the sizes of a call, and keeps what
            was built for several; `batch` takes graphs whose first dimensions alone are symbolic; `any` takes all.
        sizes: the smallest and largest value of a symbolic size, or None for no bound.
        most_classes: how many builds of one subgraph are kept with `classes`; more sizes than that are a sign that
            the sizes never repeat.
        workspace_bytes: memory that an engine may use beside inputs and outputs; None for no limit. It is handed to
            engines whose library has such a setting; others ignore it.
    """

    smallest: int = 1
    strict: bool = False
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] | None = None
    training: bool = False
    mutable_inputs: bool = False
    aliases: bool = True
    dynamic: str = "classes"
    sizes: tuple[int | None, int | None] = (None, None)
    most_classes: int = 8
    workspace_bytes: int | None = None

    def changed(self, engine: str, values: Mapping[str, Any]) -> "Clustering":
        """The same with some of a user's values.

        Raises:
            EngineError: there is no such option, or a value is of another type than the default.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _DEPRECATED & set(values):
            text = f"option {name} of the engine {engine} has no effect any more: engines are not tried in a process"
            warnings.warn(f"{text} of their own", DeprecationWarning, stacklevel=2)
        values = {name: value for name, value in values.items() if name not in _DEPRECATED}
        for name, value in values.items():
            if name not in fields:
                raise EngineError(f"the engine {engine} has no option {name!r}{nearest(name, fields)}")
            if not _fits(name, value, fields[name]):
                what = f"option {name} of the engine {engine}"
                accepted = " or ".join(map(repr, DYNAMIC)) if name == "dynamic" else "a value as its default"
                raise wrong_value(what, value, accepted, example=fields[name], error=EngineError)
        return dataclasses.replace(
            self, **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )

    def refusal(self, nodes: Sequence[Node]) -> str:
        """Why a run of nodes is not handed over: one sentence; empty if it is."""
        counted = sum(map(is_call, nodes))
        if counted < self.smallest:
            return (
                f"it has {counted} operator{'s' if counted != 1 else ''}, and the smallest subgraph has {self.smallest}"
            )
        members = set(nodes)
        if not self.aliases:
            for node in nodes:
                if any(user not in members for user in node.users) and _is_view_of_input(node, members):
                    return f"its result {node.name} is a view of an input, of which the engine would return a copy"
        return "" if self.dynamic == "classes" and self.sizes == (None, None) else self._dynamic(nodes, members)

    def _dynamic(self, nodes: Sequence[Node], members: set[Node]) -> str:
        outside = {source for node in nodes for source in node.all_input_nodes if source not in members}
        for node in [*nodes, *outside]:
            for leaf in tree_leaves(fake_value(node)):
                if isinstance(leaf, torch.SymInt) and self.dynamic not in ("classes", "any"):
                    return f"it reads a symbolic size ({node.name}), and its sizes are {self.dynamic}"
                if isinstance(leaf, torch.Tensor) and free_symbols(leaf):
                    sentence = self._tensor(leaf, node)
                    if sentence:
                        return sentence
        return ""

    def _tensor(self, value: torch.Tensor, node: Node) -> str:
        if self.dynamic == "refused":
            return f"{node.name} has symbolic sizes, {tuple(map(str, value.shape))}"
        for index, size in enumerate(value.shape):
            if not isinstance(size, torch.SymInt):
                continue
            if self.dynamic == "batch" and index:
                return f"dimension {index} of {node.name} is symbolic, and the engine takes symbolic batches alone"
            low, high = known_range(size, size.node.expr)
            smallest, largest = self.sizes
            if smallest is not None and (low is None or low < smallest):
                return f"{size} of {node.name} may be {low}, and the engine takes {smallest} or more"
            if largest is not None and (high is None or high > largest):
                return f"{size} of {node.name} may be {high}, and the engine takes {largest} or less"
        return ""


_VIEWS: Final = ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand")
_VIEWS_OR_PARTS: Final = (*_VIEWS, "alias", "detach", "slice", "select", "getitem", "split", "unbind", "as_strided")


def is_call(node: Node) -> bool:
    """Whether a node computes something, rather than take a result apart or look at it another way."""
    return node.op == "call_function" and _base_name(node) not in _VIEWS_OR_PARTS


def _base_name(node: Node) -> str:
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else getattr(target, "__name__", "")


def _is_view_of_input(node: Node, members: set[Node]) -> bool:
    while node in members:
        if _base_name(node) not in _VIEWS_OR_PARTS or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return True


def _fits(name: str, value: Any, default: Any) -> bool:
    if name == "dynamic":
        return value in DYNAMIC
    if name == "workspace_bytes":
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
    if name == "sizes":
        ends = isinstance(value, (tuple, list)) and len(value) == 2
        return ends and all(end is None or (isinstance(end, int) and end >= 0) for end in value)
    if name == "dtypes":
        return value is None or (isinstance(value, (tuple, list)) and all(isinstance(v, torch.dtype) for v in value))
    if name == "devices":
        return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)
    if default is None:  # a switch that a rule decides on where nobody does
        return value is None or isinstance(value, bool)
    return type(value) is type(default) and (not isinstance(value, int) or value >= 0)
