"""Torch's operator for a whole encoder layer, which `nn.TransformerEncoderLayer` calls without gradients.

Neither a fused kernel nor a compiler sees into it, and where it has a mask it computes all scores. The layer is written
with operators of its own, after aten/src/ATen/native/transformers/transformer.cpp, before the graph is traced; it is
called as it was if its attention was not fused.
"""

import math
from operator import getitem
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from omnicomp._torch.autograd.attention import hint_of, is_static, without_guards
from omnicomp.analysis.nodes import fake_value, insert_call
from omnicomp.passes.attention.nodes import is_encoder_layer
from omnicomp.passes.attention.trial import Old, Trial

_OF_QUERIES_AND_KEYS: Final = 0
_OF_KEYS: Final = 1
_OF_HEADS: Final = 2

_FEWEST_KEYS: Final = 256  # on a CPU, and without a mask: below, torch's layer took up to 3 % less than fused attention
# On CUDA, where sizes may change, so that calls are hardly replayed: launching a layer's kernels takes the host
# 0.30 ms, and torch's call 0.19; on an H200 a layer of 7e10 operations in bfloat16 took the device 0.39 ms.
_FEWEST_OPERATIONS: Final = 5e10


def written_out(graph: Graph) -> list[Trial]:
    """Write encoder layers with operators of their own, those of which that may be faster."""
    return [_written(node) for node in list(graph.nodes) if is_encoder_layer(node) and not why_called(node)]


def why_called(node: Node) -> str:
    """Why a layer stays a call of torch's operator, as far as the call tells; empty if it is written out."""
    given = _arguments(node)
    src, mask, of = fake_value(given["src"]), given["mask"], given["mask_type"]
    if src.is_nested:
        return "its input is a nested tensor"
    if src.device.type == "cuda" and not all(map(is_static, src.shape)) and _operations(given) < _FEWEST_OPERATIONS:
        return "its sizes may change, and the host would take longer to launch the kernels than the device to run them"
    if mask is None:
        short = src.device.type == "cpu" and hint_of(src.shape[1]) < _FEWEST_KEYS
        return f"no mask, and fewer than {_FEWEST_KEYS} keys" if short else ""
    return "" if of in (_OF_QUERIES_AND_KEYS, _OF_KEYS, _OF_HEADS) else "its mask is of no known type"


def _operations(given: dict[str, Any]) -> float:
    """Additions and multiplications of a layer's matrix products, at the sizes that were seen."""
    src, width, hidden = fake_value(given["src"]), given["embed_dim"], fake_value(given["ffn_weight_1"]).shape[0]
    batch, keys = map(hint_of, src.shape[:2])
    return 2.0 * batch * keys * width * (4 * width + 2 * hidden + 2 * keys)


def _arguments(node: Node) -> dict[str, Any]:
    arguments = torch.ops.aten._transformer_encoder_layer_fwd.default._schema.arguments
    defaults = {each.name: each.default_value for each in arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _written(node: Node) -> Trial:
    given = _arguments(node)
    src, mask = given["src"], given["mask"]
    new: list[Node] = []

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        new.append(insert_call(node, target, args, kwargs))
        return new[-1]

    def norm(x: Node, number: int) -> Node:
        weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return call(F.layer_norm, x, (given["embed_dim"],), weight, bias, given["eps"])

    def attention(x: Node) -> tuple[Node, Node]:
        size = given["embed_dim"] // given["num_heads"]
        projected = call(F.linear, x, given["qkv_weight"], given["qkv_bias"])
        parts = call(torch.split, projected, given["embed_dim"], -1)
        q, k, v = (
            call(torch.transpose, call(torch.unflatten, call(getitem, parts, i), -1, (given["num_heads"], size)), 1, 2)
            for i in range(3)
        )
        scores = call(torch.matmul, call(torch.mul, q, 1 / math.sqrt(size)), call(torch.transpose, k, -2, -1))
        if mask is not None:
            hidden = mask if fake_value(mask).dtype == torch.bool else call(torch.ne, mask, 0)
            for _ in range(2 if given["mask_type"] == _OF_KEYS else 0):
                hidden = call(torch.unsqueeze, hidden, 1)
            scores = call(torch.masked_fill, scores, hidden, -math.inf)
        weighed = call(torch.matmul, call(torch.softmax, scores, -1), v)
        joined = call(torch.flatten, call(torch.transpose, weighed, 1, 2), 2)
        return weighed, call(F.linear, joined, given["proj_weight"], given["proj_bias"])

    def network(x: Node) -> Node:
        x = call(F.linear, x, given["ffn_weight_1"], given["ffn_bias_1"])
        # What `_addmm_activation` computes: cuBLAS has the approximation only.
        approximate = "tanh" if fake_value(x).is_cuda else "none"
        x = call(F.gelu, x, approximate=approximate) if given["use_gelu"] else call(torch.relu, x)
        return call(F.linear, x, given["ffn_weight_2"], given["ffn_bias_2"])

    first = given["norm_first"]
    with without_guards(fake_value(src)):
        product, attended = attention(norm(src, 1) if first else src)
        x = call(torch.add, attended, src)
        x = x if first else norm(x, 1)
        x = call(torch.add, network(norm(x, 2) if first else x), x)
        x = x if first else norm(x, 2)
    old = Old.of(node)
    node.replace_all_uses_with(x)
    node.graph.erase_node(node)
    return Trial(products=(product,), new=tuple(new), old=(old,))
