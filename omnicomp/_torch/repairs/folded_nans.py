"""The product of a floating tensor with an integer zero, which Inductor takes for zeros and folds away."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/pull/187580")


class KeepNans(CustomGraphPass):
    """Keeps the product of a floating tensor with an integer zero, which Inductor takes for zeros.

    It is NaN where the tensor is NaN or infinite, and has the tensor's sign otherwise. Inductor leaves a product with
    `0.0` alone, which is the same.
    """

    def __call__(self, graph: Graph) -> None:
        """Write the zeros of a graph after autograd as floating numbers."""
        for target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar):
            for node in graph.find_nodes(op="call_function", target=target):
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                    node.args = tuple(0.0 if isinstance(a, int) and a == 0 else a for a in node.args)

    def uuid(self) -> Any | None:
        """What Inductor hashes into its cache keys."""
        return get_hash_for_files((__file__,))


def config_patches(patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's config patches with this pass, unless the user has one of his own in that place."""
    if not NEEDED.here or patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass) is not None:
        return dict(patches)
    return {**patches, "joint_custom_pre_pass": KeepNans()}
