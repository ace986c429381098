"""Nodes of a Dynamo graph that the attention pass must know by name, because running them would hide what they are."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Node

from omnicomp._torch.autograd.attention import SDPA
from omnicomp._torch.autograd.flex import FLEX
from omnicomp._torch.targets import base_name
from omnicomp.analysis.nodes import fake_value, op_name

_NAMESPACES: Final = ("torch", "torch.nn.functional", "torch.functional", "operator", "Tensor", "torch.special")
_SHAPE_ONLY: Final = ("size", "dim", "ndimension", "sym_size", "numel", "stride")
_STATE: Final = ("autocast", "grad_enabled", "inference_mode", "_nesting", "setitem", "set_")
_NORMALIZING: Final = frozenset(
    ("softmax", "_softmax", "_safe_softmax", "log_softmax", "softmin", "exp", "exp_", "exp2")
)
_PRODUCTS: Final = ("matmul", "bmm", "einsum", "baddbmm")
_NO_SOFTMAX: Final = ("sigmoid", "sigmoid_", "relu", "relu_")
_OF_ELEMENTS: Final = frozenset(
    "add sub mul div truediv neg pow square clamp where masked_fill masked_fill_ iadd isub imul itruediv dropout "
    "to type float half bfloat16 type_as clone contiguous view reshape "
    "flatten unflatten transpose permute unsqueeze squeeze expand".split()
)
_MOST_NEAR: Final = 64
_RANDOM: Final = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "bernoulli",
    "multinomial",
    "normal",
    "rand_like",
    "inductor_seed",
    "inductor_seeds",
    "randn_like",
)
_IN_PLACE_OPERATORS: Final = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul iconcat setitem".split()
)


def kind(node: Any) -> str:
    """The operation of a torch function, method or operator (`softmax`, `mul`), or an empty string."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return base_name(node.target)
    namespace, _, name = op_name(node).rpartition(".")
    if namespace == "torch._C._special":
        return name.removeprefix("special_")
    return name if namespace in _NAMESPACES or node.target is getattr else ""


def is_scaled_dot_product_attention(node: Node) -> bool:
    """Whether a node is an attention that torch fuses itself."""
    return node.op == "call_function" and node.target is SDPA


def is_fused_attention(node: Node) -> bool:
    """Whether a node is an attention of torch's own, FlexAttention too."""
    return is_scaled_dot_product_attention(node) or node.target is FLEX


def is_normalizing(node: Node) -> bool:
    """Whether a node is a softmax, or an exponential that one may be written out with."""
    base = node.args[0] if node.args and kind(node) == "pow" else None
    return kind(node) in _NORMALIZING or isinstance(base, int | float)


def weighs_values(node: Node) -> bool:
    """Whether a sigmoid or the like takes the place of a softmax: between two products of batches, by elements alone.

    Layers of a network are products of a matrix, of parameters or not.
    """
    if kind(node) not in _NO_SOFTMAX:
        return False
    return all(any(map(_is_product_of_batches, _reached(node, up=up))) for up in (True, False))


def _is_product_of_batches(node: Node) -> bool:
    operands = [fake_value(each) for each in node.all_input_nodes]
    ranks = [value.dim() for value in operands if isinstance(value, torch.Tensor)]
    trained = any(isinstance(value, torch.nn.Parameter) for value in operands)
    return kind(node) in _PRODUCTS and len(ranks) > 1 and min(ranks) > 2 and not trained


def _reached(node: Node, *, up: bool) -> list[Node]:
    """What is above or below a node through arithmetic of elements, views and copies, the next operators included."""
    found: list[Node] = []
    queue = [node]
    for item in queue:
        if item is node or kind(item) in _OF_ELEMENTS:
            near = item.all_input_nodes if up else item.users
            queue.extend(each for each in near if each not in queue)
        found.append(item)
        if len(queue) > _MOST_NEAR:
            break
    return found[1:]


def is_function(node: Node) -> bool:
    """Whether a node applies an `autograd.Function` of the program."""
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


def is_multi_head(node: Node) -> bool:
    """Whether a node is a call of `multi_head_attention_forward`."""
    return node.op == "call_function" and node.target is F.multi_head_attention_forward


def is_encoder_layer(node: Node) -> bool:
    """Whether a node is torch's operator for a whole layer of `nn.TransformerEncoder`."""
    return kind(node) == "_transformer_encoder_layer_fwd"


def changes_grad_mode(node: Node) -> bool:
    """Whether a node switches gradients or inference mode on or off for the nodes after it."""
    name = op_name(node)
    return node.op == "call_function" and ("grad_enabled" in name or "inference_mode" in name)


def active_dropout(node: Node) -> float | None:
    """The probability of a dropout that is switched on; None for other nodes.

    A probability that is no number between 0 and 1 counts as not known: NaN.
    """
    if kind(node) not in ("dropout", "dropout_"):
        return None
    probability, training = _argument(node, "p", 1, 0.5), _argument(node, "training", 2, True)
    probability = _argument(node, "p", 1, probability)
    if training is False or probability == 0:
        return None
    known = training is True and isinstance(probability, int | float) and 0 < probability < 1
    return float(probability) if known else float("nan")


def _argument(node: Node, name: str, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def mutates(node: Node) -> bool:
    """Whether a node may change one of its inputs or the state (grad mode, autocast) that other nodes run in."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    namespace, _, name = op_name(node).rpartition(".")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = namespace == "operator" and name in _IN_PLACE_OPERATORS
    state = name == "__setitem__" or any(word in name for word in _STATE)
    return in_place or operator or state or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def is_pure(node: Node) -> bool:
    """Whether a node may be erased once nobody uses it: it changes nothing, and draws no random numbers."""
    if node.op == "get_attr":
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target.name() == "flex_attention"  # the graphs that it calls compute a score, or whether it counts
    name = kind(node)
    if not name or mutates(node) or name.removesuffix("_like") in _RANDOM:
        return False
    return active_dropout(node) is None and not name.startswith(("_assert", "_check", "print"))


def is_shape_only(node: Node) -> bool:
    """Whether a node reads no element of its input, only its shape, dtype or device."""
    attribute = node.op == "call_function" and node.target is getattr
    if kind(node) in ("type_as", "view_as", "expand_as", "reshape_as", "to") and len(node.args) > 1:
        return False
    name = node.args[1:2][0] if attribute and len(node.args) == 2 else None
    return kind(node) in _SHAPE_ONLY or name in ("shape", "ndim", "dtype", "device")
