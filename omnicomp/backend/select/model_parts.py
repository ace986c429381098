"""Parts of a model that may be better off on another lowering than the rest: which are tried, in which order.

A graph is divided by its modules. Layers that repeat, such as those of a transformer, are one part: what is better for
one of them is for the others. A part is tried in the whole model, so that its boundaries count, and neighbours that end
up on the same lowering are one subgraph, as placement makes runs of neighbours.
"""

import re
from collections import Counter
from typing import Final

from torch.fx import GraphModule

from omnicomp.analysis.nodes import module_path

__all__ = ["parts_of"]

# More parts than that are not tried; each is a build of the model.
_MOST: Final = 4
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def parts_of(gm: GraphModule) -> list[str]:
    """Selectors of rules, one a part, the one with most operators first; empty where the graph has no parts.

    Args:
        gm: the Dynamo graph.
    """
    paths = [module_path(node) for node in gm.graph.nodes if node.op.startswith("call_")]
    longest = max((path.count(".") + 1 for path in paths if path), default=0)
    for depth in range(1, longest + 1):
        heads = Counter(_head(path, depth) for path in paths if path)
        alike = Counter(_NUMBER.sub("*", head) for head in heads.elements())
        found = heads if len(heads) <= _MOST + 2 else alike
        if len(found) > 1:
            return [head for head, _ in found.most_common(_MOST)]
    return []


def _head(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
