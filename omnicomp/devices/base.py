"""The contract of a device: whether it is there, what it can compute, and which lowerings serve it."""

import dataclasses
from typing import Protocol, runtime_checkable

import torch

__all__ = ["Capabilities", "Device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a device can do.

    Attributes:
        compute_dtypes: floating-point dtypes that it multiplies matrices in natively.
        storage_dtypes: dtypes that it can hold; a superset of `compute_dtypes`.
        fast_dtypes: dtypes of `compute_dtypes` in which matrix work is faster than in float32.
        tf32: whether it can multiply float32 matrices with operands rounded to 19 bits (TF32).
        inductor: whether Inductor generates code for it.
        triton: whether Triton kernels run on it.
        graph_mode: whether launches can be captured and replayed (CUDA graphs).
        attention_kernels: names of the fused attention kernels, fastest first.
        device_count: number of devices.
        name: name of the device for a person.
        exhaustive: whether the two lists of dtypes are complete, complex numbers and integers among them: no operator
            computes in another float or complex dtype than those of `compute_dtypes`, or takes or makes a tensor of
            another dtype than those of `storage_dtypes`. Integers that can be stored can be computed with, and booleans
            are there. Graphs for such a device are legalised.
    """

    compute_dtypes: tuple[torch.dtype, ...]
    storage_dtypes: tuple[torch.dtype, ...]
    fast_dtypes: tuple[torch.dtype, ...] = ()
    tf32: bool = False
    inductor: bool = False
    triton: bool = False
    graph_mode: bool = False
    attention_kernels: tuple[str, ...] = ()
    device_count: int = 0
    name: str = ""
    exhaustive: bool = False


@runtime_checkable
class Device(Protocol):
    """A kind of device, found through the entry-point group `omnicomp.devices`."""

    @property
    def type(self) -> str:
        """The device type as torch names it, for example `cuda`."""
        ...

    @property
    def lowerings(self) -> tuple[str, ...]:
        """Names of the lowerings that can serve it, `eager` among them."""
        ...

    def is_available(self) -> bool:
        """Whether the device can be used in this process. Never raises."""
        ...

    def unavailable_reason(self) -> str:
        """One sentence on why it can't be used and what to do; empty if it can."""
        ...

    def capabilities(self) -> Capabilities:
        """What the device can do. Only asked when it is available."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on it is done."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes `allocated`, `peak` and `free`; a key is left out if the device does not tell."""
        ...
