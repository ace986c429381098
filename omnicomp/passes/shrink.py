"""The same program at small sizes: two graphs whose static sizes are too large to be compared element by element.

Each size is replaced by a small one, in shapes and where it is written in the program. A size that is a product of
others becomes the product of theirs, and half of one becomes half of its image, so that heads and features still fit
together. Whether they do is seen by running both graphs on fake tensors.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.fx import copy_module, fake_mode
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.changes import Change

# At most as many elements in all values of both graphs are compared as they are.
_FEW: Final = 2**15
_LEAST: Final = 4
_IMAGES: Final = (2, 3, 5, 4, 7, 6, 9, 8, 10, 11)
_TRIES: Final = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A change at small sizes.

    Attributes:
        before: the graph as it was.
        after: the graph as it is.
        sizes: which size became which; empty if all stayed.
    """

    before: GraphModule
    after: GraphModule
    sizes: Mapping[int, int]


def shrunk(change: Change) -> Shrunk | None:
    """The change at sizes at which it can be compared; None if there are none."""
    sides = (change.before, change.after)
    if sum(map(_elements, sides)) <= _FEW:
        return Shrunk(before=change.before, after=change.after, sizes={})
    if any(_is_symbolic(node) for side in sides for node in side.graph.nodes):
        return None
    sizes = sorted({size for side in sides for size in _sizes(side)})
    for images in _assignments(sizes):
        made = [_at(side, images) for side in sides]
        shapes = [_outputs(side) for side in made]
        if shapes[0] is None or shapes[0] != shapes[1] or sum(map(_elements, made)) > _FEW:
            continue
        return Shrunk(before=made[0], after=made[1], sizes={a: b for a, b in images.items() if a != b})
    return None


def _is_symbolic(node: Node) -> bool:
    leaves = tree_leaves(fake_value(node))
    sizes = (size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)))
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _elements(module: GraphModule) -> int:
    total = 0
    for node in module.graph.nodes:
        for leaf in tree_leaves(fake_value(node)):
            if isinstance(leaf, torch.Tensor):
                total += math.prod(size if type(size) is int else 4 for size in leaf.shape)
    return total


def _sizes(module: GraphModule) -> Iterator[int]:
    """The static sizes in the shapes of a graph's values."""
    for node in module.graph.nodes:
        for leaf in tree_leaves(fake_value(node)):
            if isinstance(leaf, torch.Tensor):
                yield from (size for size in leaf.shape if type(size) is int and size >= _LEAST)


def _assignments(sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    """Small numbers for sizes, which are in ascending order; the likeliest first."""
    return itertools.islice(_extended({}, sizes), _TRIES)


def _extended(images: dict[int, int], sizes: Sequence[int]) -> Iterator[dict[int, int]]:
    if not sizes:
        yield images
        return
    size, *rest = sizes
    for image in dict.fromkeys((*_derived(size, images), min(size, _IMAGES[len(images) % len(_IMAGES)]))):
        yield from _extended({**images, size: image}, rest)


def _derived(size: int, images: Mapping[int, int]) -> Iterator[int]:
    """The images of a size that those of others say."""
    parts = [(other, *divmod(size, other)) for other in sorted(images, reverse=True)]
    yield from (images[other] * images[rest] for other, rest, left in parts if left == 0 and rest in images)
    yield from (images[other] * rest for other, rest, left in parts if left == 0 and rest < 2 * _LEAST)
    yield from (images[other] + size - other for other in images if abs(size - other) <= 1)


def _at(module: GraphModule, images: Mapping[int, int]) -> GraphModule:
    """A copy of a graph with other sizes, whose values are fake anew; without values where it does not run."""

    def image(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(image(value.start), image(value.stop), value.step)
        if type(value) is int and abs(value) in images:
            return images[abs(value)] * (1 if value > 0 else -1)
        return value

    made = copy_module(module)
    for node in made.graph.nodes:
        if node.op.startswith("call_"):
            node.args, node.kwargs = tree_map(image, node.args), tree_map(image, node.kwargs)
        elif node.op == "get_attr":
            held = getattr(made, str(node.target), None)
            if isinstance(held, torch.Tensor):
                setattr(made, str(node.target), _narrowed(held, images))
    made.recompile()
    with fake_mode():
        inputs = [_like(fake_value(node), image) for node in made.graph.find_nodes(op="placeholder")]
        try:
            _Describing(made).run(*inputs)
        except Exception:  # noqa: BLE001 - other sizes are tried
            for node in made.graph.nodes:
                node.meta.pop("example_value", None)
    return made


class _Describing(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta.pop("val", None)
        n.meta["example_value"] = value
        return value


def _narrowed(held: torch.Tensor, images: Mapping[int, int]) -> torch.Tensor:
    """The first elements of a constant, such as a causal mask."""
    for dim, size in enumerate(held.shape):
        held = held.narrow(dim, 0, min(size, images.get(size, size)))
    return held.detach().clone()


def _like(value: Any, image: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [image(size) for size in value.shape]
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
    made = torch.empty([shape[dim] for dim in order], dtype=value.dtype, device=value.device)
    made = made.permute([order.index(dim) for dim in range(value.dim())])
    expanded = [dim for dim in range(value.dim()) if value.stride(dim) == 0 and value.shape[dim] != 1]
    for dim in expanded:
        made = made.narrow(dim, 0, 1)
    return made.expand(shape) if expanded else made


def _outputs(module: GraphModule) -> list[Any] | None:
    output = next(iter(reversed(module.graph.nodes)))
    if "example_value" not in output.meta:
        return None
    leaves = tree_leaves(output.meta["example_value"])
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
