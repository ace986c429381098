"""XLA, through JAX: torch decomposes ATen operators to primitives, which are functions of `jax.numpy` and `jax.lax`."""

from omnicomp.lowerings.engines.xla import operators
from omnicomp.lowerings.engines.xla.engine import XlaEngine

__all__ = ["XlaEngine", "operators"]
