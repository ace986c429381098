"""What the pass `legalise` reads from nodes: dtypes, tensors and storages of their fake values."""

from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dtypes import storage_key, was_written
from omnicomp.analysis.nodes import fake_value

__all__ = ["CAST", "MARK", "dtypes", "is_tensor", "leaves", "literals", "storages", "written_storages"]

CAST: Final = torch.ops.aten.to.dtype  # an OpOverload: differentiable, and known to AOTAutograd's cache as safe
MARK: Final = "legal_as_it_is"
"""Key of the metadata of nodes that have a dtype which the device lacks, and must: a second run leaves them alone."""


def leaves(node: Node) -> list[torch.Tensor]:
    """The fake tensors of a node's value."""
    return [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]


def is_tensor(node: Any) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(fake_value(node), torch.Tensor)


def dtypes(node: Any) -> Any:
    """The dtype of a tensor node; of a tuple, those of its tensors; of others None."""
    fake = fake_value(node) if isinstance(node, Node) else None
    if isinstance(fake, torch.Tensor):
        return fake.dtype
    found = tuple(leaf.dtype for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor))
    return found or None


def literals(node: Node) -> list[Any]:
    """The arguments of a node, nodes among them."""
    return tree_leaves((node.args, dict(node.kwargs)))


def storages(node: Node) -> set[int]:
    """The identities of the storages of a node's tensors."""
    return {key for key in map(storage_key, leaves(node)) if key is not None}


def written_storages(node: Node) -> set[int]:
    """Those of them that the graph writes to, as far as this node shows."""
    return storages(node) if any(map(was_written, leaves(node))) else set()
