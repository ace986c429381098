"""PyTorch's operator database, which its own test suite is written against: operators with sample inputs and marks.

It is part of torch's wheels, and importing it needs `expecttest` and `numpy` (the extra `test`).
"""

import fnmatch
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from omnicomp.errors import OmnicompError


def _call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


@functools.cache
def _database() -> dict[str, Any]:
    """The entries by name; the name of a variant is `name.variant`."""
    try:
        # Importing it forbids to set `torch.backends.cudnn.allow_tf32` and its like in this process for good, as suits
        # PyTorch's own tests alone; this context puts back at its end whether that is allowed.
        with torch.backends.__allow_nonbracketed_mutation():
            module: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")
    except ImportError as error:
        raise OmnicompError(
            f"the operator database needs the extra `test`: pip install omnicomp[test] ({error})"
        ) from None
    # Random operators are wrapped in a function that keeps and restores the generator's state, on which Dynamo breaks
    # the graph: the operator itself would never reach a backend. Callers seed the generator before each run instead.
    module.wrapper_set_seed = _call
    return {
        f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name: entry
        for entry in module.op_db
    }


def names(pattern: str = "*") -> list[str]:
    """Names of the entries that match a shell pattern or several joined by commas, in the database's order.

    Raises:
        OmnicompError: a package is missing that the database imports.
    """
    patterns = pattern.split(",")
    return [name for name in _database() if any(fnmatch.fnmatchcase(name, one.strip()) for one in patterns)]


def find(name: str) -> Any:
    """The `OpInfo` of a name.

    Raises:
        OmnicompError: there is none.
    """
    entry = _database().get(name)
    if entry is None:
        raise OmnicompError(f"torch {torch.__version__} has no operator {name!r} in its database")
    return entry


def supports(entry: Any, dtype: torch.dtype, device: str) -> bool:
    """Whether the operator takes the dtype on a device type."""
    return dtype in entry.supported_dtypes(device)


def differentiable(entry: Any, dtype: torch.dtype, device: str) -> bool:
    """Whether the operator has a backward for the dtype on a device type."""
    return bool(entry.supports_autograd) and dtype in entry.supported_backward_dtypes(device)


def has_defined_values(entry: Any) -> bool:
    """Whether two runs from one seed give the same: False for what returns memory as it found it."""
    # torch 2.11 does not mark all of these.
    marked = getattr(entry, "has_nondeterministic_output", False) or entry.name.removeprefix("new_").startswith("empty")
    return not (marked or getattr(entry, "skip_correctness_check_compile_vs_eager", False))


def in_place_variant(entry: Any) -> Any:
    """The method that writes to its input, such as `Tensor.add_`, or None."""
    return entry.inplace_variant if callable(entry.inplace_variant) else None


def samples(
    entry: Any, dtype: torch.dtype, device: str, *, first: int, count: int, requires_grad: bool
) -> Iterator[Any]:
    """Sample inputs from number `first` on, at most `count`; the same in every process.

    Returns:
        `SampleInput`s: `input`, `args`, `kwargs`, `output_process_fn_grad` and `broadcasts_input`.
    """
    torch.manual_seed(0)
    yield from itertools.islice(entry.sample_inputs(device, dtype, requires_grad=requires_grad), first, first + count)
