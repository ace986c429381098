"""Repairs of faults that torch has between Dynamo and its compilers, as passes.

A repair either writes a graph differently, or has something in force while autograd traces the graph
(`PassContext.while_traced`). It is skipped in releases of torch that do not need it, and it is run again alone where
another pass raised. Faults of Inductor, which sees no Dynamo graph, are repaired in `omnicomp._torch.repairs`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.nn import _reduction
from torch.utils._pytree import tree_leaves

from omnicomp._torch.repairs import first_call, kept_sizes, overlapping_tangents, returned_inputs, uint8_resize
from omnicomp._torch.repairs.needed import Needed
from omnicomp.analysis.nodes import all_nodes, fake_value, op_name
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.base import Pass, PassContext

_BUILTIN: Any = getattr(torch._C, "_nn")  # noqa: B009 - made at run time, and unknown to type checkers
_MULTILABEL: Final = (F.multilabel_margin_loss, _BUILTIN.multilabel_margin_loss)
_MULTICLASS: Final = (F.multi_margin_loss, _BUILTIN.multi_margin_loss)
_DROPOUTS: Final = (torch.nn.functional.dropout, torch.dropout, torch.ops.aten.dropout.default)
_CONTIGUOUS: Final = (
    "log_sigmoid",
    "logsigmoid",
    "angle",
    "take",
    "one_hot",
    "rrelu",
    "pow",
    "batch_norm",
)  # in eager, whatever the input
_COPIED: Final = ("stack_trace", "nn_module_stack", "source_fn_stack", "example_value")


@dataclasses.dataclass(frozen=True)
class Repair(Pass):
    """A pass that works around a fault of torch."""

    needed: ClassVar[Needed]  # the releases that have the fault
    checked: ClassVar[bool] = False
    told: ClassVar[bool] = False

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether this torch has the fault, and the graph meets it."""
        return self.needed.here and self.meets(module, context)

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph meets the fault."""
        raise NotImplementedError


class RepairLosses(Repair):
    """Replaces losses that torch decomposes wrongly.

    `multilabel_margin_loss` counts what comes after a -1 in the labels, and gives the loss of a single sample one
    dimension where eager gives it none. `multi_margin_loss` does the latter alone.
    """

    name: ClassVar[str] = "repair_losses"
    needed: ClassVar[Needed] = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/141017")

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has one of the losses."""
        return any(_is_wrong_loss(node) for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Replace the losses."""
        for node in list(filter(_is_wrong_loss, module.graph.nodes)):
            context.count(self.name)
            if node.target in _MULTILABEL:
                if node.target is not F.multilabel_margin_loss:
                    node.args, node.kwargs = _with_names(node)
                node.target = multilabel_margin_loss
                continue
            with node.graph.inserting_after(node):
                scalar = _like(node, node.graph.call_method("reshape", (node, ())))
            node.replace_all_uses_with(scalar, delete_user_cb=lambda user, scalar=scalar: user is not scalar)
        return PassResult(module, True)


def _is_wrong_loss(node: Node) -> bool:
    if node.op != "call_function":
        return False
    return node.target in _MULTILABEL or (node.target in _MULTICLASS and _dimensions_of_target(node) == 0)


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`torch.nn.functional.multilabel_margin_loss`, made of operators that are decomposed rightly.

    Of each sample, sum(max(0, 1 - x[label] + x[i]) over labels and over i that is no label) / x.size(0), where the
    labels end at the first -1.

    Args:
        input: floating point, (C) or (N, C); without dimensions it is one class.
        target: int64, the shape of `input`.
        size_average: deprecated by torch, which still takes it; see `reduction`.
        reduce: the same.
        reduction: `none`, `mean` or `sum`.

    Returns:
        No dimensions, or (N) with `reduction="none"` and (N, C).
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    valid = (labels == -1).cumsum(-1) == 0
    classes = torch.arange(x.shape[-1], device=x.device)
    is_label = (torch.where(valid, labels, -1).unsqueeze(-1) == classes).any(1)
    of_labels = x.gather(1, torch.where(valid, labels, 0))
    # relu has no gradient where a margin is met exactly, as torch's kernel.
    margins = (1 - of_labels.unsqueeze(2) + x.unsqueeze(1)).relu()
    counted = valid.unsqueeze(2) & ~is_label.unsqueeze(1)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / x.shape[-1]
    losses = losses.reshape(target.shape[:-1])
    return {"none": losses.clone, "mean": losses.mean, "sum": losses.sum}[reduction]()


def _with_names(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the builtin, which takes a number for the reduction, as those of the function."""
    given: dict[str, Any] = dict(zip(("input", "target", "reduction"), node.args, strict=False)) | dict(node.kwargs)
    given["input"] = given.pop("self", given.get("input"))
    given["reduction"] = ("none", "mean", "sum")[int(given.get("reduction", 1))]
    return (), given


def _dimensions_of_target(node: Node) -> int:
    target = node.kwargs.get("target", node.args[1] if len(node.args) > 1 else None)
    value = fake_value(target) if isinstance(target, Node) else None
    return value.ndim if isinstance(value, Tensor) else -1


class RepairOut(Repair):
    """Writes results by a copy where AOTAutograd does not write them.

    `torch.compile(lambda x, y: torch.linalg.matrix_rank(x, out=y), backend="aot_eager")` leaves `y` as it was. That `y`
    has the result's shape is known: Dynamo breaks the graph where an `out` would be resized. `x.polygamma_(1)` is
    refused, with the whole graph.
    """

    name: ClassVar[str] = "repair_out"
    needed: ClassVar[Needed] = Needed(first="2.11")

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has such an operator."""
        return any(_written_by(node) is not None for node in module.graph.nodes)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Write the results by copies."""
        for node in list(module.graph.nodes):
            out = _written_by(node)
            if out is None:
                continue
            context.count(self.name)
            target, args = node.target, node.args
            with node.graph.inserting_before(node):
                if target == "polygamma_":
                    # The gradient is that of what is overwritten.
                    target = "polygamma"
                    args = (_like(node, node.graph.call_method("clone", (out,))), *args[1:])
                others = {name: value for name, value in node.kwargs.items() if name != "out"}
                result = _like(node, node.graph.create_node(node.op, target, args, others))
                written = _like(node, node.graph.call_method("copy_", (out, result)))
            node.replace_all_uses_with(written)
            node.graph.erase_node(node)
        return PassResult(module, True)


def _written_by(node: Node) -> Node | None:
    """What an operator writes its result to, of those that do not do so in a compiled graph."""
    if node.op == "call_method" and node.target == "polygamma_":
        out: Any = node.args[0]
    else:
        name = kind(node) or op_name(node).rpartition(".")[2]
        out = node.kwargs.get("out") if name == "linalg_matrix_rank" else None
    return out if isinstance(out, Node) else None


class RepairDropout(Repair):
    """Replaces dropout that drops nothing by its input.

    Eager returns the input itself. AOTAutograd's decomposition returns a copy, so that what is written to the result
    afterwards would not reach the input. Graphs that higher-order operators call are left alone, as some of these
    operators forbid that a result is an input.
    """

    name: ClassVar[str] = "repair_dropout"
    needed: ClassVar[Needed] = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/issues/115249")

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph itself has such a dropout."""
        return context.root is module and any(map(_drops_nothing, module.graph.nodes))

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Take the dropouts away."""
        for node in list(filter(_drops_nothing, module.graph.nodes)):
            context.count(self.name)
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        return PassResult(module, True)


def _drops_nothing(node: Node) -> bool:
    """Whether it is dropout out of place, of its first argument, with no probability or not in training."""
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return False
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    share, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    return bool(node.args) and not given.get("inplace") and (training is False or (type(share) is float and share == 0))


class RepairStrides(Repair):
    """Makes results contiguous that eager makes contiguous, where torch's decompositions keep the strides of the input.

    `torch.compile(F.logsigmoid)(x.mT)` has the strides of its input, and a `view` of it, which eager allows, raises.
    Nothing is copied where the result is contiguous anyway. Batch normalisation is repaired on the CPU, where eager
    keeps no strides but those of channels that are last.
    """

    name: ClassVar[str] = "repair_strides"
    needed: ClassVar[Needed] = Needed(first="2.11")

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether there is such a result of an input that is not contiguous."""
        return any(map(_loses_contiguity, module.graph.nodes))

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Add a `contiguous()` behind each."""
        for node in list(filter(_loses_contiguity, module.graph.nodes)):
            context.count(self.name)
            with module.graph.inserting_after(node):
                result = module.graph.call_method("contiguous", (node,))
            node.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)
            result.meta.update({key: node.meta[key] for key in _COPIED if key in node.meta})
        return PassResult(module, True)


def _loses_contiguity(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or op_name(node).rpartition(".")[2] not in _CONTIGUOUS:
        return False
    if any(user.op == "call_method" and user.target == "contiguous" for user in node.users) or "out" in node.kwargs:
        return False
    value = fake_value(node.all_input_nodes[0]) if node.all_input_nodes else None
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    if op_name(node).endswith("angle") and not value.is_complex():
        return False
    if op_name(node).endswith("pow") and (node.op == "call_method" or isinstance(node.args[0], Node)):
        return False  # only of a number as the base
    if op_name(node).endswith("batch_norm") and (value.device.type != "cpu" or _may_have_channels_last(value)):
        return False
    if op_name(node).endswith("rrelu") and (node.kwargs.get("inplace") or node.args[4:5] == (True,)):
        return False
    # A question about symbols would be a guard.
    return any(type(number) is not int for number in (*value.shape, *value.stride())) or not value.is_contiguous()


def _may_have_channels_last(value: Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    if last is None:
        return False
    known = all(type(number) is int for number in (*value.shape, *value.stride()))
    return not known or value.is_contiguous(memory_format=last) or suggest_memory_format(value) is last


class RepairAssertions(Repair):
    """Gives a message to assertions of tensors that have none.

    Autograd's dead code elimination knows `aten._assert_async.msg` as impure, and drops `aten._assert_async`:
    `torch.compile(lambda x: (torch._assert_async((x > 0).all()), x + 1)[1], backend="aot_eager")` raises for no `x`.
    """

    name: ClassVar[str] = "repair_assertions"
    needed: ClassVar[Needed] = Needed(first="2.11")

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether there is an assertion without a message."""
        return any(map(_is_silent_assertion, module.graph.nodes))

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Give them the message that eager's operator has."""
        for node in filter(_is_silent_assertion, module.graph.nodes):
            context.count(self.name)
            node.args = (*node.args, "Expected Tensor with single nonzero value, but got zero")
            if node.target is torch.ops.aten._assert_async.default:
                node.target = torch.ops.aten._assert_async.msg
        return PassResult(module, True)


def _is_silent_assertion(node: Node) -> bool:
    targets = (torch._assert_async, torch.ops.aten._assert_async, torch.ops.aten._assert_async.default)
    return node.op == "call_function" and node.target in targets and len(node.args) + len(node.kwargs) == 1


class _WhileTraced(Repair):
    """A repair that is in force while autograd traces the graph."""

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        """Whether this torch has the fault, and the graph or one inside it meets it."""
        return context.root is module and super().applies(module, context)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Put the repair in force later."""
        context.count(self.name)
        context.while_traced(self.in_force)
        return PassResult(module, False)

    def in_force(self) -> Any:
        """A context manager."""
        raise NotImplementedError


class RepairTangents(_WhileTraced):
    """Expects contiguous gradients of results whose positions share memory."""

    name: ClassVar[str] = "repair_tangents"
    needed: ClassVar[Needed] = overlapping_tangents.NEEDED

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph is differentiated, and has a tensor whose positions may share memory."""
        return context.training and any(_may_overlap(value) for value in _tensors(module))

    def in_force(self) -> Any:
        """A context manager."""
        return overlapping_tangents.tangents_without_overlap()


def _may_overlap(value: Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    sizes, strides = tuple(value.shape), value.stride()
    known = all(type(number) is int for number in (*sizes, *strides))  # a comparison of symbols would be a guard
    return not known or overlapping_tangents.may_overlap(sizes, strides)


class RepairReturnedInputs(_WhileTraced):
    """Returns inputs that are written to in the places of the outputs that they are.

    Where `w` needs gradients, the first result of
    `torch.compile(lambda w, x, b: (w.detach().mul_(2), x.sin(), b.add_(1))[1:], backend="aot_eager")` is `b`.
    """

    name: ClassVar[str] = "repair_returned_inputs"
    needed: ClassVar[Needed] = returned_inputs.NEEDED

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph is differentiated, and returns what it may have written to."""
        return context.training and any(_written_to(node) for node in module.graph.output_node().all_input_nodes)

    def in_force(self) -> Any:
        """A context manager."""
        return returned_inputs.returned_in_their_places()


def _written_to(node: Node) -> bool:
    name = op_name(node)
    return node.op == "placeholder" or name.endswith("_") or name.startswith("operator.i")


class RepairUint8Resize(_WhileTraced):
    """Resizes images of bytes on CPUs by the kernel that eager calls."""

    name: ClassVar[str] = "repair_uint8_resize"
    needed: ClassVar[Needed] = uint8_resize.NEEDED

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph resizes bytes."""
        return any(value.dtype is torch.uint8 and value.device.type == "cpu" for value in _resized(module))

    def in_force(self) -> Any:
        """A context manager."""
        return uint8_resize.bytes_resized_by_kernels()


class RepairKeptSizes(_WhileTraced):
    """Resizes images as eager does where a factor leaves a size as it is, or doubles it."""

    name: ClassVar[str] = "repair_kept_sizes"
    needed: ClassVar[Needed] = kept_sizes.NEEDED

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph resizes anything on a device whose kernels are known."""
        return any(value.device.type in kept_sizes.DEVICES for value in _resized(module))

    def in_force(self) -> Any:
        """A context manager."""
        return kept_sizes.sizes_kept()


def _resized(module: GraphModule) -> Iterator[Tensor]:
    """The images that a graph resizes."""
    for node in all_nodes(module):
        if node.op == "call_function" and any(word in op_name(node) for word in ("interpolate", "upsample")):
            operands = (fake_value(operand) for operand in node.all_input_nodes)
            yield from (v for v in operands if isinstance(v, Tensor))


class RepairFirstCall(_WhileTraced):
    """Makes the first call of a graph without the dispatch mode under which conjugations get lost.

    It is in force without complex numbers, too: the mode reads `.data` of each tensor, after which what was built of a
    parameter could not be trusted to hold any more, and it makes the first call slower.
    """

    name: ClassVar[str] = "repair_first_call"
    needed: ClassVar[Needed] = first_call.NEEDED

    def meets(self, module: GraphModule, context: PassContext) -> bool:
        """Whether the graph has no operators that the dispatch mode is for."""
        return not first_call.has_custom_operators(module)

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        """Put the repair in force later; it is counted where it changes values."""
        if any(value.is_complex() for value in _tensors(module)):
            context.count(self.name)
        context.while_traced(self.in_force)
        return PassResult(module, False)

    def in_force(self) -> Any:
        """A context manager."""
        return first_call.unobserved_first_call()


def _tensors(module: GraphModule) -> Sequence[Tensor]:
    values = (leaf for node in all_nodes(module) for leaf in tree_leaves(fake_value(node)))
    return [value for value in values if isinstance(value, Tensor)]


def _like(node: Node, new: Node) -> Node:
    """A new node with the value, the line and the module of another one."""
    new.meta.update({key: node.meta[key] for key in _COPIED if key in node.meta})
    return new
