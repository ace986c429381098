"""Splitting a joint graph where the forward writes to its inputs: the backward gets what the forward read.

AOTAutograd puts a write to an input at the end of the forward, and torch's partitioner takes every input as something
that the backward may read for free. What it then recomputes from such an input, it recomputes from what was written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from omnicomp._torch.autograd.mutations import is_view, positions_written, root, write_targets
from omnicomp._torch.repairs.moved_constructors import move_constructors
from omnicomp._torch.repairs.shared_results import take_apart
from omnicomp.errors import CompilerFaultError

Partition = Callable[..., tuple[GraphModule, GraphModule]]

_KEPT: Final = "omnicomp_kept"
_BACKWARD_TAGS: Final = ("is_backward", "must_be_in_backward")
_RECOMPUTED: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class KeepWritten(CustomPartitionerFn):
    """Inductor's hook for `partition`, around a partitioner of the user's if there is one.

    Args:
        inner: what splits the graph; None for torch's min-cut.
    """

    def __init__(self, inner: CustomPartitionerFn | None = None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Split a joint graph as `partition` does, once what it computes on the CPU for a GPU is computed there."""
        move_constructors(gm.graph)
        return partition(gm, joint_inputs, inner=self.inner or min_cut_rematerialization_partition, **kwargs)

    def uuid(self) -> Any | None:
        """What Inductor hashes into its cache keys; None, for no caching, if the inner partitioner asks for that."""
        own = get_hash_for_files((__file__,))
        if self.inner is None:
            return own
        inner = self.inner.uuid()
        return None if inner is None else (own, inner)


def config_patches(patches: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's config patches with a partitioner that keeps what the forward writes to."""
    inner = patches.get("custom_partitioner_fn", config.custom_partitioner_fn)
    return {**patches, "custom_partitioner_fn": inner if isinstance(inner, KeepWritten) else KeepWritten(inner)}


def partition(
    gm: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    inner: Partition = min_cut_rematerialization_partition,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph in forward and backward; nothing is recomputed from an input that the forward writes to.

    Every read of such an input goes through a copy that may be saved and not be recomputed, so that the partitioner
    weighs the copy against what was computed from it. Copies that it does not save are taken out of the forward again.
    A graph without such writes goes to `inner` as it is.

    A graph whose backward writes to an input is refused. What its backward reads of that input is what the tensor holds
    by then, which no split of the graph can give: it saves, or recomputes from, what the forward read, and a second
    backward reads that again.

    What a checkpointed region reads is left alone: eager recomputes it from what the tensor holds by then, too.

    Returns:
        The forward, whose outputs beyond `num_fwd_outputs` are what is saved, and the backward.

    Raises:
        CompilerFaultError: the backward writes to an input.
    """
    late = next(iter(written_in_backward(gm.graph)), None)
    if late is not None:
        raise CompilerFaultError(
            f"AOTAutograd is known to be wrong about a backward that writes to an input ({late.name}): a second one "
            "does not read what the first one wrote; the graph runs eager"
        )
    take_apart(gm)
    copies = _read_copies(gm.graph, written_inputs(gm.graph, num_fwd_outputs))
    if copies:
        gm.recompile()
    forward, backward = inner(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if copies:
        _save_what_is_copied(forward, backward, num_fwd_outputs)
        _read_originals(forward)
    return forward, backward


def written_inputs(graph: Graph, num_fwd_outputs: int) -> list[Node]:
    """The placeholders of a joint graph whose tensors the forward changes, in the graph or right after it.

    A tensor whose storage is resized in the graph is left out: sharded parameters are freed and gathered anew like
    that, in the backward as well, and a copy would keep them alive.
    """
    written: dict[Node, None] = {}
    resized: set[Node] = set()
    for node in graph.nodes:
        for target in write_targets(node):
            if node.target is torch.ops.inductor.resize_storage_bytes_.default:
                resized.add(target)
            elif node.meta.get("partitioner_tag") not in _BACKWARD_TAGS:
                written[target] = None
    # An input that requires a gradient is written to after the forward. Only the outputs' descriptions say so.
    described = {
        node.meta["desc"]: node
        for node in graph.find_nodes(op="placeholder")
        if "desc" in node.meta and isinstance(node.meta.get("val"), torch.Tensor)
    }
    for description in graph.output_node().meta.get("desc", ())[:num_fwd_outputs]:
        target = described.get(getattr(description, "mutated_input", None))
        if target is not None:
            written[target] = None
    return [node for node in written if node not in resized]


def written_in_backward(graph: Graph) -> list[Node]:
    """The placeholders of a joint graph that its backward writes to: tensors of the program, not its own gradients.

    A tensor whose storage is resized in the graph is left out, as in `written_inputs`.
    """
    written: dict[Node, None] = {}
    resized: set[Node] = set()
    for node in graph.nodes:
        for target in write_targets(node):
            if node.target is torch.ops.inductor.resize_storage_bytes_.default:
                resized.add(target)
            elif node.meta.get("partitioner_tag") in _BACKWARD_TAGS:
                written[target] = None
    return [node for node in written if node not in resized and not node.name.startswith("tangents_")]


def _read_copies(graph: Graph, written: Iterable[Node]) -> list[Node]:
    """Let reads of these inputs and of views of them go through copies; returns the copies.

    The end of each chain of views is copied and not the input: a large one may be read in a small part only, and a copy
    has other strides than a tensor with gaps, which `as_strided` must not see.
    """
    copies: list[Node] = []
    pending = list(written)
    while pending:
        node = pending.pop()
        views = [user for user in node.users if user.op == "call_function" and is_view(user)]
        pending.extend(views)
        value = node.meta.get("val")
        readers = [user for user in node.users if user not in views and _reads_values(user, node)]
        if not readers or not isinstance(value, torch.Tensor):
            continue
        copy = _copy_of(graph, node, value)
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        copy.meta[_KEPT] = True
        for reader in readers:
            _replace_reads(reader, node, copy)
        copies.append(copy)
    return copies


def _reads_values(user: Node, node: Node) -> bool:
    """Whether a node reads the elements of another, and eager would not read them anew in a checkpointed region."""
    if user.op == "output" or user.meta.get("recompute") in _RECOMPUTED:
        return False
    if isinstance(user.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        # Sizes and strides. `item` has such a result as well, but its operator says that it depends on data.
        return torch.Tag.data_dependent_output in getattr(user.target, "tags", ())
    written = tuple(positions_written(user))
    return any(node in tree_leaves(value) for position, value in _arguments(user) if position not in written)


def _replace_reads(user: Node, node: Node, copy: Node) -> None:
    """Let `user` read `copy` for `node`, except where it writes."""
    written = tuple(positions_written(user))

    def replaced(position: Any, value: Any) -> Any:
        return value if position in written else torch.fx.map_arg(value, lambda n: copy if n is node else n)

    user.args = tuple(replaced(position, value) for position, value in enumerate(user.args))
    user.kwargs = {name: replaced(name, value) for name, value in user.kwargs.items()}


def _arguments(node: Node) -> Iterable[tuple[Any, Any]]:
    yield from enumerate(node.args)
    yield from node.kwargs.items()


def _copy_of(graph: Graph, node: Node, value: torch.Tensor) -> Node:
    """Insert a copy of a tensor as early as it can be, before anything writes to it."""
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = torch.ops.aten.clone.default(value)
    for key in ("stack_trace", "nn_module_stack", "seq_nr"):
        if key in node.meta:
            copy.meta[key] = node.meta[key]
    return copy


def _kept_calls(graph: Graph) -> list[Node]:
    """The copies that are made in a graph; a placeholder for one that was saved has its metadata, too."""
    return [node for node in graph.nodes if node.op == "call_function" and _KEPT in node.meta]


def _save_what_is_copied(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> None:
    """Where the backward was given the input and makes the copy itself, give it a copy made by the forward instead.

    A partitioner may do so under a budget of memory that forbids to save anything but inputs.
    """
    late = _kept_calls(backward.graph)
    if not late:
        return
    output = forward.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    saved = {node.name: node for node in outputs[num_fwd_outputs:] if isinstance(node, Node)}
    for name in {root(node.all_input_nodes[0]).name: None for node in late}:
        if name not in saved:
            raise RuntimeError(f"the backward copies {name}, which the forward writes to and does not save")
        original = saved[name]
        copy = _copy_of(forward.graph, original, original.meta["val"])
        if "saved_tensor_with_no_vc_check" in original.meta:
            copy.meta["saved_tensor_with_no_vc_check"] = original.meta["saved_tensor_with_no_vc_check"]
        outputs[num_fwd_outputs:] = [copy if node is original else node for node in outputs[num_fwd_outputs:]]
    output.args = (tuple(outputs),)
    for node in late:
        node.replace_all_uses_with(node.all_input_nodes[0])
        backward.graph.erase_node(node)
    forward.recompile()
    backward.recompile()


def _read_originals(forward: GraphModule) -> None:
    """Let the forward itself read its inputs again, and drop the copies that it does not return."""
    for copy in _kept_calls(forward.graph):
        original = copy.all_input_nodes[0]
        copy.replace_all_uses_with(original, delete_user_cb=lambda user: user.op != "output")
        if not copy.users:
            forward.graph.erase_node(copy)
    forward.graph.lint()
    forward.recompile()
