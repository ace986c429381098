"""Calls of `multi_head_attention_forward`: without weights that are dropped, and without masks that are proved.

`nn.MultiheadAttention` returns its weights by default (`need_weights=True`), and computes them unfused for that.
Without them it calls `scaled_dot_product_attention`, with `is_causal` instead of a mask where it is told so.
"""

import inspect
import math
import operator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from omnicomp._torch.autograd.attention import hint_of
from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.passes.attention.assume import settle_plain
from omnicomp.passes.attention.masking import Masking, read_steps
from omnicomp.passes.attention.nodes import is_multi_head, is_pure, kind
from omnicomp.passes.attention.reader import axes_of
from omnicomp.passes.attention.session import Session
from omnicomp.passes.attention.site import Add, Fill, MatchEnded
from omnicomp.passes.attention.terms import Axis, Number

_SIGNATURE: Final = inspect.signature(F.multi_head_attention_forward)
_NO_WEIGHTS: Final = "pass need_weights=False to nn.MultiheadAttention"


def multi_heads(graph: Graph) -> list[Node]:
    """The calls that a graph makes."""
    return [n for n in graph.nodes if is_multi_head(n)]


def makes_weights(node: Node) -> bool:
    """Whether a call returns weights, or may do so."""
    return _arguments(node)["need_weights"] is not False


def may_drop_weights(node: Node) -> bool:
    """Whether the weights of a call are not needed, so that it may come to a fused kernel."""
    given = _arguments(node)
    return not makes_weights(node) or (
        _used_weights(node) is None and not (given["dropout_p"] and given["training"] is not False)
    )


def _used_weights(node: Node) -> Node | None:
    """What takes the weights that a call returns; the call itself if what is taken of it is not known."""
    picked = [user for user in node.users if user.target is operator.getitem]
    if len(picked) < len(node.users):
        return node
    return next((user for user in picked if user.args[1] == 1 and _is_needed(user)), None)


def read_mask_of(node: Node, session: Session, *, settled: bool) -> tuple[Masking | None, str]:
    """What the mask of a call hides, None if it has none or none that can be read; and what was done.

    Args:
        node: the call.
        session: reads it.
        settled: whether its masks may be of the classes that their values show. A padding mask that hides nothing is
            taken from the call then.
    """
    given = _arguments(node)
    appended = given["bias_k"] is not None or given["bias_v"] is not None or given["add_zero_attn"] is not False
    if appended or given["is_causal"] is not False:
        return None, ""
    found = _read(node, given["attn_mask"], 2, session)
    masking = None
    flops = _flops(given)
    if found is not None:
        masking, groups = found
        if settled:
            masking = settle_plain(masking, groups, node, session, flops=flops, causal=True)
    causal = masking is not None and masking.is_causal
    padding = _read(node, given["key_padding_mask"], 1, session) if settled else None
    if padding is not None:
        hidden = settle_plain(*padding, node, session, flops=flops, causal=causal)
        if hidden.is_full and not hidden.biases:
            node.args, node.kwargs = (), {**given, "key_padding_mask": None}
            return masking, "no padding, as it hides nothing"
    return masking, ""


_Groups = tuple[tuple[Axis, ...], ...]


def _read(node: Node, mask: Any, dims: int, session: Session) -> tuple[Masking, _Groups] | None:
    """What a mask over queries and keys, or keys alone, hides, and the axes of batch, heads, queries and keys."""
    value = session.trace.values.get(mask) if isinstance(mask, Node) else None
    if value is None or session.trace.holder(value, node) is None:
        return None
    at = axes_of(value)
    term = session.reader.read(value, at)
    hidden = Number(dtype=torch.float32, value=-math.inf)
    step = Fill(term, hidden) if term.dtype == torch.bool else Add(term)
    batch = tuple(axis for position in at[:-dims] for axis in position.axes)
    groups = (batch, (), at[-2].axes if dims == 2 else (), at[-1].axes)
    return read_steps([step], groups, session.reader), groups


def _flops(given: dict[str, Any]) -> int:
    query, key = (fake_value(given[name]).shape for name in ("query", "key"))
    return 4 * math.prod(map(hint_of, (*query, key[0])))


def without_mask(node: Node, masking: Masking) -> str:
    """Change a call that makes no weights such that it gets no mask that is proved to be full or causal.

    Returns:
        What was done, for people; nothing if that was nothing.
    """
    given = _arguments(node)
    if masking.is_full and not masking.biases:
        node.args, node.kwargs = (), {**given, "attn_mask": None}
        return "no mask, as it hides nothing"
    if masking.is_causal and given["key_padding_mask"] is None:
        node.args, node.kwargs = (), {**given, "is_causal": True}
        return "is_causal, as the mask is"
    return ""


def without_weights(node: Node, masking: Masking | None = None) -> str:
    """Change a call such that it makes no weights.

    Args:
        node: the call.
        masking: what its mask hides, if that is known.

    Returns:
        What was done, for people.

    Raises:
        MatchEnded: the weights are needed, or the output would be another one.
    """
    given = _arguments(node)
    if masking is not None and masking.is_full and not masking.biases:
        given["attn_mask"] = None
    # Where every query has a key, there is nothing that could differ.
    causal = masking is not None and masking.is_causal and given["key_padding_mask"] is None
    picked = [user for user in node.users if user.target is operator.getitem]
    if _used_weights(node) is not None:
        raise _ended(node, "the weights of multi_head_attention_forward are used", "the second result", "no use of it")
    masks = [mask for name in ("attn_mask", "key_padding_mask") if (mask := given[name]) is not None and not causal]
    if not all(_keeps_gradients(mask, node) for mask in masks):
        raise _ended(
            node,
            "multi_head_attention_forward makes weights that are dropped, and without them it may differ where a mask "
            "hides every key",
            "a mask of numbers in training",
            "no mask, or boolean ones",
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
    node.args, node.kwargs = (), {**given, "need_weights": False, "is_causal": causal}
    made = fake_value(node)
    node.meta["example_value"] = (made[0], None)
    for user in set(picked) - set(output):
        _erase(user)
    for user in output if masks else ():
        _keep_undefined(user, masks, given)
    detail = "need_weights=False, as the weights are dropped"
    return f"{detail}; is_causal, as the mask is" if causal else detail


def _arguments(node: Node) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


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
    before, batched = output.next, fake_value(output).dim() == 3
    each_head = fake_value(masks[0]).dim() == 3
    hidden: Any = None
    for mask in masks:
        made = mask
        if fake_value(mask).dtype == torch.bool:
            zeros = insert_call(before, torch.zeros_like, (mask,), {"dtype": fake_value(output).dtype})
            made = insert_call(before, torch.masked_fill, (zeros, mask, -math.inf))
        if mask is not given["attn_mask"] and each_head and batched:
            made = insert_call(before, torch.unsqueeze, (made, 0))  # one for all heads
            made = insert_call(before, torch.unsqueeze, (made, 2))
        elif mask is given["attn_mask"] and each_head and batched:
            made = insert_call(before, torch.unflatten, (made, 0, (-1, given["num_heads"])))
            made = insert_call(before, torch.transpose, (made, 0, 1))
        elif mask is given["attn_mask"] and batched:
            made = insert_call(before, torch.unsqueeze, (made, 1))  # one for all sequences
        hidden = made if hidden is None else insert_call(before, torch.add, (hidden, made))
    empty = insert_call(before, torch.all, (insert_call(before, torch.isneginf, (hidden,)),), {"dim": -1})
    if each_head:  # the output of a query is made of all heads
        empty = insert_call(before, torch.any, (empty,), {"dim": 0})
        empty = insert_call(before, torch.transpose, (empty, 0, 1)) if batched else empty
    empty = insert_call(before, torch.unsqueeze, (empty, -1))
    kept = insert_call(before, torch.masked_fill, (output, empty, math.nan))
    output.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _ended(node: Node, sentence: str, observed: str, needed: str, lever: str = _NO_WEIGHTS) -> MatchEnded:
    return MatchEnded(node, sentence, observed=observed, needed=needed, lever=lever, code="match_ended")
