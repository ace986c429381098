"""TVM as an engine: its own importer reads the graph, and a virtual machine a thread runs what is built."""

from omnicomp.lowerings.engines.tvm import operators
from omnicomp.lowerings.engines.tvm.engine import TvmEngine

__all__ = ["TvmEngine", "operators"]
