"""Decomposing a graph after autograd: with Inductor's table when Inductor gets it, or with an engine's own.

A part that an engine may take is traced without decompositions, so that the engine sees the operators that its library
has kernels for. What goes to Inductor of such a part is traced again here, with the table that `compile_fx` would have
used from the start.
"""

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch._refs  # pyright: ignore[reportUnusedImport] - it fills the table
from torch._decomp import decomposition_table, get_decompositions
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node, traceback
from torch.fx.experimental.proxy_tensor import decompose, make_fx

from omnicomp._torch.inductor.eager_kernels import calls_eager
from omnicomp._torch.repairs.decompositions import decompositions_mended
from omnicomp._torch.repairs.written_while_read import sources_kept

_CARRIED = ("user_visible_output_idxs",)


def with_decompositions(module: GraphModule, inputs: Sequence[Any], part: str) -> GraphModule:
    """What Inductor would have been given, had the graph been traced with its decompositions.

    Args:
        module: a graph after autograd that was traced without any; it is not changed. What is to run on eager's kernels
            stays as it is.
        inputs: fake tensors and symbolic sizes, one a placeholder.
        part: if it is `inference`, Inductor's passes on joint graphs run again, for what they find only now.
    """
    with decompositions_mended():
        made = decomposed(module, inputs, select_decomp_table())
    if part == "inference":
        with sources_kept():
            joint_graph_passes(made)
    return made


def decomposed(
    module: GraphModule, inputs: Sequence[Any], table: Mapping[Any, Callable[..., Any]], *, whole: bool = True
) -> GraphModule:
    """Trace a graph anew with a table of decompositions.

    Args:
        module: a graph after autograd that returns a tuple; it is not changed.
        inputs: fake tensors and symbolic sizes, one a placeholder.
        table: operator to decomposition.
        whole: whether a graph without any operator of the table is traced as well.

    Returns:
        The graph with fake values, source lines and module paths on its nodes, with the same placeholders in the same
        order; `module` itself where `whole` is false and there is nothing to decompose.

    Raises:
        Exception: whatever a decomposition raises.
    """
    if not whole and not any(node.target in table for node in module.graph.nodes):
        return module
    mode = detect_fake_mode(list(inputs)) or FakeTensorMode(allow_non_fake_inputs=True)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    environment = mode.shape_env
    with contextlib.ExitStack() as inside:
        inside.enter_context(mock.patch.object(mode, "allow_non_fake_inputs", True))
        if environment is not None:
            inside.enter_context(environment.ignore_fresh_unbacked_symbols())
        inside.enter_context(mode)
        inside.enter_context(torch.no_grad())
        inside.enter_context(traceback.preserve_node_meta())
        made = make_fx(_Traced(module), decomposition_table=dict(table))(*inputs)
    _call_inputs(made.graph, names)
    old, new = (next(iter(reversed(graph.nodes))) for graph in (module.graph, made.graph))
    for key in _CARRIED:
        if key in old.meta:
            new.meta[key] = old.meta[key]
    made.recompile()
    return made


def _call_inputs(graph: torch.fx.Graph, names: Sequence[str]) -> None:
    """Give the placeholders their names, which in a piece may be those of operators of another one."""
    taken = set(names)
    for node in graph.nodes:
        if node.op != "placeholder":
            base, count = node.name, 0
            while node.name in taken:
                count += 1
                node._rename(f"{base}_again_{count}")
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name


class _Keeping(Interpreter):
    """Runs a graph node by node, without decompositions of what is to run on eager's kernels."""

    def run_node(self, n: Node) -> Any:
        with decompose({}) if calls_eager(n) else contextlib.nullcontext():
            return super().run_node(n)


class _Traced(torch.nn.Module):
    """Runs a graph node by node, so that each new node gets the source line of the one that made it."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__()
        self._run = _Keeping(module).run
        self.train(module.training)

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def decompositions_of(names: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """The decomposition of each functional overload of some ATen operators."""
    aten = torch.ops.aten
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    found: dict[Any, Callable[..., Any]] = get_decompositions(packets)
    return {target: made for target, made in found.items() if not target._schema.is_mutable}


def decompositions_but(kept: Container[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions of functional overloads, which end in primitives, but for those of some operators."""
    return {
        target: made
        for target, made in decomposition_table.items()
        if isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and target not in kept
    }
