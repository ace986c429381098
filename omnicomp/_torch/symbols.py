"""Symbolic sizes."""

from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

__all__ = ["free_symbols", "free_unbacked_symbols"]
