"""Copies of convolutions' weights in the layout that a GPU's kernels read them in, with the channels innermost.

Inductor computes convolutions in that layout and converts their weights in each call, by the kernel that also casts
them. A copy that is cast already, but laid out as the parameter is, would leave a kernel for the layout alone.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from omnicomp.analysis.nodes import evaluate, fake_value
from omnicomp.passes.dtypes.operators import kind

__all__ = ["are_weights", "read_channels_last"]


def are_weights(casts: Iterable[Node]) -> bool:
    """Whether dense 2-D convolutions alone read these casts of a parameter, each as its weight."""
    return all(cast.users and all(_is_weight(cast, user) for user in cast.users) for cast in casts)


def _is_weight(cast: Node, user: Node) -> bool:
    if kind(user) != "conv2d" or [node for node in user.all_input_nodes if node is cast] != [cast]:
        return False
    weight = user.args[1] if len(user.args) > 1 else user.kwargs.get("weight")
    groups = user.args[6] if len(user.args) > 6 else user.kwargs.get("groups", 1)
    result = fake_value(user)
    dense = type(groups) is int and groups == 1
    return weight is cast and dense and isinstance(result, torch.Tensor) and result.is_contiguous()


def read_channels_last(cast: Node, copy: Node) -> None:
    """Let the convolutions that read a cast read a copy whose channels are innermost.

    Their results then are laid out like that, too; each is made contiguous again, as what comes after it may be a view,
    or be seen by the program. Inductor fuses that into what reads it.
    """
    for user in list(cast.users):
        user.replace_input_with(cast, copy)
        target: Any = getattr(torch.Tensor, str(user.target)) if user.op == "call_method" else user.target
        with torch.inference_mode(False), torch.no_grad():
            value = evaluate(target, user.args, dict(user.kwargs))
        before = fake_value(user)
        if value.stride() == before.stride():
            continue
        with user.graph.inserting_after(user):
            same = user.graph.call_method("contiguous", (user,))
        same.meta = {**user.meta}
        user.meta = {**user.meta, "example_value": value}
        user.replace_all_uses_with(same, delete_user_cb=lambda node, same=same: node is not same)
