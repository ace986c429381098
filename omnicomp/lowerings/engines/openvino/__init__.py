"""OpenVINO as an engine: ATen operators as operations of its opset, compiled within a second for a class of sizes."""

from omnicomp.lowerings.engines.openvino import layers, linear, made, pointwise, reductions, shapes
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine

__all__ = ["OpenVinoEngine", "layers", "linear", "made", "pointwise", "reductions", "shapes"]
