"""A subgraph as an ONNX model: in memory, with large weights left where they are."""

import dataclasses
import importlib
import operator
from typing import Any, Final

import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import copy_module
from omnicomp._torch.onnx import translated
from omnicomp.lowerings.engines.canonical import canonical
from omnicomp.lowerings.engines.onnxruntime.forms import FORMS
from omnicomp.lowerings.engines.subgraph import Subgraph

__all__ = ["DTYPES", "OPSET", "Model", "onnx_model"]

OPSET: Final = 20
"""Version of ONNX's operator set: the oldest with `Gelu`."""

DTYPES: Final[dict[torch.dtype, tuple[int, str]]] = {
    torch.float32: (1, "tensor(float)"),
    torch.uint8: (2, "tensor(uint8)"),
    torch.int8: (3, "tensor(int8)"),
    torch.int32: (6, "tensor(int32)"),
    torch.int64: (7, "tensor(int64)"),
    torch.bool: (9, "tensor(bool)"),
    torch.float16: (10, "tensor(float16)"),
    torch.float64: (11, "tensor(double)"),
}
"""Number of the dtype in ONNX's `TensorProto.DataType`, and what ONNX Runtime calls it."""

# Smaller ones are part of the model, so that they can be computed with while it is optimised.
_LARGE: Final = 1024
_NOWHERE: Final = "weights of the program"


@dataclasses.dataclass(frozen=True)
class Model:
    """An ONNX model.

    Attributes:
        data: the serialised model; without the weights that are given to a session beside it.
        results: for each result of the subgraph the position among the model's, or None for None.
    """

    data: bytes
    results: tuple[int | None, ...]


def onnx_model(subgraph: Subgraph) -> Model:
    """Write a subgraph as an ONNX model, whose inputs and results are those of a call, in order.

    Args:
        subgraph: without symbolic sizes.

    Raises:
        Exception: what the exporter raises.
    """
    ir = importlib.import_module("onnx_ir")
    subgraph = dataclasses.replace(subgraph, module=copy_module(subgraph.module))
    outputs = subgraph.outputs
    distinct = list(dict.fromkeys(node for node in outputs if node is not None))
    position = {node: index for index, node in enumerate(distinct)}
    graph = subgraph.module.graph
    next(iter(reversed(graph.nodes))).args = (tuple(distinct),)
    graph.eliminate_dead_code()
    canonical(graph)
    inputs, placeholders = set(subgraph.inputs), subgraph.placeholders
    fixed = _as_placeholders(subgraph.module)
    distinct = list(next(iter(reversed(graph.nodes))).args[0])
    model, values = translated(graph, OPSET, FORMS)
    model.graph.inputs.clear()
    model.graph.outputs.clear()
    for index, node in enumerate(placeholders):
        value = values[node.name]
        if index in subgraph.constants:
            value.const_value = _weight(ir, subgraph.constants[index].contiguous(), value.name)
            model.graph.initializers[value.name] = value
        elif node in inputs:
            model.graph.inputs.append(value)
    for name, tensor in fixed.items():
        value = values[name]
        value.const_value = ir.Tensor(tensor.numpy(), dtype=ir.DataType(DTYPES[tensor.dtype][0]), name=value.name)
        model.graph.initializers[value.name] = value
    for index, node in enumerate(distinct):
        # An input or a weight that is a result as it is would be left out of the program, and its memory unwritten.
        copied = ir.Node("", "Identity", [values[node.name]], name=f"result_{index}")
        (result,) = copied.outputs
        result.name = f"result_{index}"
        result.type = ir.TensorType(ir.DataType(DTYPES[node.meta["val"].dtype][0]))
        result.shape = ir.Shape(list(node.meta["val"].shape))
        model.graph.append(copied)
        model.graph.outputs.append(result)
    data = ir.serde.serialize_model(model).SerializeToString()
    return Model(data, tuple(None if node is None else position[node] for node in outputs))


def _as_placeholders(module: GraphModule) -> dict[str, torch.Tensor]:
    """Make inputs of a graph's own constants, which the exporter does not read; their values, by name."""
    found: dict[str, torch.Tensor] = {}
    for node in list(module.graph.find_nodes(op="get_attr")):
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            given = module.graph.placeholder(f"fixed_{node.name}")
        given.meta["val"] = node.meta["val"]
        found[given.name] = operator.attrgetter(str(node.target))(module).detach().contiguous()
        node.replace_all_uses_with(given)
        module.graph.erase_node(node)
    return found


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a weight is given to a session as it is."""
    return tensor.numel() * tensor.element_size() >= _LARGE


def _weight(ir: Any, tensor: torch.Tensor, name: str) -> Any:
    dtype = ir.DataType(DTYPES[tensor.dtype][0])
    if not is_large(tensor):
        return ir.Tensor(tensor.numpy(), dtype=dtype, name=name)
    size = tensor.numel() * tensor.element_size()
    shape = ir.Shape(list(tensor.shape))
    return ir.ExternalTensor(_NOWHERE, offset=0, length=size, dtype=dtype, shape=shape, name=name)
