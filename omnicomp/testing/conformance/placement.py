"""Where tensors are, and which operators went to the CPU."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from omnicomp._torch.devices.dispatcher import kernel_of
from omnicomp.testing.conformance.base import Session, expect

__all__ = ["claimed_natively", "on_device"]


def on_device(session: Session, value: Any) -> None:
    """See that every tensor of a structure is on the device.

    Raises:
        CheckFailed: one is not.
    """
    found = {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    expect(found <= {session.type}, f"results are on {', '.join(sorted(found))}", "return results on the device")


def claimed_natively(session: Session, counted: Mapping[str, int]) -> list[str]:
    """Operators that ran on the CPU though the dispatcher has a kernel of the device's for them."""
    return [name for name in counted if kernel_of(name, session.type).kernel == "native"]
