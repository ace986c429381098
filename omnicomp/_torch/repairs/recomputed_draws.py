"""Random numbers of a checkpointed part, where a captured graph runs eager.

Dynamo's operator for activation checkpointing recomputes with other random numbers, as it expects to be traced by
AOTAutograd, which keeps them. A graph that is called as it was captured had gradients of another dropout than its
result's. A reproducer is `tests/_torch/repairs/test_recomputed_draws.py`.
"""

from collections.abc import Callable
from typing import Any, Final

import torch.utils.checkpoint
from torch._guards import detect_fake_mode
from torch._higher_order_ops import wrap
from torch.fx import GraphModule

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/pull/102450")


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """The operator's function, which keeps the states of generators unless it is traced, or the program asks not to."""

    def checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode(args) is not None:
            return original(body, *args, **kwargs)
        kwargs["use_reentrant"] = False
        if "_checkpoint_context_fn" in body.meta:
            kwargs["context_fn"] = body.meta["_checkpoint_context_fn"]

        def run(*values: Any) -> Any:
            with _OPERATOR:  # a part within this one
                return body(*values)

        return torch.utils.checkpoint.checkpoint(run, *args, **kwargs)

    return checkpointed


_OPERATOR: Final = Exchange(wrap, "tag_activation_checkpoint_impl", _keeping)


def eager_calls(module: GraphModule) -> Callable[..., Any]:
    """What calls a captured graph with eager's autograd."""
    graphs = (part.graph for part in module.modules() if isinstance(part, GraphModule))
    if not any(graph.find_nodes(op="call_function", target=wrap.tag_activation_checkpoint) for graph in graphs):
        return module

    def call(*args: Any) -> Any:
        with _OPERATOR:
            return module(*args)

    return call
