"""OpenVINO as an engine: its own frontend reads the graph, and compiles it within a second for a class of sizes."""

from omnicomp.lowerings.engines.openvino import operators
from omnicomp.lowerings.engines.openvino.engine import OpenVinoEngine

__all__ = ["OpenVinoEngine", "operators"]
