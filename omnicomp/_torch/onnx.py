"""torch's ONNX exporter, by the part of it that writes a graph of ATen operators: no tracing, no files.

`torch.onnx.export` takes ten times as long, most of it for tracing a program that is already a graph here.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

_PACKAGE = "torch.onnx._internal.exporter"


@functools.cache
def _registry(opset: int) -> Any:
    module = importlib.import_module(f"{_PACKAGE}._registration")
    logger: logging.Logger = module.logger
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of packages that are not installed, whose operators nobody asked for
    try:
        return module.ONNXRegistry.from_torchlib(opset)
    finally:
        logger.setLevel(level)


def registered(operator: torch._ops.OpOverload, opset: int) -> bool:
    """Whether the exporter has a form of an operator for an ONNX operator set.

    Raises:
        ImportError: onnx or onnxscript is not installed.
    """
    return bool(_registry(opset).get_decomps(operator))


def translated(
    graph: Graph, opset: int, functions: Mapping[torch._ops.OpOverload, Callable[..., Any]]
) -> tuple[Any, dict[str, Any]]:
    """Write a graph as an ONNX model.

    Args:
        graph: of ATen operators with fake values, without symbolic sizes; it returns a tuple of different nodes.
        opset: version of the ONNX operator set.
        functions: forms of operators that come before the exporter's: functions of the operator's arguments in its
            order, which call `onnxscript` operators.

    Returns:
        An `onnx_ir.Model`, whose inputs are the placeholders and are called as they are, and the `onnx_ir.Value`, or
        the sequence of them, of each node by the node's name.

    Raises:
        Exception: an operator has no form, or the form can't be written for these arguments.
    """
    core = importlib.import_module(f"{_PACKAGE}._core")
    constants = importlib.import_module(f"{_PACKAGE}._constants")
    ir = importlib.import_module("onnx_ir")
    registry = _with_functions(opset, tuple(functions.items()))
    for node in graph.nodes:
        node.meta.setdefault("nn_module_stack", {})  # it warns of each node that says nothing of modules
    model = ir.Model(
        graph=ir.Graph([], [], nodes=[], name="main_graph", opset_imports={"": opset}),
        ir_version=constants.ONNX_IR_VERSION,
        producer_name="omnicomp",
    )
    values = core._translate_fx_graph(
        graph, model, graph_like=model.graph, owned_graphs={}, lower="at_conversion", registry=registry
    )
    importlib.import_module(f"{_PACKAGE}._ir_passes").add_opset_imports(model)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, for example
    return model, values


@functools.lru_cache(maxsize=8)
def _with_functions(opset: int, functions: tuple[tuple[torch._ops.OpOverload, Callable[..., Any]], ...]) -> Any:
    made = type(_registry(opset))()
    made._opset_version = opset
    made.functions = {name: list(forms) for name, forms in _registry(opset).functions.items()}
    for operator, function in functions:
        made.register_op(operator, function)
    return made
