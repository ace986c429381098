"""What the dtype policy needs of torch's internals: the storage behind a fake tensor, and the writes to it."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


def storage_key(value: torch.Tensor) -> int | None:
    """The identity of the storage, shared by all views of a tensor; None for a tensor without one (sparse, vmap's)."""
    if value.layout is not torch.strided or is_functorch_wrapped_tensor(value):
        return None
    return value.untyped_storage()._cdata


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """Inside, operators run on real CPU tensors as written, whatever modes a user or a compilation is in."""
    with (
        unset_fake_temporarily(),
        _disable_current_modes(),
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def was_written(value: torch.Tensor) -> bool:
    """Whether a fake tensor, or a view of it, was changed in place while Dynamo traced; True where nobody counted."""
    return value.is_inference() or value._version > int(_placed_by_set(value))


def _placed_by_set(value: torch.Tensor) -> bool:
    """Whether a fake tensor, or what it is a view of, was made by `set_`, which counts as a write.

    `MetaConverter` of torch 2.11 to 2.13 does so for a tensor that is no view and does not start where its storage
    does, such as `nn.Parameter(base[1:])`.
    """
    root = value._base if value._base is not None else value
    if value._version == 0 or not isinstance(root, FakeTensor):
        return False
    offset = root.storage_offset()
    if isinstance(offset, int) and offset == 0:
        return False
    return any(known is root for known in root.fake_mode.fake_tensor_converter.tensor_memo.values())


def writes_or_aliases(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator changes a tensor that it is given, or returns one or a view of it.

    Args:
        target: the operator.
        args: positional arguments with fake tensors, of which copies are used.
        kwargs: keyword arguments, likewise.

    Returns:
        True also where it can't be told: an argument is a tensor, but no fake one.
    """
    leaves = tree_leaves((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    if mode is None or any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves):
        return True
    with mode, torch.inference_mode(False), torch.no_grad():
        own_args, own_kwargs = tree_map(
            lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, (list(args), dict(kwargs))
        )
        given = [leaf for leaf in tree_leaves((own_args, own_kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [value._version for value in given]
        results = [v for v in tree_leaves(target(*own_args, **own_kwargs)) if isinstance(v, torch.Tensor)]
    keys = {storage_key(value) for value in given}
    written = any(value._version != before for value, before in zip(given, versions, strict=True))
    return written or any(storage_key(value) in keys for value in results)


ENTER: Final = _enter_autocast
"""Called with the device type, the dtype or None, whether it is on, and whether it caches casts."""

EXIT: Final = _exit_autocast
"""Called with what `ENTER` returned."""
