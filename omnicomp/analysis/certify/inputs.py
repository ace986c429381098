"""Random inputs for a graph, as residues and as numbers; masks of a class that the claim assumes."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp._torch.fx import fake_value
from omnicomp.analysis.certify import certificate as c
from omnicomp.analysis.certify import sizes, values
from omnicomp.analysis.certify.values import Unsupported


def classes(assumptions: Sequence[c.Assumption]) -> dict[str, str]:
    """The classes of masks that are assumed, by the names of placeholders."""
    return {each.subject: each.detail for each in assumptions if each.kind == c.MASK_CLASS}


def bounds(masks: Mapping[str, str]) -> set[int]:
    """The numbers in classes of masks."""
    return {int(word) for detail in masks.values() for word in detail.split()[1:] if word not in ("-", c.ONES)}


def resized(masks: Mapping[str, str], made: Mapping[int, int]) -> dict[str, str]:
    """Classes of masks with other numbers."""
    images = {str(number): str(image) for number, image in made.items()}
    return {name: " ".join(images.get(word, word) for word in detail.split()) for name, detail in masks.items()}


def shapes(module: GraphModule, numbers: Mapping[Any, int], made: Mapping[int, int]) -> list[Any]:
    """For each placeholder its name, shape, strides and dtype, or its number."""
    found: list[Any] = []
    for node in sizes.placeholders(module):
        value = fake_value(node)
        if value is None:
            raise Unsupported(f"the placeholder {node.name} has no fake value")
        if isinstance(value, torch.Tensor):
            found.append((node.name, *sizes.layout(value, numbers, made), value.dtype))
        else:
            number = sizes.number(value, numbers)
            found.append(made.get(number, number) if type(number) is int else number)
    return found


def draw(wanted: Sequence[Any], masks: Mapping[str, str], seed: int, *, numbers: bool, scale: float = 1.0) -> list[Any]:
    """Inputs of the shapes that are wanted.

    Args:
        wanted: what `shapes` gave.
        masks: classes by names.
        seed: the same one gives the same integers and truth values, as residues and as numbers.
        numbers: whether floating-point inputs are normally distributed numbers in place of residues.
        scale: of these.
    """
    found: list[Any] = []
    for index, each in enumerate(wanted):
        if not isinstance(each, tuple):
            found.append(each)
            continue
        name, shape, stride, dtype = each
        generator = torch.Generator().manual_seed(seed * 1000 + index)
        if name in masks and not dtype.is_complex:
            found.append(mask(masks[name], shape, dtype, seed, numbers=numbers))
        elif dtype == torch.bool:
            found.append(_truth(shape, generator))
        elif dtype.is_floating_point and numbers:
            flat = torch.randn(math.prod(shape), generator=generator, dtype=torch.float64) * scale
            found.append(torch.empty_strided(shape, stride, dtype=dtype).copy_(flat.view(shape)))
        elif dtype.is_floating_point:
            found.append(values.draw(shape, stride, dtype, seed * 1000 + index))
        elif dtype.is_complex and numbers:
            found.append(torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype))
        elif dtype.is_complex:
            raise Unsupported("complex numbers")
        else:
            found.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return found


def _truth(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Truth values of which each row has one that holds, and one that does not: they may say what is hidden."""
    found = torch.rand(shape, generator=generator) < 0.7
    if found.ndim:
        found[..., 0] |= ~found.any(-1)
    if found.ndim and shape[-1] > 1:
        found[..., -1] &= ~found.all(-1)
    return found


def mask(detail: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, *, numbers: bool = True) -> Any:
    """A mask of a class: what is seen as a truth value, as a one, or as zero among minus infinities."""
    queries, keys = (*(1, 1), *shape)[-2:]
    kind, *bounds = detail.removesuffix(f" {c.ONES}").split()
    if kind in ("first", "rows"):
        seen = _truth((queries, keys), torch.Generator().manual_seed(seed))
        seen[:, 0] |= kind == "first"
    elif kind == "padding":
        seen = torch.arange(keys) < random.Random(seed).randint(1, keys)
        seen = seen.expand(queries, keys)
    elif kind == "causal":
        seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    elif kind == "causal_bottom_right":
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    elif kind in ("band", "prefix"):
        at = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        first, second = (None if each == "-" else int(each) for each in bounds)
        left, right, length = (first, second, None) if kind == "band" else (None, first, second)
        seen = torch.ones(queries, keys, dtype=torch.bool) if right is None else at[1] <= at[0] + right
        seen = seen if left is None else seen & (at[1] >= at[0] - left)
        seen = seen if length is None else seen | (at[1] < length)
    else:
        seen = torch.full((queries, keys), kind == "full")
    seen = seen[0] if len(shape) == 1 else seen
    seen = seen.expand(shape).clone()
    if not dtype.is_floating_point:
        return seen.to(dtype)
    ones = detail.endswith(f" {c.ONES}")
    fill = seen.to(dtype) if ones else torch.zeros(shape, dtype=dtype).masked_fill(~seen, -math.inf)
    return fill if numbers else values.lifted(fill)


def taken(module: GraphModule, given: Sequence[Any]) -> list[Any]:
    """Copies of inputs, in the dtypes in which a graph takes them."""
    nodes = sizes.placeholders(module)
    return [_cast(copied(value), fake_value(node)) for node, value in zip(nodes, given, strict=True)]


def _cast(value: Any, like: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    # In a higher precision all numbers are of one dtype.
    wide = value.dtype == torch.float64 and like.is_floating_point()
    return value if value.dtype == like.dtype or wide else value.to(like.dtype)


def copied(value: Any) -> Any:
    """A copy that may be written to."""
    if isinstance(value, values.Residue):
        return values.copied(value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
