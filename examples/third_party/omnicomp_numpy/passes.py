"""`1 / sqrt(x)` becomes `rsqrt(x)`: one operator in place of two."""

import dataclasses
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from omnicomp.analysis.nodes import fake_value, insert_call, op_name
from omnicomp.passes import Pass, PassContext, PassResult


@dataclasses.dataclass(frozen=True)
class ReciprocalRoot(Pass):
    """Writes the reciprocal of a square root as one operator.

    Attributes:
        half: whether it does so in half precision, too.
    """

    name: ClassVar[str] = "rsqrt"
    runs_before: ClassVar[str] = "dtype_policy"
    half: bool = False

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has one."""
        return any(self._root(node) is not None for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Rewrite each of them; a root that something else reads stays."""
        found = [(node, root) for node in module.graph.nodes if (root := self._root(node)) is not None]
        for node, root in found:
            result = insert_call(node, torch.rsqrt, (root.args[0],))
            node.replace_all_uses_with(result)
            module.graph.erase_node(node)
            if not root.users:
                module.graph.erase_node(root)
            context.rewrite(self.name, "arithmetic", result, target="torch.rsqrt")
        return PassResult(module, bool(found))

    def _root(self, node: Node) -> Node | None:
        """The square root that a node is the reciprocal of."""
        if op_name(node) != "operator.truediv" or node.args[0] != 1 or not isinstance(node.args[1], Node):
            return None
        root = node.args[1]
        if op_name(root) not in ("torch.sqrt", "Tensor.sqrt") or len(root.args) != 1 or root.kwargs:
            return None
        dtype = fake_value(root).dtype
        return root if dtype in (torch.float32, torch.float64) or (self.half and dtype.is_floating_point) else None
