"""What inputs a package takes: AOTInductor's code checks none, and reads other memory where sizes or strides differ.

Each leaf of the example inputs is described as JSON. Sizes that vary are named by their symbol, which has one value in
a call; a value that is no tensor was compiled in.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Checked = Sequence[Mapping[str, Any]]


def describe_inputs(examples: Sequence[Any], ranges: Mapping[str, tuple[int, int | None]]) -> str:
    """Describe the inputs of a graph.

    Args:
        examples: fake values of its placeholders.
        ranges: the least and the largest value of symbols.
    """
    return json.dumps([_described(example, ranges) for example in examples])


def check_inputs(wanted: Checked, given: Sequence[Any]) -> None:
    """See that the leaves of a call's inputs are as described.

    Raises:
        ValueError: one of them is not.
    """
    sizes: dict[str, int] = {}
    for index, (want, value) in enumerate(zip(wanted, given, strict=True)):
        wrong = _wrong(want, value, sizes)
        if wrong:
            raise ValueError(f"input {index} of the package {wrong}")


def _size(size: int | torch.SymInt) -> int | str:
    text = str(size)  # the value of a symbolic size would be a guard
    return int(text) if text.lstrip("-").isdigit() else text


def _described(example: Any, ranges: Mapping[str, tuple[int, int | None]]) -> dict[str, Any]:
    if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {}
    if not isinstance(example, torch.Tensor):
        return {"value": repr(example)}
    sizes = list(map(_size, example.shape))
    plain = example.layout == torch.strided
    return {
        "dtype": str(example.dtype),
        "device": example.device.type,
        "sizes": sizes,
        "ranges": {size: ranges[size] for size in sizes if isinstance(size, str) and size in ranges},
        "strides": None if not plain or example.is_contiguous() else list(map(_size, example.stride())),
    }


def _wrong(want: Mapping[str, Any], value: Any, sizes: dict[str, int]) -> str:
    """What is wrong with a leaf, as the end of a sentence, or nothing."""
    if not want:
        return ""
    if "value" in want:
        same = not isinstance(value, torch.Tensor) and repr(value) == want["value"]
        return "" if same else f"is not {want['value']}, which was compiled in; make a package for other values"
    if not isinstance(value, torch.Tensor):
        return f"has to be a tensor, and is a {type(value).__name__}"
    if (str(value.dtype), value.device.type) != (want["dtype"], want["device"]):
        return f"is {value.dtype} on {value.device.type}, and has to be {want['dtype']} on {want['device']}"
    if len(value.shape) != len(want["sizes"]):
        return f"has {value.dim()} dimensions, and has to have {len(want['sizes'])}"
    for dimension, (size, here) in enumerate(zip(want["sizes"], value.shape, strict=True)):
        least, most = want["ranges"].get(size, (0, None))
        needed = here if isinstance(size, str) and not size.isidentifier() else size
        if isinstance(needed, str):
            needed = sizes.setdefault(needed, here)
        if here != needed:
            lever = "as another of that name" if isinstance(size, str) else "unless dynamic_shapes names it"
            return f"has size {here} in dimension {dimension}, and has to have {needed}, {lever}"
        if here < least or (most is not None and here > most):
            return (
                f"has size {here} in dimension {dimension}, which dynamic_shapes limits to {least} to {most or 'any'}"
            )
    if want["strides"] is None:
        plain = value.layout == torch.strided and not value.is_contiguous()
        return "is not contiguous, as its example was; give the package x.contiguous()" if plain else ""
    pairs = zip(want["strides"], value.stride(), value.shape, strict=True)
    if any(isinstance(stride, int) and stride != here and size > 1 for stride, here, size in pairs):
        return f"has strides {value.stride()}, and has to have those of its example, {want['strides']}"
    return ""
