"""Admission of an override to a block: structure, arguments, effects, the declaration's conditions, results.

What the program gets must be what it got: the block must be one that can be taken out as a call without moving a
change, a random draw or a collective across it, and the call must return what the block did, as far as fake tensors
show. Each question has a function; the answer no is `Refused`, with the reason.
"""

import inspect
from typing import Any

import torch
from torch.fx import Node

from omnicomp._torch.autograd.attention import known_equal, known_shape
from omnicomp._torch.autograd.overrides import breaks_inside_modules
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp.analysis.nodes import evaluate, fake_value
from omnicomp.lowerings.base import LoweringContext
from omnicomp.lowerings.overrides.blocks import Block, effects
from omnicomp.lowerings.overrides.declaration import Override, Refused, raised, refused
from omnicomp.lowerings.overrides.rewrite import excluded, found_wrong


def admit(item: Override, block: Block, context: LoweringContext, *, training: bool) -> tuple[dict[str, Node], Any]:
    """What the override is called with in the place of a block, and what it returns.

    Returns:
        The nodes by name of argument, in the order of the operator's schema; and the fake value of the call.

    Raises:
        Refused: the block is left as it is.
    """
    barred = excluded(item, block.nodes, context) or found_wrong(item, context)
    if barred is not None:
        raise Refused(barred)
    _check_structure(item, block)
    if training and not item.trains and any(fake_value(node).requires_grad for node in block.outputs):
        raise Refused(item.not_differentiable())
    arguments = _bind(item, block)
    _check_effects(item, block, arguments)
    _ask(item, block, arguments)
    return arguments, _try(item, block, arguments)


def _check_structure(item: Override, block: Block) -> None:
    if breaks_inside_modules():
        raise Refused(
            refused(
                item,
                "a graph may hold a piece of a block, as Dynamo may break it inside of modules",
                observed="torch._dynamo.config.nested_graph_breaks=True",
                needed="False",
                lever="set torch._dynamo.config.nested_graph_breaks = False",
            )
        )
    if not block.outputs or any(not isinstance(fake_value(node), torch.Tensor) for node in block.outputs):
        odd = [node.name for node in block.outputs if not isinstance(fake_value(node), torch.Tensor)]
        raise Refused(
            refused(
                item,
                f"{block.path} hands on something that is no tensor, or nothing",
                observed=", ".join(odd) or "no output",
                needed="tensors",
                lever="return only tensors from the module",
            )
        )
    if not block.convex:
        raise Refused(
            refused(
                item,
                f"{block.path} can't be one call: something outside reads a value of it and makes one for it",
                observed=", ".join(node.name for node in block.between[:4]),
                needed="a block that is left once and not entered again",
                lever="move hooks and callbacks out of the module's forward",
            )
        )


def _bind(item: Override, block: Block) -> dict[str, Node]:
    """The operator's arguments: the block's own tensors by name, the activations in the order of first use.

    Returns:
        Nodes by name of argument, in the order of the schema; the last ones may be missing.

    Raises:
        Refused: the block is not entered as the operator expects.
    """
    if block.foreign_state:
        raise Refused(
            refused(
                item,
                f"{block.path} uses parameters that are another module's, so that their names are not known",
                observed=", ".join(block.foreign_state),
                needed="parameters of its own",
                lever="do not tie weights of a block that an override is to take",
            )
        )
    arguments = item.operators[0]._schema.arguments
    own = dict(block.parameters)
    slots = [a.name for a in arguments if a.name not in own and not a.has_default_value()]
    known = {a.name for a in arguments}
    unknown = [name for name in own if name not in known]
    if len(slots) != len(block.activations) or unknown or len(own) != len(block.parameters):
        comes = [node.name for node in block.activations]
        raise Refused(
            refused(
                item,
                f"{block.path} is not entered as the override {item.name} expects",
                observed=f"activations {', '.join(comes) or 'none'}; parameters {', '.join(own) or 'none'}",
                needed=str(item.operators[0]._schema),
                lever="name parameters after those of the module, dots as underscores, and give no others a default",
            )
        )
    bound = {**own, **dict(zip(slots, block.activations, strict=True))}
    return {a.name: bound[a.name] for a in arguments if a.name in bound}


def _check_effects(item: Override, block: Block, arguments: dict[str, Node]) -> None:
    """Refuse what can't be moved into one call, or past the nodes that stand between the block's."""
    try:
        own = effects(block.nodes, block.outputs)
        between = effects(block.between)
    except CONTROL_FLOW:
        raise
    except Exception as error:
        raise Refused(raised(item, f"{block.path} can't be run on fake tensors", error)) from error
    if own.other or between.other:
        where = f"{block.path}" if own.other else f"between the nodes of {block.path}"
        raise Refused(
            refused(
                item,
                f"{where} there is more than computation: {(own.other or between.other)[0]}",
                observed=", ".join(own.other or between.other),
                needed="no random numbers, no collectives, no modes, no higher-order operators",
                lever="switch dropout off (model.eval()), or override a smaller module",
            )
        )
    changed = {name for name, node in arguments.items() if node in own.mutated}
    foreign = [node.name for node in own.mutated if node not in arguments.values()]
    if changed != set(item.mutates) or foreign:
        raise Refused(
            refused(
                item,
                f"{block.path} does not change the same values in place as the override {item.name}",
                observed=", ".join([*sorted(changed), *foreign]) or "changes nothing",
                needed=", ".join(item.mutates) or "changes nothing",
                lever="keep changes of inputs and buffers out of the module, or declare mutates=",
            )
        )
    if between.mutated or (own.mutated and block.between):
        raise Refused(
            refused(
                item,
                f"a change in place would be moved past other operators of {block.path}",
                observed=", ".join(node.name for node in block.between[:4]),
                needed="nothing between the block's own operators",
                lever="keep in-place operators out of the module",
            )
        )
    if own.aliases:
        raise Refused(
            refused(
                item,
                f"{block.path} returns memory of its inputs, and an operator returns its own",
                observed=", ".join(node.name for node in own.aliases),
                needed="results of their own",
                lever="return a copy from the module, or override a larger one",
            )
        )


def _ask(item: Override, block: Block, arguments: dict[str, Node]) -> None:
    """Refuse what the declaration rules out, and what its check does."""
    fakes = {name: fake_value(node) for name, node in arguments.items()}
    reason = item.unfit(tuple(fakes.values()))
    if reason is None and item.check is not None:
        own = dict(block.parameters)
        positional = [value for name, value in fakes.items() if name not in own]
        named = {name: value for name, value in fakes.items() if name in own}
        if "block" in inspect.signature(item.check).parameters:
            named["block"] = block
        reason = item.checked(*positional, **named)
    if reason is not None:
        raise Refused(reason)


def call_arguments(item: Override, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the schema has them: positional up to the last that is given, keyword-only ones by name."""
    schema = item.operators[0]._schema.arguments
    plain = [a for a in schema if not a.kwarg_only]
    last = max((i for i, a in enumerate(plain) if a.name in values), default=-1)
    positional = tuple(values.get(a.name, a.default_value) for a in plain[: last + 1])
    return positional, {a.name: values[a.name] for a in schema if a.kwarg_only and a.name in values}


def _try(item: Override, block: Block, arguments: dict[str, Node]) -> Any:
    """The fake value of the call, which must be like those of the block."""
    args, kwargs = call_arguments(item, arguments)
    try:
        value = evaluate(item.operators[0], args, kwargs, like=fake_value(block.outputs[0]))
    except CONTROL_FLOW:
        raise
    except Exception as error:
        raise Refused(
            raised(item, f"the override {item.name} can't take the tensors of {block.path}", error)
        ) from error
    results: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    before = [fake_value(node) for node in block.outputs]
    if len(results) != len(before) or not all(map(_alike, results, before)):
        raise Refused(
            refused(
                item,
                f"the override {item.name} returns something else than {block.path}",
                observed="; ".join(map(_describe, results)),
                needed="; ".join(map(_describe, before)),
                lever="return what the module returns, with its shapes, dtypes and strides",
            )
        )
    return value


def _alike(new: Any, old: torch.Tensor) -> bool:
    if not isinstance(new, torch.Tensor) or not known_shape(new, old):
        return False
    strides = zip(new.shape, new.stride(), old.stride(), strict=True)
    same = all(known_equal(size, 1) or known_equal(left, right) for size, left, right in strides)
    return same and (new.dtype, new.device, new.layout) == (old.dtype, old.device, old.layout)


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{list(value.shape)} {value.dtype} on {value.device}, strides {list(value.stride())}"
