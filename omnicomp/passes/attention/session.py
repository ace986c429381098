"""One run of the attention pass over one graph: what it keeps, and edits that are taken back if they lead nowhere."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.attention import known_equal, without_guards
from omnicomp._torch.devices.precision import tf32_settings
from omnicomp._torch.symbols import guard_multiple
from omnicomp.analysis.nodes import all_nodes, fake_value, insert_call, op_name
from omnicomp.devices import Device
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.attention.build import Builder
from omnicomp.passes.attention.form import Form
from omnicomp.passes.attention.masking import Masking
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.replace import with_layout
from omnicomp.passes.attention.site import Site
from omnicomp.passes.attention.terms import Position
from omnicomp.passes.attention.timings import Budget
from omnicomp.passes.attention.trace import CALL, FLEX_CALL, Trace, Value
from omnicomp.passes.base import PassContext
from omnicomp.passes.dtypes.resolve import resolve
from omnicomp.passes.dtypes.rules import decide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The fused attention that was inserted for a site."""

    node: Node  # its output, in shape, dtype and layout of the site's output
    target: str  # the operator that was called
    detail: str  # what it was told and which kernel that takes, for the timeline
    kernel: str = ""  # the one that it is pinned to, or an empty string
    # Milliseconds of the candidates that were timed for it.
    timed: dict[str, float] = dataclasses.field(default_factory=dict[str, float])


@dataclasses.dataclass
class Session:
    """What one run of the pass over one graph keeps."""

    module: GraphModule  # the module of the graph
    trace: Trace  # what its nodes compute
    reader: Reader  # reads the trace
    context: PassContext  # the pass' context
    dtype_policy: DtypePolicy = PRESETS["keep"]  # what lowers the operands of a fused kernel afterwards
    eager_random: bool = False  # whether dropout has to draw the random numbers that eager draws
    empty_row_gradients: bool = False  # whether rows without a key pass gradients on wherever eager's do
    # Tensors made for one site that others can use: masks.
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    blocks: dict[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])  # what FlexAttention's sites share
    # What masks hide, by their meaning.
    maskings: dict[Any, Masking] = dataclasses.field(default_factory=dict[Any, Masking])
    # The assumptions that were made for maskings.
    asked: dict[Any, Assumption] = dataclasses.field(default_factory=dict[Any, Assumption])
    relied_on: set[Any] = dataclasses.field(default_factory=set[Any])  # the maskings of sites that were fused
    read_last: Any = None  # the masking that was asked for last, which is that of the site in hand
    # The time that may go into timing candidates.
    budget: Budget = dataclasses.field(default_factory=lambda: Budget(0.0))
    # Which kernel an attention takes, by its operands and arguments.
    kernels: dict[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    # Sizes to guard on, with what they are multiples of, behind the attempt: guards are suppressed inside it.
    multiples: list[tuple[torch.SymInt, int]] = dataclasses.field(default_factory=list[tuple[torch.SymInt, int]])
    # Milliseconds of the candidates, by the node of the site's output.
    timed: dict[Node, dict[str, float]] = dataclasses.field(default_factory=dict[Node, dict[str, float]])

    @functools.cached_property
    def softmaxes(self) -> int:
        """How many there are in the whole graph: about as many attentions, most of which share one mask."""
        return max(1, sum(op.name in ("_softmax", "_safe_softmax", CALL) for op in self.trace.ops))

    @functools.cached_property
    def flex_calls(self) -> int:
        """How many calls of FlexAttention there are in the whole graph."""
        return max(1, sum(op.name == FLEX_CALL for op in self.trace.ops))

    def withdraw_unused(self) -> None:
        """Take back what was assumed for sites that were not fused even so."""
        for key, question in self.asked.items():
            if key not in self.relied_on:
                self.context.withdraw(question)

    @functools.cached_property
    def kernels_chosen(self) -> bool:
        """Whether the program says which kernels its calls may take."""
        return any(op_name(n).endswith("_sdpa_kernel") for n in all_nodes(self.context.root or self.module))

    @functools.cached_property
    def tf32(self) -> bool:
        """Whether float32 products on CUDA will be computed in TF32."""
        by_policy = self.dtype_policy.matmul == "tf32" and self.context.device.capabilities().tf32
        return by_policy or tf32_settings()[0] == "tf32"

    def computed_dtype(self, site: Site) -> torch.dtype:
        """The dtype that the operands of a site's kernel will have."""
        return computed_dtype(site, self.dtype_policy, self.context.device, training=self.context.training)

    @contextlib.contextmanager
    def attempt(self, site: Site) -> "Generator[Attempt]":
        """Insert nodes before the output of a site; they are taken back unless the attempt is kept."""
        before, old = site.output.prev, site.fake()
        shared, blocks = dict(self.shared), {key: dict(value) for key, value in self.blocks.items()}
        made = Attempt(self, site)
        # The grad mode of the site, and no autocast, because every dtype is made explicit. Where grad mode is off
        # nothing requires grad; where nothing requires grad the mode does not matter.
        try:
            with torch.set_grad_enabled(old.requires_grad), torch.autocast(old.device.type, enabled=False):
                with without_guards(old):
                    yield made
        finally:
            if not made.kept:
                self.shared.clear()
                self.shared.update(shared)
                self.blocks.clear()
                self.blocks.update(blocks)
                while site.output.prev is not before:
                    site.output.graph.erase_node(site.output.prev)
            while self.multiples:
                guard_multiple(*self.multiples.pop())

    @contextlib.contextmanager
    def trial(self, node: Node) -> Generator[Builder]:
        """A builder of nodes before a call of torch's own attention, all of which are taken back."""
        before, old = node.prev, fake_value(node)[0]

        def holder(value: Value) -> Node:
            found = self.trace.holder(value, node)
            if found is None:
                raise ValueError("a part of the mask is made inside another operation")
            return found

        try:
            with torch.set_grad_enabled(old.requires_grad), torch.autocast(old.device.type, enabled=False):
                with without_guards(old):
                    yield Builder(holder, functools.partial(insert_call, node))
        finally:
            while node.prev is not before:
                node.graph.erase_node(node.prev)


class Attempt:
    """One way of fusing one site, while its nodes are inserted."""

    def __init__(self, session: Session, site: Site) -> None:
        self.session, self.site, self.kept = session, site, False
        self.builder = Builder(self.holder, self.call, self.symbol)
        for operand in (site.query, site.key, site.value):
            self.builder.learn(operand.node, operand.at)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """Insert one call."""
        return insert_call(self.site.output, target, args, kwargs)

    def holder(self, value: Any) -> Node:
        """The node that holds a traced tensor.

        Raises:
            ValueError: there is none.
        """
        node = self.session.trace.holder(value, self.site.output)
        if node is None:
            raise ValueError("a part of the mask is made inside another operation")
        return node

    def symbol(self, value: Any) -> Node:
        """The node of a symbolic number.

        Raises:
            ValueError: there is none before the site's output.
        """
        node = self.site.output.prev
        while node.op != "root":
            found = node.meta.get("example_value")
            if type(found) is type(value) and known_equal(found, value):
                return node
            node = node.prev
        raise ValueError("a symbolic number takes part in the scores that no node of the graph is")

    def keep(self, form: Form, fused: Node, *, target: str, detail: str) -> Chosen:
        """Give the output (batch, heads, queries, features) the form of the site's output, and keep what was inserted.

        Raises:
            ValueError: it does not have that form.
        """
        groups = [Position(tuple(group)) for group in (*form.groups(self.site)[:3], self.site.value_features)]
        fused = self.builder.place(fused, groups, [position.axes for position in self.site.output_at])
        fused = with_layout(self.site, fused, self.call)
        self.kept = True
        return Chosen(node=fused, target=target, detail=detail)


def computed_dtype(site: Site, policy: DtypePolicy, device: Device, *, training: bool) -> torch.dtype:
    """The dtype of the operands that the kernel will have.

    Both products have to be lowered. What keeps the dtype pass from it nevertheless, such as a bound on the error, is
    not looked at: then a kernel of the program's dtype takes the place of the one that was chosen.
    """
    if site.dtype is not torch.float32 or not policy.rewrites:
        return site.dtype
    resolved, _ = resolve(policy, device, training=training)
    first, second = decide(site.product, resolved), decide(site.output, resolved)
    if first is None or second is None or first.dtype is not second.dtype:
        return site.dtype
    return first.dtype
