"""Overrides: hand-written kernels in the place of operators or patterns; those that ship are imported here."""

from omnicomp.lowerings.overrides import softmax_topk as softmax_topk
from omnicomp.lowerings.overrides.registry import Override, override, registered, unregister

__all__ = ["Override", "override", "registered", "unregister"]
