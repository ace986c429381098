"""One run of the attention pass over one graph: what it keeps, and edits that are taken back if they lead nowhere."""

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.attention import known_equal, without_guards
from omnicomp.analysis.nodes import insert_call
from omnicomp.devices import Device
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy
from omnicomp.passes.attention.build import Builder
from omnicomp.passes.attention.form import Form
from omnicomp.passes.attention.masking import Masking
from omnicomp.passes.attention.reader import Reader
from omnicomp.passes.attention.replace import with_layout
from omnicomp.passes.attention.site import Site
from omnicomp.passes.attention.terms import Position
from omnicomp.passes.attention.trace import Trace
from omnicomp.passes.base import PassContext
from omnicomp.passes.dtypes.resolve import resolve
from omnicomp.passes.dtypes.rules import decide

__all__ = ["Attempt", "Chosen", "Session", "computed_dtype"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The fused attention that was inserted for a site.

    Attributes:
        node: its output, in shape, dtype and layout of the site's output.
        target: the operator that was called.
        detail: what it was told and which kernel that takes, for the timeline.
    """

    node: Node
    target: str
    detail: str


@dataclasses.dataclass
class Session:
    """What one run of the pass over one graph keeps.

    Attributes:
        module: the module of the graph.
        trace: what its nodes compute.
        reader: reads the trace.
        context: the pass' context.
        dtype_policy: what lowers the operands of a fused kernel afterwards.
        eager_random: whether dropout has to draw the random numbers that eager draws.
        shared: tensors made for one site that others can use: masks.
        blocks: what FlexAttention's sites share.
        maskings: what masks hide, by their meaning.
    """

    module: GraphModule
    trace: Trace
    reader: Reader
    context: PassContext
    dtype_policy: DtypePolicy = PRESETS["keep"]
    eager_random: bool = False
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    blocks: dict[Any, Any] = dataclasses.field(default_factory=dict[Any, Any])
    maskings: dict[Any, Masking] = dataclasses.field(default_factory=dict[Any, Masking])

    @property
    def softmaxes(self) -> int:
        """How many there are in the whole graph: about as many attentions, most of which share one mask."""
        return max(1, sum(op.name in ("_softmax", "_safe_softmax") for op in self.trace.ops))

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
