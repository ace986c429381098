"""Dynamo's mark of a dimension as dynamic, which `torch.compiler` does not offer."""

import torch._dynamo
from torch import Tensor

__all__ = ["mark_dynamic"]


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Compile for any size of a dimension; a compilation that fixes it all the same raises."""
    torch._dynamo.mark_dynamic(tensor, dimension)
