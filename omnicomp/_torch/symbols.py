"""Symbolic sizes."""

from torch.fx.experimental.symbolic_shapes import free_symbols

__all__ = ["free_symbols"]
