"""Seeing what happens to a parameter: who shares its memory, and when it may have been written without being counted.

A parameter's `_version` counts in-place operations, except these, which are reported while parameters are observed:

- writes through `.data`, which is a tensor of the same memory with a version counter of its own:
  `torch.nn.Parameter` gets a property of that name, which reports and then asks torch's own;
- fused optimizers (torch 2.11 to 2.13): a hook that torch offers runs after each step of an optimizer;
- `torch._foreach_lerp_` with a number and `torch._foreach_zero_` on CUDA, whose kernels alone of all in-place
  `_foreach` functions don't call `increment_version`, as far as torch's sources show
  (`aten/src/ATen/native/cuda/Foreach{TernaryOp,UnaryOp}.cu`): they are wrapped.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omnicomp._torch.dynamo.registrations import settle_dynamo
from omnicomp._torch.inductor.own_context import is_symbolic

__all__ = [
    "StorageWeakRef",
    "describes_parameter",
    "is_observed",
    "is_private",
    "make_static",
    "observe",
    "owners",
    "owns_alone",
    "picker",
    "static_dynamo_input",
    "stop_observing",
    "stream_of",
    "weak_storage",
]

_DATA: Final[Any] = torch._C.TensorBase.data
_hooks: Final[list[Any]] = []
_UNCOUNTED: Final = ("_foreach_lerp_", "_foreach_zero_")
_originals: Final[dict[str, Any]] = {}

owners: Final[Callable[[int], int]] = torch._C._storage_Use_Count
"""How many tensors and other objects hold a storage, given `StorageWeakRef.cdata`; 0 if it is freed."""


def is_private(tensor: Tensor) -> bool:
    """Whether torch allocated the memory for this process alone: no array's, no mapped file, no other process'."""
    storage = tensor.untyped_storage()
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A reference to the memory of a tensor that does not keep it, and whose `cdata` is not given away meanwhile."""
    return StorageWeakRef(tensor.untyped_storage())


def _of_one_tensor() -> int:
    """What `owners` says of the storage of one tensor alone: where Python has seen the storage, that may count, too."""
    tensor = torch.empty(1)
    return owners(weak_storage(tensor).cdata)


owns_alone: Final[int] = _of_one_tensor()
"""What `owners` says of a storage that one tensor holds, whose Python storage was asked for once."""


def observe(seen: Callable[[Tensor], None], written: Callable[[Sequence[Tensor]], None]) -> None:
    """Call back when Python takes or sets the `.data` of a parameter, or something writes that may not be counted.

    Not seen are `torch.Tensor.data.__get__(p)` and what C++ does; nor a subclass with a `data` of its own.

    Args:
        seen: gets a parameter whose `.data` is taken or set, or that an optimizer made a step with.
        written: gets the tensors that a function on lists of tensors has written.
    """

    def get_data(self: Tensor) -> Tensor:
        seen(self)
        return _DATA.__get__(self)

    def set_data(self: Tensor, value: Tensor) -> None:
        seen(self)
        _DATA.__set__(self, value)
        seen(self)  # a thread that looked in between saw the old memory

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen(parameter)

    # A step that is compiled doesn't count either, and Dynamo breaks its graph before this in any case.
    hook: Any = torch._dynamo.disable(stepped, reason="omnicomp looks which weights an optimizer changed")
    _hooks.append(register_optimizer_step_post_hook(hook))
    Parameter.data = property(get_data, set_data, None, _DATA.__doc__)  # type: ignore[assignment,misc]
    settle_dynamo()  # its tables know these functions by identity
    for name in _UNCOUNTED:
        _originals[name] = getattr(torch, name)
        setattr(torch, name, _reporting(_originals[name], written))


def _reporting(function: Any, written: Callable[[Sequence[Tensor]], None]) -> Any:
    """An in-place function on lists of tensors that reports afterwards what it has written."""

    @functools.wraps(function)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(tensors, *args, **kwargs)
        if not torch.compiler.is_compiling():  # a compiled step counts, or is reported as a step of an optimizer
            written(tensors)
        return result

    return call


def is_observed() -> bool:
    """Whether `observe` is in force."""
    return "data" in vars(Parameter)


def stop_observing() -> None:
    """Give `torch.nn.Parameter` the `.data` of torch back, and look at no optimizer any more."""
    if is_observed():
        del Parameter.data
    while _originals:
        setattr(torch, *_originals.popitem())
    while _hooks:
        _hooks.pop().remove()


def describes_parameter(fake: Any) -> bool:
    """Whether a fake tensor stands for a plain parameter of fixed size: strided, on a device, no wrapper of others."""
    return (
        isinstance(fake, Parameter)
        and not is_traceable_wrapper_subclass(fake)
        and fake.layout is torch.strided
        and fake.device.type != "meta"
        and not is_symbolic([fake])
    )


def static_dynamo_input(node: torch.fx.Node) -> bool:
    """Whether Dynamo says of a placeholder that its memory stays where it is from call to call."""
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def make_static(node: torch.fx.Node) -> None:
    """Tell AOTAutograd of a placeholder that Dynamo did not make: it has no source, and its memory stays where it is.

    CUDA graphs then read it in place; if it does move, they are recorded again.
    """
    node._dynamo_source = None  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these items out of a tuple, as fast as Python can."""
    if len(positions) == 0:
        return lambda values: ()
    if len(positions) == 1:
        only = positions[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*positions)


def stream_of(device: torch.device) -> int | None:
    """The id of the stream that calls on a tensor's CUDA device go to; None for other devices."""
    if device.type != "cuda":
        return None
    return torch._C._cuda_getCurrentRawStream(device.index)
