"""What `scaled_dot_product_attention` really runs, and sizes and hints of fake tensors without guards."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

# Scores beyond this are not tried unfused: moving them to memory and back takes longer than a fused kernel.
SCORES_BYTES: Final = 1 << 30
SDPA: Final[Any] = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
"""`scaled_dot_product_attention` itself: context parallel puts another function in its place in torch.nn.functional."""

_BACKENDS: Final = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KERNELS: Final = tuple(_BACKENDS)
"""The fused kernels of CUDA, as they stand in the names of their operators."""


class _Recorder(TorchDispatchMode):
    """Notes the names of the fused attention operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name() if hasattr(func, "name") else str(func)
        if "_scaled_dot_product_" in name and "_attention_math" not in name:
            self.kernels.append(name.split("::")[-1])
        return func(*args, **(kwargs or {}))


def fused_kernel(call: Callable[[], torch.Tensor]) -> str:
    """The fused attention operator that `call` dispatches to, or an empty string if torch decomposes it (math path).

    torch chooses between the kernels inside the call, by shapes, strides, dtypes and requires_grad, which fake
    tensors have too; therefore the choice is observed and not predicted.

    Args:
        call: runs the attention on fake tensors, in the grad mode that the real call will have.
    """
    with FakeTensorMode(), _Recorder() as recorder:
        call()
    return recorder.kernels[0] if recorder.kernels else ""


@contextlib.contextmanager
def kernel_first(name: str, *, alone: bool = False) -> Generator[None]:
    """Prefer a kernel in `scaled_dot_product_attention`, and the others in torch's usual order after it.

    A kernel that the user has switched off stays so.

    Args:
        name: one of `KERNELS`.
        alone: torch shall raise where this one does not take the attention.

    Raises:
        RuntimeError: it is wanted alone, and switched off.
    """
    if alone and not enabled_kernel(name):
        raise RuntimeError(f"the kernel {name} is switched off in torch.backends.cuda")
    first = [_BACKENDS[name]] if enabled_kernel(name) else []
    order = [*first, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    names = [kernel for backend in order for kernel, known in _BACKENDS.items() if known is backend]
    rest = [_BACKENDS[kernel] for kernel in dict.fromkeys(names) if enabled_kernel(kernel)]
    with sdpa_kernel(first if alone else [*rest, SDPBackend.MATH], set_priority=True):
        yield


def enabled_kernel(name: str) -> bool:
    """Whether the user lets torch take a kernel, one of `KERNELS`."""
    backends = torch.backends.cuda
    enabled = {
        "cudnn": backends.cudnn_sdp_enabled,
        "flash": backends.flash_sdp_enabled,
        "efficient": backends.mem_efficient_sdp_enabled,
    }
    return enabled[name]()


def flash_implementation() -> str:
    """The flash attention that a program activated in torch's place, such as `FA3` or `FA4`; empty for torch's own."""
    named = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (named and named()) or ""


def concrete(value: Any) -> Any:
    """A stand-in with the sizes seen at compile time, so that looking at it adds no guard; inside `fused_kernel`.

    Raises:
        ValueError: a size is not known (it depends on data).
    """
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return hint_of(value)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = [hint_of(n) for n in value.shape], [hint_of(n) for n in value.stride()]
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def is_static(size: Any) -> bool:
    """Whether a size is a number and no symbol."""
    return isinstance(size, int)


def known_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are equal for every input that the graph is valid for; adds no guard."""
    return left is right or bool(statically_known_true(left == right))


def known_at_least(size: Any, least: int) -> bool:
    """Whether a size is not smaller for every input that the graph is valid for; adds no guard."""
    return bool(statically_known_true(size >= least))


def known_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two fake tensors have the same shape for every input that the graph is valid for; adds no guard."""
    return left.dim() == right.dim() and all(map(known_equal, left.shape, right.shape))


@contextlib.contextmanager
def without_guards(value: torch.Tensor) -> Generator[None]:
    """Evaluate on fake tensors of the mode of `value` without adding guards on their symbolic sizes."""
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        yield
        return
    with quiet(mode):
        yield


@contextlib.contextmanager
def quiet(mode: Any) -> Generator[None]:
    """Evaluate in a fake mode without adding guards, and without leaving a trace in its cache.

    What is computed while guards are suppressed may have numbers in the place of symbols. Cached, it would be given to
    whoever runs the same operator later, and would specialize the graph there.
    """
    environment = mode.shape_env
    if environment is None:
        yield
        return
    # The older name warns where there is a newer one.
    known: Any = getattr(
        environment, "backed_var_to_val" if hasattr(environment, "backed_var_to_val") else "var_to_val"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment.suppress_guards())
        if known:
            stack.enter_context(mock.patch.object(mode, "cache_enabled", False))
            # As AOTAutograd traces: some operators' decompositions in C++ know no symbols (matmul up to torch 2.11).
            stack.enter_context(enable_python_dispatcher())
        yield


def hint_of(value: Any) -> Any:
    """A size as it was seen at compile time; adds no guard.

    Raises:
        ValueError: it was not seen (it depends on data).
    """
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    hint = value.node.hint
    if hint is None:
        raise ValueError(f"the size {value} is not known when the graph is compiled")
    return hint
