"""Forward-mode derivatives: tensors that carry a tangent, which generated code computes nothing of."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad


def carries_tangents(values: Iterable[Any]) -> bool:
    """Whether a value is a tensor with a tangent; outside `torch.autograd.forward_ad.dual_level` none is looked at."""
    if forward_ad._current_level < 0:
        return False
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
