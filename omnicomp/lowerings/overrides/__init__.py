"""Overrides: hand-written kernels in place of operators, patterns and modules; `registry` imports those that ship."""

from omnicomp.lowerings.overrides.registry import Override, override, registered, unregister

__all__ = ["Override", "override", "registered", "unregister"]
