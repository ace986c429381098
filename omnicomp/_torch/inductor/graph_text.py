"""A graph as text, and back: its generated code, the imports of that, and small constants.

Pickles of graphs and tensors hold addresses and differ from process to process; this text is the same for the same
graph, so that it can be part of a cache key.
"""

import base64
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.graph_module import _format_import_block, _forward_from_src, reduce_graph_module
from torch.package import sys_importer

from omnicomp import records

# What Inductor folds or lifts is small; weights that were frozen into the graph are not to be copied.
MAX_CONSTANT_BYTES: Final = 2**20


def to_source(module: GraphModule) -> dict[str, Any]:
    """The text of a graph, in JSON types.

    Raises:
        ValueError: something that the graph holds can't travel as text.
    """
    if any("kernel_idx" in node.kwargs for node in module.graph.nodes):
        raise ValueError("it calls a Triton kernel by a number, which is another one in each process")
    code = module.graph.python_code("self")
    constants: dict[str, Any] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." in name:
            raise ValueError(f"the constant {name} is nested")
        constants[name] = dump_constant(name, getattr(module, name))
    return {"imports": _format_import_block(code.globals, sys_importer), "code": code.src, "constants": constants}


def dump_constant(name: str, value: Any) -> Any:
    """A small tensor or a graph, in JSON types.

    Raises:
        ValueError: it is neither, or can't travel as text.
    """
    if isinstance(value, GraphModule):
        return {"graph": to_source(value)}
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        raise ValueError(f"the constant {name} is a {type(value).__name__}")
    if value.numel() * value.element_size() > MAX_CONSTANT_BYTES:
        raise ValueError(f"the constant {name} has {value.numel() * value.element_size()} bytes")
    if isinstance(value, FakeTensor):
        raise ValueError(f"the constant {name} has no values")
    with unset_fake_temporarily(), torch.no_grad():
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        stride = list(torch.empty_like(value).stride())  # dense, also where the constant was expanded
    return {
        "data": base64.b64encode(data).decode("ascii"),
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": stride,
        "device": str(value.device),
    }


def from_source(data: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of the list of its inputs whose text `to_source` made of a graph in the boxed convention."""
    return _function(data)


def _function(data: dict[str, Any]) -> Callable[..., Any]:
    forward = _forward_from_src(f"{data['imports']}\n{data['code']}", {})
    return functools.partial(forward, types.SimpleNamespace(**_constants(data)))


@records.dataclass(frozen=True)
class TextGraph:
    """A graph in the usual convention as text, with what is read of a graph module that is only called."""

    data: dict[str, Any]  # the text, from `to_source`

    @property
    def code(self) -> str:
        """The generated code."""
        return self.data["code"]

    @property
    def forward(self) -> Callable[..., Any]:
        """The function of the graph's inputs."""
        return _function(self.data)


def _constants(data: dict[str, Any]) -> dict[str, Any]:
    return {name: load_constant(value) for name, value in data["constants"].items()}


def load_constant(value: dict[str, Any]) -> Any:
    """What `dump_constant` made the data of."""
    inner = value.get("graph")
    if inner is not None:
        body: dict[str, Any] = {**torch.nn.Module().__dict__, "_code": inner["code"]}
        for name, constant in _constants(inner).items():
            (body["_modules"] if isinstance(constant, GraphModule) else body)[name] = constant
        return reduce_graph_module(body, f"{inner['imports']}\n")
    flat = torch.frombuffer(bytearray(base64.b64decode(value["data"])) or bytearray(1), dtype=torch.uint8)
    dtype = getattr(torch, value["dtype"])
    count = 1
    for size in value["shape"]:
        count *= size
    tensor = flat.view(dtype)[:count] if count else torch.empty(0, dtype=dtype)
    tensor = tensor.view(value["shape"])
    result = torch.empty_strided(value["shape"], value["stride"], dtype=dtype, device=value["device"])
    return result.copy_(tensor)
