"""The engine: a subgraph becomes an OpenVINO model for its sizes."""

import functools
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch
from torch.fx import Node

from omnicomp._torch.autograd.decompositions import decompositions_of
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.base import LoweringContext, Support
from omnicomp.lowerings.engines.base import EngineExecutable
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.conversion import Results, TableEngine, convert
from omnicomp.lowerings.engines.openvino.bounds import overflow
from omnicomp.lowerings.engines.openvino.executable import OpenVinoExecutable
from omnicomp.lowerings.engines.openvino.library import OpenVino, openvino, ops, type_of
from omnicomp.lowerings.engines.shared_decompositions import DECOMPOSITIONS
from omnicomp.lowerings.engines.subgraph import Subgraph
from omnicomp.lowerings.engines.versions import missing_package

__all__ = ["OpenVinoEngine"]

_PACKAGES: Final = {"openvino": (2025, 1), "numpy": (1, 26)}
_INSTALL: Final = 'pip install "omnicomp[openvino]"'
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)

# What torch makes of operators of the table. Nothing random is among them.
_DECOMPOSED: Final = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "glu", "hardshrink", "softshrink"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *("pixel_shuffle", "pixel_unshuffle", "addmv", "addr", "eye", "sinc", "std_mean"),
    *("aminmax", "unfold", "rot90", "_safe_softmax", "_fused_rms_norm", "logit"),
    *("_weight_norm_interface", "select_scatter", "diagonal", "nll_loss_forward"),
    *("lerp",),
)


class OpenVinoEngine(TableEngine):
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
    decompositions: ClassVar = {**decompositions_of(_DECOMPOSED), **DECOMPOSITIONS}

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
        library, results = OpenVino(), Results(subgraph)
        inputs: list[Any] = []
        parameters: list[Any] = []
        called = set(subgraph.inputs)
        for index, node in enumerate(subgraph.placeholders):
            fake = fake_value(node)
            if index in subgraph.constants:
                inputs.append(library.constant(subgraph.constants[index]))
            elif node in called:
                parameters.append(openvino.op.Parameter(type_of(fake.dtype), openvino.PartialShape(list(fake.shape))))
                inputs.append(parameters[-1].output(0))
            else:
                inputs.append(None)
        values = [convert(subgraph, self.operators, library, inputs)[node] for node in results.nodes]
        # A parameter that is a result would be a fault: OpenVINO then writes to the memory of the input.
        given = [_position(value, parameters) for value in values]
        computed = [ops.result(v).get_node() for v, place in zip(values, given, strict=True) if place is None]
        compiled = None
        if computed:
            model = openvino.Model(computed, parameters, "subgraph")
            compiled = _core().compile_model(model, "CPU", settings(subgraph.threads))
        return OpenVinoExecutable(compiled, results, given, subgraph, library.held)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """From what OpenVINO exported."""
        given, _, body = data.partition(b"\n")
        compiled = _core().import_model(body, "CPU", settings(subgraph.threads))
        return OpenVinoExecutable(compiled, Results(subgraph), json.loads(given), subgraph, [])


def _position(value: Any, parameters: Sequence[Any]) -> int | None:
    """Which of the parameters a value is; None if it is computed."""
    node = value.get_node()
    return next((index for index, each in enumerate(parameters) if each is node or each == node), None)


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
