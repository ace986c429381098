"""The engine's contract, kept by ONNX Runtime."""

import importlib
import importlib.metadata
from typing import ClassVar, Final

import torch

from omnicomp._torch.autograd.decompositions import decompositions_of
from omnicomp.lowerings.engines.base import Engine, EngineExecutable
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.onnxruntime.executable import OnnxRuntimeExecutable, loaded
from omnicomp.lowerings.engines.onnxruntime.model import DTYPES, OPSET, onnx_model
from omnicomp.lowerings.engines.shared_decompositions import DECOMPOSITIONS
from omnicomp.lowerings.engines.subgraph import Subgraph
from omnicomp.lowerings.engines.versions import missing_package

__all__ = ["OnnxRuntimeEngine"]

# What torch makes of operators of the table. Nothing random is among them.
_DECOMPOSED: Final = (
    *("smooth_l1_loss", "huber_loss", "hardshrink", "softshrink", "square", "nan_to_num"),
    *("rsub", "var", "std", "var_mean", "std_mean", "index_add", "index_copy", "aminmax", "rot90"),
    *("_safe_softmax", "_fused_rms_norm", "_weight_norm_interface", "_adaptive_avg_pool2d", "eye"),
    *("isfinite", "positive"),
)

_OWN: Final = {target: DECOMPOSITIONS[target] for target in (torch.ops.aten.log_sigmoid_forward.default,)}
_PACKAGES: Final = {"onnxruntime": (1, 22), "onnx": (1, 17), "onnxscript": (0, 5)}
_INSTALL: Final = 'pip install "omnicomp[onnx]"'


class OnnxRuntimeEngine(Engine):
    """ONNX Runtime on the CPU, for inference."""

    name = "onnxruntime"
    clustering = Clustering(dtypes=tuple(DTYPES))
    decompositions: ClassVar = {**decompositions_of(_DECOMPOSED), **_OWN}

    def missing(self) -> str:
        """Which package is not there, or too old."""
        return missing_package(_PACKAGES, _INSTALL)

    def version(self) -> str:
        """Versions of the runtime, of what writes models for it, and of the operator set."""
        versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
        return ", ".join([*versions, f"opset {OPSET}"]).removeprefix("onnxruntime ")

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Write the model and make a session of it."""
        return OnnxRuntimeExecutable(onnx_model(subgraph), subgraph)

    def loads(self, data: bytes, subgraph: Subgraph) -> EngineExecutable:
        """The model of `OnnxRuntimeExecutable.dumps`, with the weights of this process."""
        return loaded(data, subgraph)
