"""ONNX Runtime as an engine: subgraphs are written as ONNX models by torch's own exporter, in memory."""

from omnicomp.lowerings.engines.onnxruntime import operators
from omnicomp.lowerings.engines.onnxruntime.engine import OnnxRuntimeEngine

__all__ = ["OnnxRuntimeEngine", "operators"]
