"""Copies of convolutions' weights in the layout that a GPU's kernels read them in, with the channels innermost.

Inductor computes convolutions in that layout and converts their weights in each call, by the kernel that also casts
them. A copy that is cast already, but laid out as the parameter is, would leave a kernel for the layout alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.dtypes import storage_key
from omnicomp._torch.parameters import describes_parameter, make_static, static_dynamo_input
from omnicomp.analysis.nodes import evaluate, fake_value, op_name
from omnicomp.passes.dtypes.analysis import changed_storages, storages
from omnicomp.passes.dtypes.fp8 import Scaled, read_scaled
from omnicomp.passes.dtypes.operators import is_cast, kind
from omnicomp.weights.cast_copies import CAST, FLOAT8, Form


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


_LOW: Final = (torch.bfloat16, torch.float16)


@records.dataclass(frozen=True, kw_only=True)
class Lifted:
    """A graph that gets copies of parameters as inputs."""

    inputs: list[Any]
    sources: tuple[int, ...]
    forms: tuple[Form, ...]
    devices: tuple[torch.device, ...]
    order: tuple[int, ...]


@records.dataclass(frozen=True, kw_only=True)
class _Cast:
    """A cast of a placeholder, and the views between the two, from the placeholder on."""

    node: Node
    parameter: Node
    views: tuple[Node, ...]


def lift_casts(module: GraphModule, inputs: Sequence[Any], *, layouts: bool = False) -> Lifted | None:
    """Let the casts of parameters leave an inference graph.

    Args:
        module: a Dynamo graph behind the passes, which is changed in place.
        inputs: real or fake tensors and symbolic sizes, one a placeholder.
        layouts: whether a compiler reads the copies that chooses layouts itself, as Inductor does: then weights of
            convolutions on a GPU get the one that it would choose.

    Returns:
        What the graph is to be called with; None if it was left as it is.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    kept = _lift_scaled(module)
    taken: list[tuple[Node, torch.dtype, list[_Cast]]] = []
    for parameter, found in _candidates(module).items():
        for dtype in dict.fromkeys(fake_value(cast.node).dtype for cast in found):
            same = [cast for cast in found if fake_value(cast.node).dtype is dtype]
            # A copy of all of it for the sake of a part would cost more than it saves.
            if sum(fake_value(cast.node).numel() for cast in same) >= fake_value(parameter).numel():
                taken.append((parameter, dtype, same))
    for parameter, dtype, same in taken:
        if layouts and _channels_last(parameter, same):
            form = Form(dtype, layout=torch.channels_last)
            copy = _placeholder(parameter, form)
            for cast in same:
                read_channels_last(cast.node, copy)
                module.graph.erase_node(cast.node)
        else:
            form = Form(dtype)
            copy = _exchange(parameter, dtype, same)
        if copy is not None:
            kept.append((parameter, copy, form))
    if not kept:
        return None
    for parameter in {parameter: None for parameter, _, _ in kept}:
        if not parameter.users:
            module.graph.erase_node(parameter)
    module.graph.lint()
    module.recompile()
    position = {node: index for index, node in enumerate(placeholders)}
    position |= {copy: len(placeholders) + index for index, (_, copy, _) in enumerate(kept)}
    order = tuple(position[node] for node in module.graph.find_nodes(op="placeholder"))
    values = [*inputs, *(fake_value(copy) for _, copy, _ in kept)]
    return Lifted(
        inputs=[values[index] for index in order],
        sources=tuple(position[parameter] for parameter, _, _ in kept),
        forms=tuple(form for _, _, form in kept),
        devices=tuple(fake_value(copy).device for _, copy, _ in kept),
        order=order,
    )


class _Followed:
    """Which parameters can be followed: those that the graph neither writes to nor differentiates by."""

    def __init__(self, module: GraphModule) -> None:
        self.changed = changed_storages(module)
        output = next(iter(reversed(module.graph.nodes)))
        self.leaving = {key for leaf in tree_leaves(output.args) if isinstance(leaf, Node) for key in storages(leaf)}
        self.differentiates = any(map(_enables_grad, module.graph.nodes))

    def parameter(self, node: Node) -> bool:
        """Whether a node is a parameter of float32 that can be followed."""
        fake = fake_value(node)
        return (
            static_dynamo_input(node)
            and describes_parameter(fake)
            and fake.dtype is torch.float32
            and not (self.differentiates and fake.requires_grad)
            and storages(node).isdisjoint(self.changed)
        )

    def result(self, node: Node) -> bool:
        """Whether nobody but the graph sees what was made of a parameter, and it stays as it was made."""
        return storages(node).isdisjoint(self.changed) and storages(node).isdisjoint(self.leaving)


def _candidates(module: GraphModule) -> dict[Node, list[_Cast]]:
    """The casts that might leave, by parameter."""
    followed = _Followed(module)
    found: dict[Node, list[_Cast]] = {}
    for node in module.graph.nodes:
        value = fake_value(node)
        if not is_cast(node) or not isinstance(value, torch.Tensor) or value.dtype not in _LOW:
            continue
        cast = _read(node) if followed.result(node) else None
        if cast is not None and followed.parameter(cast.parameter):
            found.setdefault(cast.parameter, []).append(cast)
    return found


def _lift_scaled(module: GraphModule) -> list[tuple[Node, Node, Form]]:
    """Let the numbers and scales of parameters in float8 become inputs of the graph.

    Returns:
        Each new placeholder, after its parameter and before its form.
    """
    found: list[tuple[Node, Scaled]] = []
    followed = _Followed(module)
    for node in module.graph.nodes:
        value = fake_value(node)
        if node.target is not CAST or not isinstance(value, torch.Tensor) or value.dtype is not FLOAT8:
            continue
        read = read_scaled(node)
        cast = None if read is None else _read(read.value)
        if read is None or cast is None or cast.views or fake_value(cast.node).dtype is not torch.bfloat16:
            continue
        if followed.parameter(cast.parameter) and followed.result(read.numbers) and followed.result(read.scale):
            found.append((cast.parameter, read))
    made: dict[tuple[Node, Form], Node] = {}
    for parameter, read in found:
        scales = "row" if read.rows else "tensor"
        parts = {Form(FLOAT8, scales): read.numbers, Form(torch.float32, scales): read.scale}
        if all(form.fits(fake_value(node), fake_value(parameter)) for form, node in parts.items()):
            for form, node in parts.items():
                if (parameter, form) not in made:
                    made[parameter, form] = _placeholder(parameter, form)
                node.replace_all_uses_with(made[parameter, form])
            for node in (*reversed(read.steps), read.value):
                if not node.users:
                    module.graph.erase_node(node)
    return [(parameter, copy, form) for (parameter, form), copy in made.items()]


def _enables_grad(node: Node) -> bool:
    return op_name(node).endswith("_set_grad_enabled") and True in node.args


def _read(node: Node) -> _Cast | None:
    """A cast and the views before it, if it casts a placeholder or a view of one and does nothing else."""
    if not node.args or not isinstance(node.args[0], Node) or len(node.all_input_nodes) != 1:
        return None
    value, operand = fake_value(node), node.args[0]
    start = fake_value(operand)
    if not isinstance(start, torch.Tensor) or (value.shape, value.device) != (start.shape, start.device):
        return None
    views: list[Node] = []
    while operand.op != "placeholder":
        views.append(operand)
        before = operand.args[0] if operand.args else None
        if not isinstance(before, Node) or operand.all_input_nodes != [before] or not _is_view(operand, before):
            return None
        operand = before
    return _Cast(node=node, parameter=operand, views=tuple(reversed(views)))


def _is_view(node: Node, operand: Node) -> bool:
    """Whether a node gives nothing but tensors in the memory of its operand, in the dtype that this has."""
    leaves = tree_leaves((node.args, dict(node.kwargs)))
    if not node.op.startswith("call_") or (any(isinstance(v, torch.dtype) for v in leaves) and not is_cast(node)):
        return False  # view(dtype) reads other bits of the copy
    results = [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]
    operands = [leaf for leaf in tree_leaves(fake_value(operand)) if isinstance(leaf, torch.Tensor)]
    keys = {storage_key(value) for value in operands}
    return (
        bool(results and operands)
        and len(keys) == 1
        and None not in keys
        and all(storage_key(value) in keys and value.dtype is operands[0].dtype for value in results)
    )


def _channels_last(parameter: Node, casts: Sequence[_Cast]) -> bool:
    """Whether the copy of a parameter is best laid out with the channels innermost."""
    on_gpu = fake_value(parameter).device.type == "cuda"
    return on_gpu and not any(cast.views for cast in casts) and are_weights(cast.node for cast in casts)


def _exchange(parameter: Node, dtype: torch.dtype, casts: Sequence[_Cast]) -> Node | None:
    """Let casts read a copy of the parameter, which becomes an input of the graph.

    Returns:
        The new placeholder, or None if no view of the copy would be laid out as what was cast.
    """
    copy, graph = _placeholder(parameter, Form(dtype)), parameter.graph
    made: dict[Node, Node] = {parameter: copy}
    for cast in casts:
        result = _views_of(cast, parameter, made)
        if fake_value(result).stride() == fake_value(cast.node).stride():
            cast.node.replace_all_uses_with(result)
    # Views come before what is made of them in both.
    old = dict.fromkeys(node for cast in casts for node in (*cast.views, cast.node))
    for node in (*reversed(old), *reversed(dict.fromkeys(made.values()))):
        if not node.users and node is not copy:
            graph.erase_node(node)
    if not copy.users:
        graph.erase_node(copy)
        return None
    return copy


def _placeholder(parameter: Node, form: Form) -> Node:
    """A new input of the graph, for what is kept of a parameter."""
    with torch.inference_mode(False), torch.no_grad():
        low = evaluate(form.empty, (parameter,), {})
    kind = str(form.dtype).removeprefix("torch.") if form.scales is None or form.dtype is FLOAT8 else "scale"
    with parameter.graph.inserting_before(parameter):
        copy = parameter.graph.placeholder(f"{parameter.name}_{kind}")
    copy.meta = {key: parameter.meta[key] for key in ("stack_trace", "nn_module_stack") if key in parameter.meta}
    copy.meta["example_value"] = low
    make_static(copy)
    return copy


def _views_of(cast: _Cast, parameter: Node, made: dict[Node, Node]) -> Node:
    """The views between a parameter and its cast, of the copy; `made` has the copies of nodes that there are."""
    before = made[parameter]
    for view in cast.views:
        if is_cast(view):  # to the dtype that the parameter has, which the copy must not be cast to
            made[view] = before
        elif view not in made:
            target: Any = getattr(torch.Tensor, str(view.target)) if view.op == "call_method" else view.target
            args = (before, *view.args[1:])
            with torch.inference_mode(False), torch.no_grad():
                value = evaluate(target, args, dict(view.kwargs))
            with view.graph.inserting_before(view):
                made[view] = view.graph.create_node(view.op, view.target, args, view.kwargs)
            made[view].meta = {**view.meta, "example_value": value}
        before = made[view]
    return before
