"""Numbers of Python's `random` that Dynamo announces in one dtype to a backend, and passes in another.

What `random.uniform(0, 1)` returns inside a compiled function becomes an input of the graph. Dynamo describes it as a
tensor of the default dtype, and passes a float64 to each call, on the CPU. Generated code reads it as announced:
`torch.compile(lambda x: x * random.uniform(0, 1))` multiplies by garbage.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo.source import RandomValueSource
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp._torch.fx import fake_value
from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", fixed="2.15", issue="https://github.com/pytorch/pytorch/issues/198187")
_PYTHON: Final = ("_operator", "builtins", "math")


def as_passed(module: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Describe random numbers as they are passed, and have the rest of a graph compute in the dtypes that it had.

    Arithmetic of such numbers alone is Python's, in double precision. An operator on tensors takes the number as it is
    if its result has the announced dtype then, as `x * number` of tensors of any floating dtype, or else in the
    announced dtype.

    Returns:
        The inputs, with those numbers as they are passed.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    passed = {node: value for node in placeholders if (value := _as_passed(node)) is not None}
    if not NEEDED.here or not passed:
        return inputs
    announced: dict[Node, Tensor] = {}
    for node in list(module.graph.nodes):
        numbers = [operand for operand in node.all_input_nodes if operand in announced]
        if node in passed:
            announced[node] = fake_value(node)
            node.meta["example_value"] = passed[node]
        elif not numbers or node.op == "output":
            continue
        elif _is_python(node) and len(numbers) == len(node.all_input_nodes):
            announced[node] = fake_value(node)
            node.meta["example_value"] = _evaluated(node)
        elif not _has_dtypes(_evaluated(node), fake_value(node)):
            for number in numbers:
                with module.graph.inserting_before(node):
                    cast = module.graph.call_method("to", (number, announced[number].dtype))
                cast.meta = {**node.meta, "example_value": announced[number]}
                node.replace_input_with(number, cast)
    module.recompile()
    return [
        torch.zeros((), dtype=torch.float64) if node in passed else value
        for node, value in zip(placeholders, inputs, strict=True)
    ]


def _as_passed(node: Node) -> Tensor | None:
    """The fake value of a random number as it is passed; None where it was announced so, and for any other input."""
    source, value = getattr(node.meta.get("grapharg"), "source", None), fake_value(node)
    if not isinstance(source, RandomValueSource) or not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dtype is torch.float64 and value.device.type == "cpu":
        return None
    mode: Any = getattr(value, "fake_mode")  # noqa: B009 - of fake tensors alone
    with mode:
        return torch.empty((), dtype=torch.float64, device="cpu")


def _is_python(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", None) in _PYTHON


def _evaluated(node: Node) -> Any:
    """What an operator makes of the fake values of its operands; None where it can't be asked."""
    args, kwargs = map_arg((node.args, node.kwargs), fake_value)
    target: Any = node.target
    if node.op == "call_method":
        target, args = getattr(args[0], target), args[1:]
    elif node.op != "call_function" or target is torch.tensor:  # which warns of a tensor
        return None
    # Not the mode of the tracing context, which is another one while a backend is called.
    fakes: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if is_fake(leaf)]
    mode = fakes[0].fake_mode if fakes else None
    if mode is None:
        return None
    environment = mode.shape_env
    try:
        with mode, contextlib.nullcontext() if environment is None else environment.suppress_guards():
            return target(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the operator then gets what Dynamo announced
        return None


def _has_dtypes(found: Any, announced: Any) -> bool:
    return [getattr(leaf, "dtype", None) for leaf in tree_leaves(found)] == [
        getattr(leaf, "dtype", None) for leaf in tree_leaves(announced)
    ]
