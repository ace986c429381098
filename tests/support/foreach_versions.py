"""Which of torch's in-place functions on lists of tensors do not count what they write."""

from typing import Any

import torch
from torch import nn


def uncounted(device: str) -> set[str]:
    """Names of the `torch._foreach_*_` of which an overload leaves a parameter's `_version` as it was."""
    names = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    assert len(names) >= 44
    return {name for name in names if not _counts(getattr(torch.ops.aten, name), device)}


def _counts(packet: Any, device: str) -> bool:
    for name in packet.overloads():
        overload = getattr(packet, name)
        args = [_argument(each, device) for each in overload._schema.arguments if not each.has_default_value()]
        before = [parameter._version for parameter in args[0]]
        with torch.no_grad():
            overload(*args)
        if any(parameter._version <= old for parameter, old in zip(args[0], before, strict=True)):
            return False
    return True


def _argument(argument: Any, device: str) -> Any:
    kind = str(argument.type)
    if argument.name == "self" and kind == "List[Tensor]":
        return [nn.Parameter(torch.rand(3, device=device) + 1) for _ in range(2)]
    many = argument.name in ("scalars", "exponent")
    values = {
        "List[Tensor]": [torch.rand(3, device=device) + 1 for _ in range(2)],
        "List[number]": [0.5, 0.5],
        "number": 0.5,
        "Tensor": torch.tensor([1.0, 2.0]) if many else torch.tensor(2.0, device=device),
    }
    return values[kind]
