"""Overrides: hand-written kernels in place of operators, patterns and modules; those that ship are imported here."""

from omnicomp.lowerings.overrides import int8_linear as int8_linear
from omnicomp.lowerings.overrides import linear_cross_entropy as linear_cross_entropy
from omnicomp.lowerings.overrides import softmax_topk as softmax_topk
from omnicomp.lowerings.overrides.registry import Override, override, registered, unregister

__all__ = ["Override", "override", "registered", "unregister"]
