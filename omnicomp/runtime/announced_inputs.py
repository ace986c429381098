"""The inputs of an executable as they were announced when it was built, against those of its first call.

Generated code reads memory as it was announced: of a float64 that was announced as a float32 it makes garbage, in
silence. What comes first stands for what comes later, as Dynamo guards the inputs and AOTAutograd makes the rest.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

_NUMBERS: Final = {
    bool: "a bool",
    torch.SymBool: "a bool",
    int: "an int",
    torch.SymInt: "an int",
    float: "a float",
    torch.SymFloat: "a float",
}

# Attention with dropout announces its seeds on the device, and leaves them on the host unless a CUDA graph is recorded;
# its backward takes both.
_SEED: Final = ["int64", "cuda", []]
_SEED_ON_THE_HOST: Final = ["int64", "cpu", []]


def announce(inputs: Sequence[Any]) -> list[list[Any]]:
    """What is known of inputs, fake or real; it travels as JSON.

    Returns:
        For each input a word: the dtype of a dense tensor, a kind of number, or empty for anything else. For a tensor
        also device, sizes, and strides, with None for what is symbolic.
    """
    return [_described(value) for value in inputs]


def difference(announced: Sequence[Sequence[Any]], inputs: Sequence[Any], *, strides: bool) -> str:
    """The first input that is not what was announced, as a sentence; empty if there is none.

    Args:
        announced: by `announce`, of the values that the executable was built for.
        inputs: of a call.
        strides: whether it matters where the elements lie.
    """
    if len(announced) != len(inputs):
        return ""  # the call itself says so
    for index, (wanted, value) in enumerate(zip(announced, inputs, strict=True)):
        found = _described(value)
        if not wanted[0] or not found[0] or (list(wanted[:3]), found[:3]) == (_SEED, _SEED_ON_THE_HOST):
            continue
        same = wanted[:2] == found[:2] and all(map(_fits, wanted[2:3], found[2:3]))
        if not same or (strides and not _same_places(wanted, found)):
            return f"input {index} is {_text(found)}, and was announced as {_text(wanted)}"
    return ""


def _described(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [_NUMBERS.get(type(value), "")]
    if value.layout is not torch.strided:
        return [""]
    numbers = ([number if type(number) is int else None for number in each] for each in (value.shape, value.stride()))
    return [str(value.dtype).removeprefix("torch."), value.device.type, *numbers]


def _fits(wanted: Sequence[int | None], found: Sequence[int | None]) -> bool:
    return len(wanted) == len(found) and all(w in (None, f) for w, f in zip(wanted, found, strict=True))


def _same_places(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether elements lie where they were announced to; where there is one, or none, its stride is of no matter."""
    if len(found) < 4 or 0 in found[2]:
        return True
    return _fits(
        [None if size == 1 else stride for size, stride in zip(found[2], wanted[3], strict=True)],
        found[3],
    )


def _text(described: Sequence[Any]) -> str:
    if len(described) == 1:
        return str(described[0])
    dtype, device, *numbers = described
    sizes, strides = (", ".join("?" if number is None else str(number) for number in each) for each in numbers)
    return f"a {dtype} tensor of ({sizes}) with strides ({strides}) on {device}"
