"""Losses whose decompositions in torch are wrong, in graphs that Dynamo captured. Seen in torch 2.11 to 2.13."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import _reduction

from omnicomp._torch.fx import all_nodes, fake_value, submodules

__all__ = ["multilabel_margin_loss", "repair_losses"]

_BUILTIN: Any = getattr(torch._C, "_nn")  # noqa: B009 - made at run time, and unknown to type checkers
_MULTILABEL: Final = (F.multilabel_margin_loss, _BUILTIN.multilabel_margin_loss)
_MULTICLASS: Final = (F.multi_margin_loss, _BUILTIN.multi_margin_loss)
_WHENCE: Final = ("stack_trace", "nn_module_stack", "source_fn_stack")


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.multilabel_margin_loss`, made of operators that are decomposed rightly.

    Of each sample, sum(max(0, 1 - x[label] + x[i]) over labels and over i that is no label) / x.size(0), where the
    labels end at the first -1.

    Args:
        input: floating point, (C) or (N, C); without dimensions it is one class.
        target: int64, the shape of `input`.
        size_average: deprecated by torch, which still takes it; see `reduction`.
        reduce: the same.
        reduction: `none`, `mean` or `sum`.

    Returns:
        No dimensions, or (N) with `reduction="none"` and (N, C).
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    valid = (labels == -1).cumsum(-1) == 0
    classes = torch.arange(x.shape[-1], device=x.device)
    is_label = (torch.where(valid, labels, -1).unsqueeze(-1) == classes).any(1)
    of_labels = x.gather(1, torch.where(valid, labels, 0))
    # relu has no gradient where a margin is met exactly, as torch's kernel.
    margins = (1 - of_labels.unsqueeze(2) + x.unsqueeze(1)).relu()
    counted = valid.unsqueeze(2) & ~is_label.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / x.shape[-1]
    losses = losses.reshape(target.shape[:-1])
    return {"none": losses.clone, "mean": losses.mean, "sum": losses.sum}[reduction]()


def repair_losses(module: GraphModule) -> None:
    """Replace losses that AOTAutograd would take apart wrongly, in a Dynamo graph.

    `multilabel_margin_loss` counts what comes after a -1 in the labels, and gives the loss of a single sample one
    dimension where eager gives it none. `multi_margin_loss` does the latter alone.
    """
    changed = False
    for node in list(all_nodes(module)):
        if node.op != "call_function":
            continue
        if node.target in _MULTILABEL:
            if node.target is not F.multilabel_margin_loss:
                node.args, node.kwargs = _with_names(node)
            node.target = multilabel_margin_loss
            changed = True
        elif node.target in _MULTICLASS and _dimensions(node) == 0:
            with node.graph.inserting_after(node):
                scalar = node.graph.call_method("reshape", (node, ()))
            scalar.meta.update({key: node.meta[key] for key in _WHENCE if key in node.meta})
            node.replace_all_uses_with(scalar, delete_user_cb=lambda user, scalar=scalar: user is not scalar)
            changed = True
    if changed:
        _recompile(module)


def _with_names(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the builtin, which takes a number for the reduction, as those of the function."""
    given: dict[str, Any] = dict(zip(("input", "target", "reduction"), node.args, strict=False)) | dict(node.kwargs)
    given["input"] = given.pop("self", given.get("input"))
    given["reduction"] = ("none", "mean", "sum")[int(given.get("reduction", 1))]
    return (), given


def _dimensions(node: Node) -> int:
    """Of the target of a loss; -1 if it is not known."""
    target = node.kwargs.get("target", node.args[1] if len(node.args) > 1 else None)
    value = fake_value(target) if isinstance(target, Node) else None
    return value.ndim if isinstance(value, Tensor) else -1


def _recompile(module: GraphModule) -> None:
    for child in submodules(module):
        _recompile(child)
    module.recompile()
