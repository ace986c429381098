"""Seeing what happens to a parameter: who shares its memory, and when it may have been written without being counted.

A parameter's `_version` counts in-place operations, except these, for which something is done while parameters are
observed:

- writes through `.data`, which is a tensor of the same memory with a version counter of its own:
  `torch.nn.Parameter` gets a property of that name, which reports and then asks what was there before;
- fused optimizers (torch 2.11 to 2.13): a hook that torch offers runs after each step of an optimizer;
- `torch._foreach_lerp_` with a number and `torch._foreach_zero_` on CUDA, whose kernels alone of all in-place
  `_foreach` functions don't call `increment_version`, as far as torch's sources show
  (`aten/src/ATen/native/cuda/Foreach{TernaryOp,UnaryOp}.cu`): the dispatcher counts for them, where there is an
  accelerator. The functions themselves stay torch's.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from omnicomp._torch.dynamo.registrations import settle_dynamo
from omnicomp._torch.inductor.own_context import is_symbolic

_stops: Final[list[Callable[[], None]]] = []

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


def observe(seen: Callable[[Tensor], None]) -> None:
    """Call back when Python takes or sets the `.data` of a parameter, and count what torch does not.

    Not seen are `torch.Tensor.data.__get__(p)` and what C++ does; nor a subclass with a `data` of its own.

    Args:
        seen: gets a parameter whose `.data` is taken or set, or that an optimizer made a step with.
    """
    settle_dynamo()  # its tables know torch's functions by identity
    _stops.append(_observe_data(seen))

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen(parameter)

    # A step that is compiled doesn't count either, and Dynamo breaks its graph before this in any case.
    hook: Any = torch._dynamo.disable(stepped, reason="omnicomp looks which weights an optimizer changed")
    _stops.append(register_optimizer_step_post_hook(hook).remove)
    if torch.accelerator.is_available():
        _stops.append(count_foreach())


def _observe_data(seen: Callable[[Tensor], None]) -> Callable[[], None]:
    """Put a property in front of the `.data` that parameters have; returns what takes it away again.

    Another library may have put one there before, which is asked then, or may put one over it, which is left alone.
    """
    own = vars(Parameter).get("data")
    before: Any = own if own is not None else inspect.getattr_static(Parameter, "data")
    report = seen

    def get_data(self: Tensor) -> Tensor:
        report(self)
        return before.__get__(self, type(self))

    def set_data(self: Tensor, value: Tensor) -> None:
        report(self)
        before.__set__(self, value)
        report(self)  # a thread that looked in between saw the old memory

    mine = property(get_data, set_data, None, before.__doc__)

    def stop() -> None:
        nonlocal report
        report = id  # does nothing, where another property still asks ours
        if vars(Parameter).get("data") is not mine:
            return
        if own is None:
            del Parameter.data
        else:
            Parameter.data = own

    Parameter.data = mine  # type: ignore[assignment,misc]
    return stop


def count_foreach() -> Callable[[], None]:
    """Let the dispatcher count the writes of the functions on lists that don't; returns what ends that.

    A kernel for the key at which versions are counted, which torch leaves empty for these operators: the functions, and
    what scripts, modes and pickles know of them, stay as they are.
    """
    library = torch.library.Library("aten", "IMPL", "ADInplaceOrView")
    for name in ("_foreach_lerp_.Scalar", "_foreach_zero_"):
        packet, _, overload = name.partition(".")
        operator_ = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, functools.partial(_counted, operator_), with_keyset=True)
    return library._destroy


def _counted(function: Any, keys: Any, tensors: Sequence[Tensor], *args: Any) -> None:
    function.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, tensors, *args)
    torch.autograd.graph.increment_version(tensors)


def is_observed() -> bool:
    """Whether `observe` is in force."""
    return bool(_stops)


def stop_observing() -> None:
    """Give torch back what `observe` put somewhere, and look at no optimizer any more."""
    while _stops:
        _stops.pop()()


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


def add_placeholder(after: torch.fx.Node, name: str, like: torch.fx.Node, value: Any) -> torch.fx.Node:
    """Add an input behind another one, for a view of the input `like`; `value` is its fake value."""
    with after.graph.inserting_after(after):
        node = after.graph.placeholder(name)
    node.meta = {key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta}
    node.meta["example_value"] = value
    if static_dynamo_input(like) or isinstance(like.meta.get("example_value"), Parameter):
        make_static(node)
    else:
        node._dynamo_source = None  # type: ignore[attr-defined]
    return node


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
