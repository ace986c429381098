"""Launch limits of a device's Triton kernels, applied where a kernel is loaded; generated code imports this module.

Each kernel of a device with limits carries a decorator of its own, so nothing of torch is replaced, and the kernels of
another device in the same process are launched as ever.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.utils._ordered_set import OrderedSet

# The key in a kernel's metadata.
LIMITS: Final = "omnicomp_limits"


def rounded(programs: int, max_grid: int | None, grid_multiple: int | None) -> int:
    """The number of programs that is launched in one dimension of a grid where `programs` are needed.

    Up to `max_grid` any number; beyond it the next multiple of `grid_multiple`, or none.

    Raises:
        RuntimeError: more are needed than may be launched.
    """
    if max_grid is not None and programs <= max_grid:
        return programs
    if grid_multiple is not None:
        return -(programs // -grid_multiple) * grid_multiple
    return programs if max_grid is None else refuse(programs, max_grid)


def refuse(programs: int, max_grid: int) -> int:
    """Always raises: so many programs can't be launched.

    Raises:
        RuntimeError: with both numbers.
    """
    raise RuntimeError(
        f"a kernel needs {programs} programs in one dimension of its grid, and the device launches at most {max_grid}; "
        "give LaunchLimits a grid_multiple if larger grids may be launched in multiples of it"
    )


class LimitedGrid(GridExpr):
    """A grid of torch's, rounded in each dimension by the limits in the kernel's metadata."""

    inner: ClassVar[type[GridExpr]]

    def generate(self, meta: dict[str, int], is_lazy: bool = False) -> None:
        """Expressions of the three dimensions, in Python or in C++."""
        inner = self.inner(inductor_meta=self.inductor_meta, mode=self.mode)
        inner.generate(meta)
        self.prefix.extend(inner.prefix)
        for dimension in ("x", "y", "z"):
            value: str | int = getattr(inner, f"{dimension}_grid")
            setattr(
                self, f"{dimension}_grid", self._limited(f"omnicomp_{dimension}_", value, **self.inductor_meta[LIMITS])
            )

    def _limited(self, name: str, value: str | int, *, max_grid: int | None, grid_multiple: int | None) -> str | int:
        if max_grid is None and grid_multiple is None:
            return value
        if isinstance(value, int):
            return rounded(value, max_grid, grid_multiple)
        self.prefix.append(self.assign_tmp(name, value))
        python = self.mode == "python"
        if grid_multiple is not None:
            up = f"-({name} // -{grid_multiple}) * {grid_multiple}"
            if not python:
                up = f"({name} + {grid_multiple - 1}u) / {grid_multiple}u * {grid_multiple}u"
        elif python:
            up = f"__import__({__name__!r}, fromlist=['refuse']).refuse({name}, {max_grid})"
        else:
            up = f'throw std::runtime_error("a grid is larger than {max_grid}, which is all that the device launches")'
        if max_grid is None:
            return f"({up})"
        if python:
            return f"({name} if {name} <= {max_grid} else {up})"
        return f"({name} <= {max_grid}u ? {name} : {up})"


def _make(inner: type[GridExpr]) -> type[LimitedGrid]:
    # A kernel's metadata names its type of grid, and torch looks the name up in its own module.
    made = type(f"Omnicomp{inner.__name__}", (LimitedGrid,), {"inner": inner, "__module__": __name__})
    setattr(triton_heuristics, made.__name__, made)
    return made


# Every program beyond the end of these is masked off in the kernel. Other grids count their programs, or wait for one
# another's, and a larger one would compute something else.
_LIMITED: Final[dict[type[GridExpr], type[LimitedGrid]]] = {
    inner: _make(inner)
    for inner in (
        triton_heuristics.Grid1D,
        triton_heuristics.Grid2D,
        triton_heuristics.Grid3D,
        triton_heuristics.Grid2DWithYZOverflow,
    )
}


def limited_grid(inner: type[GridExpr]) -> type[LimitedGrid]:
    """The type of grid that takes the place of one of torch's.

    Raises:
        NotImplementedError: a larger grid of that type computes something else.
    """
    made = _LIMITED.get(inner)
    if made is None:
        raise NotImplementedError(f"a kernel with a grid of type {inner.__name__} can't be launched with a larger one")
    return made


def limited(*, num_warps: int | None = None, target: str = "") -> Callable[[Any], Any]:
    """A decorator for a kernel that a heuristic of Inductor has made a `CachingAutotuner` of.

    Args:
        num_warps: warps of each program, whatever the heuristic thought of.
        target: Triton's name of the backend that compiles for the device, if it is not the device's type.
    """

    def apply(kernel: Any) -> Any:
        if num_warps is not None:
            for config in kernel.configs:
                config.num_warps = num_warps
            kernel.configs = triton_heuristics.unique_configs(kernel.configs)
            kernel.inductor_meta.pop("coordinate_descent_tuning", None)  # it tries other numbers of warps
        if target:
            kernel.device_props = kernel.device_props._replace(type=target)
            kernel.triton_meta["device_type"] = target
        return kernel

    return apply


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
