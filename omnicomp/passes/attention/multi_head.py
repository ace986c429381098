"""Calls of `multi_head_attention_forward` whose weights are dropped: without them, it calls a fused kernel itself.

`nn.MultiheadAttention` returns its weights by default (`need_weights=True`), and computes them unfused for that.
"""

import inspect
import math
import operator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.passes.attention.nodes import is_pure, kind
from omnicomp.passes.attention.site import MatchEnded

__all__ = ["is_multi_head", "multi_heads", "without_weights"]

_SIGNATURE: Final = inspect.signature(F.multi_head_attention_forward)
_NO_WEIGHTS: Final = "pass need_weights=False to nn.MultiheadAttention"


def is_multi_head(node: Node) -> bool:
    """Whether a node is a call of `multi_head_attention_forward`."""
    return node.op == "call_function" and node.target is F.multi_head_attention_forward


def multi_heads(graph: Graph) -> list[Node]:
    """The calls that return weights, or may do so."""
    return [n for n in graph.nodes if is_multi_head(n) and _arguments(n)["need_weights"] is not False]


def without_weights(node: Node) -> str:
    """Change a call such that it makes no weights.

    Returns:
        What was done, for people.

    Raises:
        MatchEnded: the weights are needed, or the output would be another one.
    """
    given = _arguments(node)
    picked = [user for user in node.users if user.target is operator.getitem]
    weights = next((user for user in picked if user.args[1] == 1 and _is_needed(user)), None)
    if weights is not None or len(picked) < len(node.users):
        raise _ended(node, "the weights of multi_head_attention_forward are used", "the second result", "no use of it")
    masks = [mask for name in ("attn_mask", "key_padding_mask") if (mask := given[name]) is not None]
    if not all(_keeps_gradients(mask, node) for mask in masks) or (masks and _dims(masks[0]) > 2):
        raise _ended(
            node,
            "multi_head_attention_forward makes weights that are dropped, and without them it may differ where a mask "
            "hides every key",
            "a mask for each head, or one of numbers in training",
            "no mask, or boolean ones of two dimensions",
        )
    if given["dropout_p"] and given["training"] is not False:
        raise _ended(
            node,
            "multi_head_attention_forward makes weights that are dropped, and has an active dropout",
            f"dropout_p={given['dropout_p']}",
            "no dropout",
            "set the attention's dropout to 0",
        )
    output = [user for user in picked if user.args[1] == 0]
    node.args, node.kwargs = (), {**given, "need_weights": False, "is_causal": False}
    made = fake_value(node)
    node.meta["example_value"] = (made[0], None)
    for user in set(picked) - set(output):
        _erase(user)
    for user in output if masks else ():
        _keep_undefined(user, masks, given)
    return "need_weights=False, as the weights are dropped"


def _arguments(node: Node) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _dims(mask: Node) -> int:
    return fake_value(mask).dim()


def _keeps_gradients(mask: Any, node: Node) -> bool:
    """Whether rows in which a mask leaves no key have the same gradients in a fused kernel: -inf, or no gradients."""
    if not isinstance(mask, Node):
        return False
    if kind(mask) in ("masked_fill", "masked_fill_") and mask.args[-1] == -math.inf:
        return True
    return fake_value(mask).dtype == torch.bool or not fake_value(node)[0].requires_grad


def _is_needed(node: Node) -> bool:
    return any(not is_pure(user) or _is_needed(user) for user in node.users)


def _erase(node: Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


def _keep_undefined(output: Node, masks: list[Node], given: dict[str, Any]) -> None:
    """NaN for queries without a key, as the weights have it; `scaled_dot_product_attention` gives zeros."""
    before = output.next
    hidden: Any = None
    for mask in masks:
        made = mask
        if fake_value(mask).dtype == torch.bool:
            zeros = insert_call(before, torch.zeros_like, (mask,), {"dtype": fake_value(output).dtype})
            made = insert_call(before, torch.masked_fill, (zeros, mask, -math.inf))
        if mask is given["attn_mask"] and fake_value(output).dim() == 3:
            made = insert_call(before, torch.unsqueeze, (made, 1))  # one for all sequences
        hidden = made if hidden is None else insert_call(before, torch.add, (hidden, made))
    empty = insert_call(before, torch.all, (insert_call(before, torch.isneginf, (hidden,)),), {"dim": -1})
    empty = insert_call(before, torch.unsqueeze, (empty, -1))
    kept = insert_call(before, torch.masked_fill, (output, empty, math.nan))
    output.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _ended(node: Node, sentence: str, observed: str, needed: str, lever: str = _NO_WEIGHTS) -> MatchEnded:
    return MatchEnded(node, sentence, observed=observed, needed=needed, lever=lever, code="match_ended")
