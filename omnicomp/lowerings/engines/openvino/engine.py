"""The engine: OpenVINO's frontend for FX graphs makes a model of a subgraph, for its sizes."""

import functools
import importlib
import importlib.metadata
import json
import math
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.base import Engine, EngineExecutable
from omnicomp.lowerings.engines.canonical import called, canonical
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.lazy import missing_package
from omnicomp.lowerings.engines.openvino.executable import OpenVinoExecutable, openvino, overflow, type_of
from omnicomp.lowerings.engines.subgraph import Results, Subgraph, with_constants

aten = torch.ops.aten

_PACKAGES: Final = {"openvino": (2025, 1), "numpy": (1, 26)}
_INSTALL: Final = 'pip install "omnicomp[openvino]"'
_EXTREMES: Final = {
    aten.amax.default: -math.inf,
    aten.max.default: -math.inf,
    aten.amin.default: math.inf,
    aten.min.default: math.inf,
}
_QUOTIENTS: Final = (aten.div.Tensor, aten.div.Scalar)
_SUMS: Final = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


class OpenVinoEngine(Engine):
    """OpenVINO on the CPU, for inference.

    What is float32 is computed in float32, whatever the processor could do faster; half precision too, and only
    results are rounded to it. It computes int64 in 32 bits and some operators on integers in float32, so that a
    subgraph is taken only if its integers stay exact while those that come in are within 2 ** 21, which each call asks.
    ReLU, `exp`, `clamp` and the larger or smaller of two numbers may turn NaN into a number, and an index out of range
    raises nothing.
    """

    name = "openvino"
    empty = False  # a broadcast to a shape without elements divides by zero while it is compiled, and ends the process
    clustering = Clustering(dtypes=_DTYPES)

    def missing(self) -> str:
        """OpenVINO, or a newer one."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """OpenVINO's."""
        return importlib.metadata.version("openvino")

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """As its table says, and where integers can't overflow."""
        refused = super().supports(node, context)
        if refused is None:
            sentence = overflow(node)
            return self._refused(node, sentence) if sentence else None
        return refused

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Build the model and compile it for the CPU.

        Raises:
            EngineError: a value does not have torch's shape.
            Exception: what OpenVINO raises.
        """
        results = Results(subgraph)
        names = [str(node.target) for node in subgraph.inputs]
        module = with_constants(subgraph)
        canonical(module.graph)
        _avoid_faults(module.graph)
        model, decoder = _converted(module)
        ports = {port.get_any_name(): port for port in model.inputs}
        fakes = {node.name: node.meta["val"] for node in module.graph.find_nodes(op="placeholder")}
        for name, port in ports.items():
            port.get_node().set_element_type(type_of(fakes[name].dtype))
            port.get_node().set_partial_shape(openvino.PartialShape(list(fakes[name].shape)))
        model.validate_nodes_and_infer_types()
        # A parameter that is a result would be a fault: OpenVINO then writes to the memory of the input.
        given: list[int | None] = []
        for result in list(model.get_results()):
            source = result.input_value(0).get_node()
            passed = source.get_type_name() == "Parameter"
            given.append(names.index(source.output(0).get_any_name()) if passed else None)
            if passed:
                model.remove_result(result)
        compiled = None
        if None in given:
            compiled = _core().compile_model(model, "CPU", settings(subgraph.threads))
        del decoder  # not before: the model's nodes ask it
        taken = [names.index(name) for name in ports]
        return OpenVinoExecutable(compiled, results, (taken, given), subgraph, module)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """From what OpenVINO exported."""
        head, _, body = data.partition(b"\n")
        compiled = _core().import_model(body, "CPU", settings(subgraph.threads))
        return OpenVinoExecutable(compiled, Results(subgraph), json.loads(head), subgraph, None)


def _avoid_faults(graph: Graph) -> None:
    """Write otherwise what OpenVINO 2026.4 computes wrong.

    Of infinite numbers alone, its largest is the lowest finite one, and its smallest the highest. A sum that keeps its
    dimensions is not that sum if it is divided by a constant.
    """
    for node in list(graph.nodes):
        if node.target in _QUOTIENTS and isinstance(node.args[1], (int, float)):
            if getattr(node.args[0], "target", None) in _SUMS:
                factor = 1 / node.args[1] if node.args[1] else math.inf
                node.target, node.args = aten.mul.Tensor, (node.args[0], factor)
        lowest = _EXTREMES.get(node.target)
        if lowest is None or not fake_value(node).dtype.is_floating_point:
            continue
        users, rest = list(node.users), node.args[1:]
        finite = called(node, aten.ne.Scalar, node.args[0], lowest)
        finite = called(finite, aten.any.dims if rest else aten.any.default, finite, *rest)
        hidden = called(finite, aten.logical_not.default, finite)
        kept = called(hidden, aten.masked_fill.Scalar, node, hidden, lowest)
        for user in users:
            user.replace_input_with(node, kept)


def _converted(module: GraphModule) -> tuple[Any, Any]:
    """The model of a graph, and the decoder that has to outlive the conversion."""
    decoder = importlib.import_module("openvino.frontend.pytorch.fx_decoder").TorchFXPythonDecoder(module)
    frontend = importlib.import_module("openvino.frontend").FrontEndManager().load_by_framework("pytorch")
    return frontend.convert(frontend.load(decoder)), decoder


def settings(threads: int) -> dict[str, Any]:
    """What is asked of OpenVINO: float32 as float32, one call at a time on so many threads, which stay unpinned."""
    return {
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
    }


@functools.cache
def _core() -> Any:
    return openvino.Core()
