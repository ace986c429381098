"""TVM: ATen operators as Relax operators, built for a class of sizes and run by a virtual machine a thread."""

from omnicomp.lowerings.engines.tvm import layers, pointwise, reductions, shapes
from omnicomp.lowerings.engines.tvm.engine import TvmEngine

__all__ = ["TvmEngine", "layers", "pointwise", "reductions", "shapes"]
