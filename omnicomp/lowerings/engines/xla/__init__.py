"""XLA, through JAX: ATen operators as functions of `jax.numpy` and `jax.lax`, compiled for a class of sizes."""

from omnicomp.lowerings.engines.xla import layers, linear, pointwise, pools, reductions, shapes
from omnicomp.lowerings.engines.xla.engine import XlaEngine

__all__ = ["XlaEngine", "layers", "linear", "pointwise", "pools", "reductions", "shapes"]
