"""Inputs of engines: graphs without Inductor's decompositions, and the values of the model's weights."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from omnicomp._torch.dynamo.late_compile import is_fake, is_subclass
from omnicomp._torch.parameters import static_dynamo_input
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings import LoweringContext
from omnicomp.options.engine_names import engine_names
from omnicomp.options.policy import Policy

__all__ = ["Weights", "engines_of", "informed", "weights_of"]

Weights = Mapping[int, Callable[[], torch.Tensor | None]]
"""The weights of a call by position among a graph's inputs; each a function that returns None once it is gone."""


def engines_of(policy: Policy) -> tuple[str, ...]:
    """Names of the engines that may get a part of a graph."""
    asked = [*policy.lowerings, *(name for rule in policy.rules for name in rule.lowerings)]
    known = engine_names()
    return tuple(dict.fromkeys(name for name in asked if name in known))


def weights_of(gm: GraphModule, inputs: Sequence[Any]) -> Weights:
    """Those inputs of a Dynamo graph that are parameters and buffers of the model, as weak references.

    Args:
        gm: the graph.
        inputs: what Dynamo passed to the backend; those that are fake have no value that could be built in.
    """
    found: dict[int, Callable[[], torch.Tensor | None]] = {}
    for index, (node, value) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        real = isinstance(value, torch.Tensor) and not is_fake(value) and not is_subclass(value)
        if real and static_dynamo_input(node):
            found[index] = weakref.ref(value)
    return found


def informed(context: LoweringContext, part: GraphModule, weights: Weights, count: int) -> LoweringContext:
    """The context of a part with the weights that engines may build in.

    Args:
        context: of a part that was traced without decompositions.
        part: its graph.
        weights: of the Dynamo graph.
        count: number of inputs of the Dynamo graph. Autograd may have left some out or put others in; then nothing is
            known of the part's weights, and they are inputs.
    """
    context = dataclasses.replace(context, undecomposed=True)
    placeholders = part.graph.find_nodes(op="placeholder")
    if context.part != "inference" or len(placeholders) != count:
        return context
    named: dict[str, Callable[[], torch.Tensor | None]] = {}
    for index, reference in weights.items():
        value, fake = reference(), fake_value(placeholders[index])
        if value is None or not _alike(value, fake):
            return context  # the positions do not mean what they meant
        named[str(placeholders[index].target)] = reference
    return dataclasses.replace(context, weights=named)


def _alike(value: torch.Tensor, fake: Any) -> bool:
    return (
        isinstance(fake, torch.Tensor)
        and value.dtype == fake.dtype
        and value.device == fake.device
        and [*value.shape, *value.stride()] == [*map(str_or_int, fake.shape), *map(str_or_int, fake.stride())]
    )


def str_or_int(size: Any) -> Any:
    """A size as a number where it is one, else as text, so that no comparison adds a guard."""
    return size if type(size) is int else str(size)
