"""What a device declares of its own conformance: how exact it is, and what it is not asked for."""

import abc
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

import omnicomp
from omnicomp import records
from omnicomp._torch.inductor.compile_fx import compile_part, has_inductor
from omnicomp.errors import DeviceError


@records.dataclass(frozen=True, kw_only=True)
class Expectations:
    """Tolerances, checks that are left out, and dtypes, for `omnicomp conformance`.

    Names are those of checks, `group.subject`, by shell patterns: `operators.linalg.*`, `models.llama_*`. The last
    pattern that matches holds.

    Attributes:
        tolerances: `(atol, rtol)` by check, in place of the suite's.
        skips: why a check is left out, by check. Those of the contract can't be.
        dtypes: in which operators are compared, the first of them that one takes on the CPU; by default float32, and
            for those that don't take it int64, bool, complex64 or bfloat16.
    """

    tolerances: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    skips: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    dtypes: tuple[torch.dtype, ...] = ()

    def tolerance(self, check: str) -> tuple[float, float] | None:
        """What is declared for a check, or None."""
        return next(
            (self.tolerances[each] for each in reversed(list(self.tolerances)) if fnmatchcase(check, each)), None
        )

    def skip(self, check: str) -> str:
        """Why a check is left out; empty if it is not."""
        if check.startswith("contract."):
            return ""
        return next((self.skips[each] for each in reversed(list(self.skips)) if fnmatchcase(check, each)), "")

    def problems(self, checks: tuple[str, ...]) -> list[str]:
        """What is wrong with the declaration."""
        found = [
            f"{what} has {pattern!r}, which is no check"
            for what in ("tolerances", "skips")
            for pattern in getattr(self, what)
            if not any(fnmatchcase(check, pattern) for check in checks)
        ]
        for pattern, bounds in self.tolerances.items():
            if len(bounds) != 2 or any(each < 0 for each in bounds):
                found.append(f"the tolerance of {pattern!r} is (atol, rtol), not {bounds!r}")
        found += [f"the skip of {pattern!r} has no reason" for pattern, reason in self.skips.items() if not reason]
        found += [
            f"{pattern!r}: the contract is not left out" for pattern in self.skips if pattern.startswith("contract")
        ]
        return found


MEMORY_KEYS: Final = ("allocated_bytes", "peak_bytes", "reserved_bytes", "total_bytes")
"""The keys of `Device.memory_stats` on every device."""
_NO_CONFIG: Final[Mapping[str, Any]] = MappingProxyType({})


@records.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a device can do.

    Attributes:
        compute_dtypes: floating-point dtypes that it multiplies matrices in natively.
        storage_dtypes: dtypes that it can hold; a superset of `compute_dtypes`.
        fast_dtypes: dtypes of `compute_dtypes` in which matrix work is faster than in float32.
        tf32: whether it can multiply float32 matrices with operands rounded to 19 bits (TF32).
        inductor: whether Inductor generates code for it.
        compiler: what its subgraphs are compiled with, for a person: `C++`, `Triton`, `torch_npu graph mode`; or empty.
        triton: whether Triton kernels run on it.
        graph_mode: whether launches can be captured and replayed (CUDA graphs).
        attention_kernels: names of the fused attention kernels, fastest first.
        max_grid: the largest number of blocks of a launch along each axis, or empty if it is not known.
        warp_sizes: how many threads go in step, for each size that it offers; empty if it has no such groups.
        memory_bytes: memory of one device, or 0 if it is not known.
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
    compiler: str = ""
    triton: bool = False
    graph_mode: bool = False
    attention_kernels: tuple[str, ...] = ()
    max_grid: tuple[int, ...] = ()
    warp_sizes: tuple[int, ...] = ()
    memory_bytes: int = 0
    device_count: int = 0
    name: str = ""
    exhaustive: bool = False


class Device(abc.ABC):
    """A kind of device, found through the entry-point group `omnicomp.devices`.

    Attributes:
        type: the device type as torch names it, for example `cuda`.
    """

    type: str

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Whether the device can be used in this process. False where the driver is missing; never raises."""

    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What the device can do. Only asked when it is available."""

    def unavailable_reason(self) -> str:
        """One sentence on why it can't be used and what to do; empty if it can."""
        return "" if self.is_available() else f"torch sees no {self.type} device; install its driver and torch package"

    @property
    def lowerings(self) -> tuple[str, ...]:
        """Names of the lowerings that can serve it: overrides, its own compiler, Inductor where registered, eager."""
        own = ("device",) if type(self).compile_subgraph is not Device.compile_subgraph else ()
        inductor = ("inductor",) if has_inductor(self.type) else ()
        return ("override", *own, *inductor, "eager")

    def compile_subgraph(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Compile a subgraph; a device with a compiler of its own writes this, and serves the lowering `device`.

        Args:
            module: a graph of ATen operators after autograd, which returns a tuple; the device may change it.
            inputs: a fake tensor or a symbolic size for each placeholder.

        Returns:
            A function of the list of inputs (which it may clear) that returns the outputs.

        Raises:
            Exception: anything, where it can't be compiled: the subgraph goes to the next lowering, and the timeline
                tells why. A NotImplementedError where nothing compiles for the device at all.
        """
        if has_inductor(self.type):
            return compile_part(module, inputs, "", [])
        raise NotImplementedError(
            f"nothing compiles for {self.type}: register it with Inductor (omnicomp.devices.inductor.register), "
            "or write Device.compile_subgraph"
        )

    def compiler_version(self) -> str:
        """Version of what `compile_subgraph` compiles with, for the keys of the compile caches.

        The sources of the device's class and of its package are in the keys anyway; a compiler in another package is
        to be named here.
        """
        return ""

    def prepare(self, model: torch.nn.Module, config: Mapping[str, Any] = _NO_CONFIG) -> torch.nn.Module:
        """Change a model for the device before it is compiled, for example its layout of weights or its attention.

        Called by `omnicomp.wrap_module`; `torch.compile` hands a backend graphs, not models. It may declare overrides.

        Args:
            model: what will be compiled.
            config: `config` of `wrap_module`, whose keys the device defines; empty by default.

        Returns:
            The same model unless a device has something to change.
        """
        return model

    def expectations(self) -> Expectations:
        """Its own tolerances for `omnicomp conformance`, and checks that are left out, each with the reason."""
        return Expectations()

    def register_override(self, **declaration: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Deprecated: `omnicomp.override(devices=...)`.

        Raises:
            OverrideError: as `omnicomp.override` does.
        """
        text = f"Device.register_override goes in 0.3; use omnicomp.override(devices=({self.type!r},))"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return omnicomp.override(devices=(self.type,), **declaration)

    def synchronize(self) -> None:
        """Wait until everything queued on it is done."""
        synchronize = getattr(self._module(), "synchronize", None)
        if synchronize is not None:
            synchronize()

    def memory_stats(self) -> dict[str, int | None]:
        """Memory of the current device in bytes, under the same keys for every device (`MEMORY_KEYS`).

        Returns:
            `allocated_bytes` by tensors now; `peak_bytes`, the most since `reset_memory_stats`; `reserved_bytes` that
            the allocator holds; `total_bytes` of the device. None for what the device does not tell.
        """
        module = self._module()

        def ask(name: str) -> int | None:
            method = getattr(module, name, None)
            return None if method is None else int(method())

        values = (
            ask("memory_allocated"),
            ask("max_memory_allocated"),
            ask("memory_reserved"),
            self._free_and_total()[1],
        )
        return dict(zip(MEMORY_KEYS, values, strict=True))

    def reset_memory_stats(self) -> None:
        """Reset `peak_bytes` to the memory that is allocated now, where the device can."""
        reset = getattr(self._module(), "reset_peak_memory_stats", None)
        if reset is not None:
            reset()

    def available_memory(self) -> int | None:
        """Bytes that are free on the current device; None if it does not tell."""
        return self._free_and_total()[0]

    def to_device(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """Move tensors and modules, in lists, tuples and dictionaries too, to the device.

        Args:
            value: what to move; whatever else is in it stays as it is.
            dtype: what floating-point tensors and parameters become; None keeps theirs.

        Returns:
            The same structure; a module is moved in place and returned. Parameters and buffers that it has in several
            places stay one, which torch's own `Module.to` does not keep on a device from outside.
        """

        def move(item: Any) -> Any:
            if isinstance(item, torch.nn.Module):
                return move_module(item, self.type, dtype)
            if isinstance(item, torch.Tensor):
                return item.to(device=self.type, dtype=dtype if item.is_floating_point() else None)
            return item

        return tree_map(move, value)

    def _module(self) -> Any:
        return getattr(torch, self.type, None)

    def _free_and_total(self) -> tuple[int | None, int | None]:
        ask = getattr(self._module(), "mem_get_info", None)
        return (None, None) if ask is None else ask()


def prepared(device: Device, model: torch.nn.Module, config: Mapping[str, Any]) -> torch.nn.Module:
    """The model as `Device.prepare` returns it, also that of a device which takes no config yet.

    Raises:
        DeviceError: such a device was given one.
    """
    parameters = inspect.signature(device.prepare).parameters.values()
    if "config" in {each.name for each in parameters} or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return device.prepare(model, config=config)
    if config:
        raise DeviceError(
            f"prepare() of the device {device.type!r} takes no config: write prepare(self, model, config)"
        )
    text = f"{type(device).__qualname__}.prepare without config goes in 0.3; write prepare(self, model, config)"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return device.prepare(model)  # pyright: ignore[reportCallIssue] - written to the earlier contract


def move_module(
    model: torch.nn.Module, device: str | torch.device, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """`Module.to`, with tensors that were shared inside the model shared again.

    Torch makes new parameters where the device's tensors are of another kind than the host's, a copy for each place.

    Args:
        model: moved in place.
        device: where to.
        dtype: what floating-point parameters and buffers become; None keeps theirs.

    Returns:
        The same model.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    moved = model.to(device=device, dtype=dtype)
    for (first, name), *others in places.values():
        for held, other in others:
            held[other] = first[name]
    return moved


class GenericDevice(Device):
    """Inductor if a code generator is registered for the device type, else eager."""

    def __init__(self, type: str) -> None:
        """Stand for a device type."""
        self.type = type

    def is_available(self) -> bool:
        """A tensor of that type exists, or it would not have been asked for."""
        return True

    def capabilities(self) -> Capabilities:
        """Only float32 is certain."""
        return Capabilities(
            compute_dtypes=(torch.float32,),
            storage_dtypes=(torch.float32,),
            inductor=has_inductor(self.type),
            device_count=1,
            name=self.type,
        )
