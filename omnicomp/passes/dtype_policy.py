"""The option `dtype_policy`: matrix work in bfloat16 or float16, everything else in float32 as before.

Lowered are linear layers, matrix products, convolutions and attention whose floating operands are all float32. Softmax,
norms, losses, reductions, pointwise arithmetic and residual streams stay in float32, and so do the graph's outputs,
whatever the graph mutates, parameters and their gradients. float64, half precision that is there already, integers and
complex numbers are left alone.

A lowered operator leaves two values: what it computed, and that cast back to float32, which takes the place of the old
one. Later lowered operators read the first, also through views of it, all others the second; one that nobody reads goes
away. A value is therefore never cast back and forth between two lowered operators.

A user should know that a result above 65504 becomes infinite in float16, and that small gradients vanish in it, as they
do under `torch.autocast`: train with a gradient scaler. On an accelerator, a row that a float attention mask masks
throughout with a finite number attends to everything in float16, as -65504 does not swallow the scores: use a boolean
mask.
"""

import itertools
import math
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dtypes import storage_key, was_written
from omnicomp.graphs import evaluate, fake_value, insert_call, op_name
from omnicomp.passes.base import PassContext
from omnicomp.timeline import Reason

__all__ = ["DTYPES", "DtypePolicy"]

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

_PRODUCTS: Final = frozenset("linear matmul mm bmm mv addmm addmv addbmm baddbmm einsum".split())
_CONVOLUTIONS: Final = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_ATTENTION: Final = "scaled_dot_product_attention"
_LOWERED: Final = _PRODUCTS | _CONVOLUTIONS | {_ATTENTION}

# Views of every element, or of more: worth doing after a cast rather than before it, so that the cast is shared and
# an expanded tensor is cast before it is expanded.
_VIEWS: Final = frozenset(
    "view reshape transpose permute t T mT swapaxes swapdims movedim expand unsqueeze squeeze flatten unflatten".split()
)
# What else gives the same bits before a cast to float32 as after it. Rounding pointwise functions (gelu, add, mul) are
# not here: in half precision each would round once more, and the residual stream goes through them.
_EXACT: Final = _VIEWS | frozenset(
    "getitem chunk split split_with_sizes unbind narrow select contiguous clone detach repeat relu neg dropout".split()
)
# Matrix work and much else in one call, which stays in float32 as a whole.
_BUNDLES: Final = frozenset(
    "multi_head_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd bilinear lstm gru "
    "lstm_cell gru_cell rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell".split()
)
_MODULES: Final = frozenset(
    ("", "torch", "torch.functional", "torch.nn.functional", "Tensor", "operator", "builtins")
)  # of the targets that the names above mean; `op_name` writes torch._C._nn as torch.nn.functional

_CAST: Final = torch.ops.aten.to.dtype  # an OpOverload: differentiable, and known to AOTAutograd's cache as safe
# Devices whose attention kernels take a float32 mask with half-precision operands: a bias in it keeps all its bits.
# Not CUDA: cuDNN's kernel takes one and reads it wrongly (seen with torch 2.11 on Hopper).
_WIDE_MASKS: Final = frozenset(("cpu",))
_WIDE_INTEGERS: Final = frozenset((torch.int16, torch.int32, torch.int64))


class DtypePolicy:
    """Run matrix work in the dtype of the option `dtype_policy`."""

    name = "dtype_policy"

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the user asked for a dtype and the graph has an operator to lower."""
        asked = context.policy.dtype_policy in DTYPES
        return asked and any(_is_candidate(node, context.device.type) for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Lower the operators of one region."""
        dtype = DTYPES[context.policy.dtype_policy]
        candidates = [node for node in module.graph.nodes if _is_candidate(node, context.device.type)]
        reason = _refusal(dtype, context)
        if reason is not None:
            context.near_miss(self.name, "dtype", candidates[0], reason)
            return PassResult(module, False)
        rewriting = _Rewriting(module, dtype, context.device.type)
        slow = dtype not in context.device.capabilities().fast_dtypes
        told: set[Node] = set()
        modified = False
        for node in candidates:
            entered = rewriting.entered.get(node)
            if entered is not None:
                reason = _AUTOCAST if "autocast" in entered.name else _FUNCTORCH
            else:
                reason = _BUNDLE if _kind(node) in _BUNDLES else _exactness(node)
            if reason is not None:
                if entered is None or entered not in told:
                    context.near_miss(self.name, "dtype", node, reason)
                    told.add(entered or node)
                continue
            detail = f"{_kind(node)} float32 -> {_short(dtype)}"
            if slow:
                detail += "; this device is not faster in it than in float32"
            context.rewrite(self.name, "dtype", node, target=_short(dtype), detail=detail)
            rewriting.lower(node)
            modified = True
        rewriting.clean()
        return PassResult(module, modified)


class _Rewriting:
    """The state of one region's rewrite: which values exist in the low dtype, and what must not be shared.

    Attributes:
        entered: for a node inside `torch.autocast` or a functorch transform, the node that enters the outermost one.
    """

    def __init__(self, module: GraphModule, dtype: torch.dtype, device: str) -> None:
        self.graph = module.graph
        self.dtype = dtype
        self.device = device
        self.entered: dict[Node, Node] = {}
        # A number for the state of grad mode, autocast and such that a node runs under.
        self.scope: dict[Node, int] = {}
        self.results: dict[Node, Node] = {}  # float32 value -> the lowered result, or a view of it, that it comes from
        self.casts: dict[tuple[Node, bool], Node] = {}  # float32 value, is it a mask -> its cast in the current scope
        self.current = 0
        self.changed = _changed_storages(module)
        self.written: set[Node] = set()
        self.orphans: dict[Node, None] = {}  # nodes that may have lost their users
        self._read_scopes()

    def lower(self, node: Node) -> None:
        """Replace `node` by the same operator in the low dtype and a cast back."""
        if self.scope[node] != self.current:
            # A cast made under no_grad carries no gradient for a user outside, and the other way round.
            self.current = self.scope[node]
            self.casts.clear()
        mask = _mask(node)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda value: self._low(value, node, value is mask))
        low = self._copy(node, args, kwargs, before=node)
        wide = insert_call(node, _CAST, (low, torch.float32))
        if self._is_changed(node):
            self.written.add(wide)
        else:
            self.results[wide] = low
        self.orphans[wide] = None
        self.orphans.update(dict.fromkeys(node.all_input_nodes))
        node.replace_all_uses_with(wide)
        self.graph.erase_node(node)

    def clean(self) -> None:
        """Erase the nodes that lost all users, and what only they used."""
        while self.orphans:
            node, _ = self.orphans.popitem()
            if not node.users and (node in self.results or _source(node) is not None):
                self.orphans.update(dict.fromkeys(node.all_input_nodes))
                self.orphans.pop(node, None)
                self.graph.erase_node(node)

    def _low(self, value: Node, user: Node, mask: bool) -> Node:
        """The low-precision form of a float32 operand of `user`; other operands as they are."""
        fake = fake_value(value)
        if not (isinstance(fake, torch.Tensor) and fake.dtype is torch.float32):
            return value
        if mask and self.device in _WIDE_MASKS:
            return value
        result = self._result(value)
        if result is not None:
            return result
        if self._is_changed(value):
            # What was cast for one user may be stale for the next.
            return self._cast(value, user, mask)
        if _kind(value) in ("float", "to") and self.scope.get(value) == self.current:
            before = value.args[0]
            if isinstance(before, Node) and fake_value(before).dtype is self.dtype and not self._is_changed(before):
                return before
        known = self.casts.get((value, mask))
        if known is not None:
            return known
        source = _source(value, _VIEWS)
        if source is not None and not self._is_changed(source) and self.scope.get(value) == self.current:
            low = self._copy(value, (self._low(source, user, mask), *value.args[1:]), value.kwargs, before=user)
            self.orphans[value] = None
        else:
            # Before the first user, which dominates the later ones; at the graph's start, all weights of a model would
            # be held in two dtypes at once.
            low = self._cast(value, user, mask)
        self.casts[value, mask] = low
        return low

    def _result(self, value: Node) -> Node | None:
        """The lowered result that `value` is, or is an exact function of, without a cast."""
        if value in self.results:
            return self.results[value]
        source = _source(value)
        if source is None or self._is_changed(value):
            return None
        low_source = self._result(source)
        if low_source is None:
            return None
        low = self._copy(value, (low_source, *value.args[1:]), value.kwargs, before=value)
        self.results[value] = low
        self.orphans[value] = None
        return low

    def _cast(self, value: Node, user: Node, mask: bool) -> Node:
        if mask:
            # float32's smallest number would become -inf, and a row of nothing else NaN or zero instead of uniform. A
            # real -inf stays one.
            clamped = insert_call(user, torch.ops.aten.clamp.default, (value, torch.finfo(self.dtype).min))
            infinite = insert_call(user, torch.ops.aten.eq.Scalar, (value, -math.inf))
            value = insert_call(user, torch.ops.aten.masked_fill.Scalar, (clamped, infinite, -math.inf))
        return insert_call(user, _CAST, (value, self.dtype))

    def _copy(self, node: Node, args: Any, kwargs: Any, *, before: Node) -> Node:
        """The call of `node` with other arguments, its fake value computed from theirs."""
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        value = evaluate(target, args, kwargs)
        with self.graph.inserting_before(before):
            copy = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_{_short(self.dtype)}")
        copy.meta = {**node.meta, "example_value": value}
        return copy

    def _is_changed(self, node: Node) -> bool:
        """Whether the graph changes the value, or a view of it, in place."""
        return node in self.written or not self.changed.isdisjoint(_storages(node))

    def _read_scopes(self) -> None:
        opened: list[Node] = []
        number = 0
        for node in self.graph.nodes:
            name = op_name(node).rpartition(".")[2] if node.op == "call_function" else ""
            if name == "_enter_autocast" or name.endswith("_increment_nesting"):
                opened.append(node)
            elif opened and (name == "_exit_autocast" or name.endswith("_decrement_nesting")):
                opened.pop()
            # _set_grad_enabled, _enter_inference_mode, …: a call for its effect alone, on no tensor, and no assertion.
            if name and fake_value(node) is None and not any(map(_tensors, node.all_input_nodes)):
                number += not name.startswith(("_check", "_assert"))
            self.scope[node] = number
            if opened:
                self.entered[node] = opened[0]


def _is_candidate(node: Node, device: str) -> bool:
    """Whether the node is matrix work on the device in float32, operands and result."""
    if _kind(node) not in _LOWERED | _BUNDLES or not node.kwargs.keys().isdisjoint(("out", "out_dtype")):
        return False
    operands = [fake_value(operand) for operand in node.all_input_nodes]
    if any(operand is None for operand in operands):
        return False
    computed = [v for v in operands if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())]
    results = _tensors(node)  # of another dtype than the operands under autocast
    return (
        bool(computed and results)
        and all(v.dtype is torch.float32 and v.layout is torch.strided for v in (*results, *computed))
        and all(v.device.type == device for v in (*results, *computed))
        and _multiplies(node)
    )


def _multiplies(node: Node) -> bool:
    """Whether products are summed up, for an einsum: a transposition or an outer product has nothing to gain."""
    if _kind(node) != "einsum":
        return True
    equation = node.args[0]
    if not isinstance(equation, str) or "," not in equation:
        return False
    inputs, arrow, output = equation.partition("->")
    return not arrow or bool(set(inputs) - set(output) - set(" ,."))


def _kind(node: Node) -> str:
    """The bare name of a torch function or method, for example `matmul` for `a @ b`; empty for others."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else ""
    module, _, name = op_name(node).rpartition(".")
    if module not in _MODULES:
        return ""
    if name == "getattr":
        return str(node.args[1])
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _mask(node: Node) -> Any:
    if _kind(node) != _ATTENTION:
        return None
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")


def _source(node: Node, names: frozenset[str] = _EXACT) -> Node | None:
    """The operand of an operator of `names` that reads one float32 value and gives float32."""
    kind = _kind(node)
    if kind not in names or not node.args or not isinstance(node.args[0], Node):
        return None
    others = tree_leaves((node.args[1:], dict(node.kwargs)))
    if any(isinstance(v, torch.dtype) or isinstance(fake_value(v), torch.Tensor) for v in others):
        return None  # view(dtype), or an index that is data
    if kind == "dropout" and False not in (*node.args[2:3], *map(node.kwargs.get, ("training", "train"))):
        return None
    values = [*_tensors(node), *_tensors(node.args[0])]
    return node.args[0] if values and all(v.dtype is torch.float32 for v in values) else None


def _tensors(node: Node) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]


def _storages(node: Node) -> set[int]:
    """The identities of the fake storages of a node's value: views share them."""
    return {key for key in map(storage_key, _tensors(node)) if key is not None}


def _changed_storages(module: GraphModule) -> set[int]:
    """Storages that the graph writes to."""
    changed: set[int] = set()
    for node in module.graph.nodes:
        if any(map(was_written, _tensors(node))):
            changed |= _storages(node)
    # Dropout outside of training returns its operand itself, which its fake implementation doesn't tell.
    aliases = [n for n in module.graph.nodes if "dropout" in op_name(n) and n.args and isinstance(n.args[0], Node)]
    for node in itertools.chain(aliases, reversed(aliases)):
        both = _storages(node) | _storages(node.args[0])
        if not changed.isdisjoint(both):
            changed |= both
    return changed


def _refusal(dtype: torch.dtype, context: PassContext) -> Reason | None:
    """Why nothing of the region may be lowered."""
    known = context.device.capabilities().compute_dtypes
    if dtype not in known:
        return Reason(
            code="option_ineffective",
            sentence=f"the {context.device.type} device can't compute in the dtype that dtype_policy asks for",
            by=DtypePolicy.name,
            observed=f"dtype={_short(dtype)}",
            needed=f"one of {', '.join(map(_short, known))}",
            lever='choose dtype_policy="keep", or a dtype that the device has',
        )
    return _AUTOCAST if torch.is_autocast_enabled(context.device.type) else None


_AUTOCAST: Final = Reason(
    code="option_ineffective",
    sentence="torch.autocast is in force here, and its dtypes are kept",
    by=DtypePolicy.name,
    observed="inside torch.autocast",
    needed="outside of torch.autocast",
    lever="remove torch.autocast where dtype_policy is to decide",
)
_FUNCTORCH: Final = Reason(
    code="match_ended",
    sentence="the operator is inside a transform of torch.func",
    by=DtypePolicy.name,
    needed="outside of torch.func",
    lever="apply dtypes inside the function that torch.func transforms",
)

_BUNDLE: Final = Reason(
    code="unsupported_op",
    sentence="the operator does softmax or gates together with its matrix work, and stays in float32 as a whole",
    by=DtypePolicy.name,
    needed="separate linear, matmul and attention operators",
    lever="write the layer with torch.nn.Linear and scaled_dot_product_attention",
)


def _exactness(node: Node) -> Reason | None:
    """Why the operator needs float32: it computes angles, such as the positions times frequencies of RoPE.

    A half-precision number has 8 or 11 bits: a position of some thousands, or an angle of some thousand radians, would
    be off by whole turns.
    """
    cause = next(filter(None, map(_integers, node.all_input_nodes)), None) or _angle(node)
    if cause is None:
        return None
    return Reason(
        code="not_equal",
        sentence="the operator multiplies integers or computes an angle, which half precision can't hold",
        by=DtypePolicy.name,
        node=f"{cause.name} ({op_name(cause)})",
        cause=cause.name,
        needed="operands that are no integers, and no sine or cosine of the result",
    )


def _integers(value: Node) -> Node | None:
    """The conversion of integers to float32 that an operand comes from."""
    source = _source(value)
    while source is not None:
        value, source = source, _source(source)
    operands = [leaf for node in value.all_input_nodes for leaf in _tensors(node)]
    converted = bool(operands) and value.op.startswith("call_") and all(v.dtype in _WIDE_INTEGERS for v in operands)
    return value if converted or _kind(value) == "arange" else None


def _angle(node: Node) -> Node | None:
    """The sine or cosine that reads a result, also scaled by a number."""
    seen: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        value = open_nodes.pop()
        for user in value.users:
            kind = _kind(user)
            if kind in ("sin", "cos", "polar"):
                return user
            scaled = kind in ("mul", "div", "truediv") and len(user.all_input_nodes) == 1
            if user not in seen and (scaled or kind in ("cat", "concat") or _source(user) is not None):
                seen.add(user)
                open_nodes.append(user)
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
