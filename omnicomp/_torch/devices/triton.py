"""Inductor's Triton kernels for a device with launch limits: what the generated source has to say differently."""

import re
from typing import Any, ClassVar, Final

from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch.utils._ordered_set import OrderedSet

from omnicomp._torch.devices.launch_limits import LIMITS, limited_grid

__all__ = ["LimitedTritonKernel", "LimitedTritonScheduling", "triton_scheduling"]

# Their grids count on the number of programs: products of matrices, several kernels in one, scans in several parts.
_UNLIMITED: Final = (BackendFeature.TRITON_TEMPLATES, BackendFeature.FOREACH, BackendFeature.SCAN)
_HEURISTIC: Final = re.compile(r"^@triton_heuristics\.", re.MULTILINE)


class LimitedTritonKernel(TritonKernel):
    """A kernel whose grid may be larger than its work, and that carries its number of warps."""

    grid_limits: ClassVar[dict[str, int | None]]
    decoration: ClassVar[str]

    def _has_constant_mask(self, tree: Any) -> bool:
        # Torch leaves a mask out where the blocks divide the work evenly, and then the programs that a rounded grid has
        # on top of it would write beyond the end.
        if not tree.is_reduction and any(limit is not None for limit in self.grid_limits.values()) and tree.numel != 1:
            return False
        return super()._has_constant_mask(tree)

    def want_no_x_dim(self) -> bool:
        """Never: a kernel without that dimension has no mask for it."""
        return False

    def _get_grid_type(self) -> Any:
        inner = super()._get_grid_type()
        return inner if all(limit is None for limit in self.grid_limits.values()) else limited_grid(inner)

    @classmethod
    def inductor_meta_common(cls) -> dict[str, Any]:
        """Torch's, with the limits of the grid."""
        return {**super().inductor_meta_common(), LIMITS: cls.grid_limits}

    def codegen_kernel(self, name: str | None = None) -> str:
        """The source of the kernel, which applies the rest of the limits where it is loaded."""
        source = super().codegen_kernel(name)
        marked = _HEURISTIC.sub(f"{self.decoration}\n@triton_heuristics.", source, count=1)
        return f"import omnicomp._torch.devices.launch_limits\n{marked}" if marked != source else source


class LimitedTritonScheduling(TritonScheduling):
    """Scheduling for such kernels alone: what can't be limited is left to the device's own operators."""

    kernel_type: type[Any] = LimitedTritonKernel
    backend_features = OrderedSet([f for f in TritonScheduling.backend_features if f not in _UNLIMITED])


def triton_scheduling(
    device_type: str,
    *,
    max_grid: int | None,
    grid_multiple: int | None,
    num_warps: int | None,
    target: str,
    base: type[TritonScheduling] = TritonScheduling,
) -> type[TritonScheduling]:
    """A scheduling class for a device with launch limits.

    Args:
        device_type: its type.
        max_grid: up to so many programs in a dimension are launched as they are.
        grid_multiple: beyond it, or always, a multiple of this many is launched.
        num_warps: warps of each program.
        target: Triton's name of the backend that compiles for the device; empty if it is the device's type.
        base: the device's own scheduling.
    """
    kernel = type(
        f"{device_type}TritonKernel",
        (LimitedTritonKernel, base.kernel_type) if base.kernel_type is not TritonKernel else (LimitedTritonKernel,),
        {
            "__module__": __name__,
            "grid_limits": {"max_grid": max_grid, "grid_multiple": grid_multiple},
            "decoration": f"@omnicomp._torch.devices.launch_limits.limited(num_warps={num_warps}, target={target!r})",
        },
    )
    features = OrderedSet([f for f in base.backend_features if f not in _UNLIMITED])
    bases = (LimitedTritonScheduling,) if base is TritonScheduling else (LimitedTritonScheduling, base)
    own = {"__module__": __name__, "kernel_type": kernel, "backend_features": features}
    return type(f"{device_type}TritonScheduling", bases, own)
