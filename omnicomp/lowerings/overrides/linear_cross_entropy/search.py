"""Where a Dynamo graph computes the cross-entropy of a linear layer: `F.linear`, views and casts, then the loss."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.lowerings.overrides.search import Ended, Found
from omnicomp.lowerings.overrides.spellings import (
    Linear,
    argument,
    copy_slice,
    is_cast,
    is_copy,
    is_view_of_rows,
    kind,
    linear,
    slices_rows,
)


class _End(Exception):
    """Not an error: the candidate is left as it is."""

    def __init__(self, node: Node, sentence: str, *, observed: str = "", needed: str = "", lever: str = "") -> None:
        super().__init__(sentence)
        self.ended = Ended(node=node, sentence=sentence, observed=observed, needed=needed, lever=lever)


def search(module: GraphModule) -> Iterator[Found | Ended]:
    """The losses of a graph whose logits a linear layer makes."""
    for node in module.graph.nodes:
        if kind(node) in ("cross_entropy", "nll_loss"):
            try:
                found = _read(node)
            except _End as end:
                yield end.ended
            else:
                if found is not None:
                    yield found


def _read(loss: Node) -> Found | None:
    """The computation of one loss; None if its logits come from no linear layer at all.

    Raises:
        _End: it is written in a way that is not understood, or has options that the operator does not have.
    """
    steps: list[Node] = []
    slices: list[Node] = []
    node: Any = argument(loss, "input", 0)
    if kind(loss) == "nll_loss":
        if kind(node) != "log_softmax":
            return None
        _check_softmax(node)
        steps.append(node)
        node = argument(node, "input", 0)
    layer = linear(node)
    while layer is None:
        if not isinstance(node, Node) or not node.args or node.op not in ("call_function", "call_method"):
            return None
        if slices_rows(node):
            slices.append(node)
        elif is_cast(node):
            _check_cast(node)
        elif not is_copy(node) and not (is_view_of_rows(node) and not slices):
            if _comes_from_layer(node):
                raise _End(
                    node,
                    f"{node.name} stands between the linear layer and its loss",
                    observed=kind(node) or str(node.target),
                    needed="casts, slices of rows, and views that keep rows",
                    lever="compute the loss of the layer's own result",
                )
            return None
        steps.append(node)
        node = node.args[0]
        layer = linear(node)
    return _found(loss, layer, steps, slices)


def _comes_from_layer(node: Node) -> bool:
    """Whether a linear layer with a large result is a few steps above."""
    level = [node]
    for _ in range(4):
        level = [source for n in level for source in n.all_input_nodes]
        if any(linear(n) is not None for n in level):
            return True
    return False


def _check_softmax(node: Node) -> None:
    dim, dtype = argument(node, "dim", 1), node.kwargs.get("dtype")
    if dim not in (-1, 1) or dtype not in (None, torch.float32):
        raise _End(node, "the softmax is not over the last dimension, or of another dtype", observed=f"{dim}, {dtype}")


def _check_cast(node: Node) -> None:
    old, new = fake_value(node.args[0]).dtype, fake_value(node).dtype
    if new != old and new != torch.float32:
        raise _End(
            node,
            "the logits are cast to another dtype than float32",
            observed=f"{old} to {new}",
            needed="torch.float32",
            lever="use logits.float()",
        )


def _options(loss: Node) -> dict[str, Any]:
    plain: dict[str, tuple[int, Any]] = {"weight": (2, None), "size_average": (3, None), "reduce": (5, None)}
    if kind(loss) == "cross_entropy":
        plain["label_smoothing"] = (7, 0.0)
    for name, (position, usual) in plain.items():
        value = argument(loss, name, position, usual)
        if value != usual:
            raise _End(
                loss,
                f"the loss has the option {name}, which the operator does not have",
                observed=f"{name}={value}",
                needed=f"{name}={usual}",
                lever=f"leave {name} out",
            )
    return {
        "ignore_index": argument(loss, "ignore_index", 4, -100),
        "reduction": argument(loss, "reduction", 6, "mean"),
    }


def _found(loss: Node, layer: Linear, steps: list[Node], slices: list[Node]) -> Found:
    options = _options(loss)
    target = argument(loss, "target", 1)
    given, labels = fake_value(argument(loss, "input", 0)), fake_value(target)
    if given.dim() != 2 or not isinstance(labels, Tensor) or labels.dim() != 1 or labels.dtype != torch.int64:
        raise _End(
            loss,
            "the loss is not of one class for each row",
            observed=f"logits {list(given.shape)}, target {list(getattr(labels, 'shape', ()))}",
            needed="logits of two dimensions and class indices of one",
            lever="flatten logits to (tokens, classes) and the target to (tokens,)",
        )
    if fake_value(layer.x).dim() < 2:
        raise _End(loss, "the linear layer is of a single row", observed=str(list(fake_value(layer.x).shape)))
    trains = bool(fake_value(loss).requires_grad)
    inputs = {"hidden": layer.x, "weight": layer.source, "bias": layer.bias}
    needs = {f"{n}_grad": trains and v is not None and fake_value(v).requires_grad for n, v in inputs.items()}
    logits = fake_value(layer.node)

    def write() -> Node:
        hidden = layer.x
        for node in reversed(slices):
            hidden = copy_slice(node, hidden, loss)
        if fake_value(hidden).dim() > 2:
            hidden = insert_call(loss, torch.flatten, (hidden, 0, -2))
        if fake_value(hidden).dtype != logits.dtype:  # autocast did it inside of the layer
            hidden = insert_call(loss, torch.Tensor.to, (hidden, logits.dtype))
        args = (hidden, layer.weight(loss), layer.bias, target, *options.values(), *needs.values())
        call = insert_call(loss, torch.ops.omnicomp.linear_cross_entropy.default, args)
        result = insert_call(loss, operator.getitem, (call, 0))
        wanted = fake_value(loss).dtype
        return result if fake_value(result).dtype == wanted else insert_call(loss, torch.Tensor.to, (result, wanted))

    return Found(
        output=loss,
        steps=(*steps, *_own(layer)),
        arguments={**inputs, "target": target, "logits": layer.node, **options, **needs},
        write=write,
    )


def _own(layer: Linear) -> tuple[Node, ...]:
    """The layer's steps that only it reads; a transposed weight may serve others as well."""
    return (layer.node, *(step for step in layer.steps if step is not layer.node and len(step.users) == 1))
