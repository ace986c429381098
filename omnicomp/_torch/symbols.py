"""Symbolic sizes."""

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_symbols, free_unbacked_symbols

__all__ = ["GuardOnDataDependentSymNode", "free_symbols", "free_unbacked_symbols"]
