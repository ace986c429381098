"""Triton kernels of the passes; a module that has kernels is imported where they are launched, as it needs Triton."""

import torch

from omnicomp.devices import Device


def measured(device: Device) -> bool:
    """Whether the kernels were measured on a GPU of this kind, and Triton is there: Hopper's."""
    if device.type != "cuda" or torch.version.hip is not None or not device.capabilities().triton:
        return False
    return torch.cuda.get_device_capability()[0] == 9
