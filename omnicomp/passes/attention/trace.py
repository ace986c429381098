"""What every node of a Dynamo graph computes, in one vocabulary: the ATen operators it runs, as values and makers.

The graph is run on its fake tensors, and the operators that reach the dispatcher are noted. That gives `@`, `matmul`,
`bmm` and `einsum`, functions and methods, autocast's casts, and code inside activation checkpointing one form. Changes
in place become new values; a value that was changed through another view of its memory becomes opaque.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.dispatch_trace import HigherOrderOperator, functional_counterpart, listening, storage_key
from omnicomp._torch.autograd.flex import FLEX
from omnicomp._torch.autograd.repeated_calls import RepeatedCalls, alias
from omnicomp._torch.dynamo.regions import sets_state
from omnicomp._torch.targets import base_name
from omnicomp.analysis.nodes import all_nodes, fake_value, submodules
from omnicomp.passes.attention.nodes import active_dropout, changes_grad_mode, is_scaled_dot_product_attention

# The operator that a call of torch's own attention is noted as, whatever it decomposes to.
CALL: Final = "scaled_dot_product_attention"
# The same for FlexAttention: queries, keys, values, and the mask that its function of indices makes, or None.
FLEX_CALL: Final = "flex_attention"
# Regions that say what a gradient is; their results are known by these names alone.
_GRADIENTS: Final = ("register_hook", "autograd_function_apply")
# What a function of single indices may do, if it is to give the same for tensors of all of them.
_OF_ELEMENTS: Final = frozenset(
    "add sub rsub mul div neg abs eq ne lt le gt ge where index minimum maximum clamp floor_divide remainder _to_copy "
    "to logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ "
    "__xor__ full scalar_tensor new_ones new_zeros new_full ones_like zeros_like full_like expand alias detach "
    "lift_fresh".split()
)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A tensor at one moment: what it holds is never changed.

    Attributes:
        fake: its shape, dtype, device and strides.
        op: what made it; None for an input, a constant, and what the trace could not follow.
        index: which of the results of `op` it is.
        users: the operators that read it.
        holders: the nodes of the graph whose result it is or was.
    """

    fake: torch.Tensor
    op: "Op | None" = None
    index: int = 0
    users: "list[Op]" = dataclasses.field(default_factory=list["Op"])
    holders: list[Node] = dataclasses.field(default_factory=list[Node])

    def __repr__(self) -> str:
        made = self.op.name if self.op else "opaque"
        return f"<{made} {list(self.fake.shape)} {self.fake.dtype}>"


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """One call of an ATen operator.

    Attributes:
        name: name of the operator without namespace and overload (`bmm`, `add`); in-place ones under their
            functional name. An active dropout is `dropout`, whatever it decomposes to.
        args: arguments with a `Value` for each tensor.
        kwargs: likewise.
        outputs: its results.
        node: the node of the graph that it belongs to.
        arguments: names of the positional arguments.
        target: the operator, without its change in place; None for those that stand for several.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Value]
    node: Node
    arguments: tuple[str, ...] = ()
    target: Any = None

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument `name`, wherever it was given."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self.arguments.index(name) if name in self.arguments else len(self.args)
        return self.args[position] if position < len(self.args) else default

    @property
    def inputs(self) -> Iterator[Value]:
        """The tensors it reads, in order."""
        return _values_in((*self.args, *self.kwargs.values()))


def _values_in(items: Iterable[Any]) -> Iterator[Value]:
    for item in items:
        if isinstance(item, Value):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _values_in(item)


@dataclasses.dataclass(eq=False)
class Trace:
    """The values and operators of a graph, including those of the regions that it calls once.

    Attributes:
        ops: all operators, in the order of execution.
        values: what each node holds when it has run.
        order: when each node ran.
        changed: when the content of a node's result was changed by another node; absent if never.
        failed: nodes that could not be run on fake tensors, and why.
    """

    ops: list[Op] = dataclasses.field(default_factory=list[Op])
    values: dict[Node, Value] = dataclasses.field(default_factory=dict[Node, Value])
    order: dict[Node, int] = dataclasses.field(default_factory=dict[Node, int])
    changed: dict[Node, int] = dataclasses.field(default_factory=dict[Node, int])
    failed: dict[Node, str] = dataclasses.field(default_factory=dict[Node, str])

    def replace(self, old: Node, new: Node) -> None:
        """Note that `new` holds what `old` held."""
        self.order[new] = self.order[old]
        if (value := self.values.get(old)) is not None:
            self.values[new] = value
            value.holders.append(new)

    def forget(self, node: Node) -> None:
        """Note that a node was erased."""
        if (value := self.values.pop(node, None)) is not None:
            value.holders.remove(node)

    def holder(self, value: Value, at: Node) -> Node | None:
        """A node of the graph of `at` that holds `value` just before `at` runs, the earliest one."""
        moment = self.order[at]
        for node in value.holders:
            if node.graph is at.graph and self.order[node] < moment <= self.changed.get(node, moment):
                return node
        return None


def trace(module: GraphModule) -> Trace:
    """Trace a Dynamo graph and, within it, the regions that are called from one place only.

    Never raises for a node that can't be run: its results are opaque then, and `Trace.failed` says why.
    """
    recorder = _Recorder()
    calls = None if any(map(sets_state, all_nodes(module))) else RepeatedCalls(recorder.listen)
    inputs = [fake_value(node) for node in module.graph.find_nodes(op="placeholder")]
    fakes = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    fakes += [v for n in module.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)][:1]
    with listening(fakes, calls.listen if calls else recorder.listen, recorder.keep) as fake_of:
        recorder.fake_of = fake_of
        _Runner(module, recorder, _single_calls(module), calls).run_with([tree_map(alias, value) for value in inputs])
    return recorder.trace


class _Recorder:
    """Keeps which tensor holds which value while a graph runs."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.node: Any = None
        self.paused = False
        self.fake_of: Any = None
        self._values: dict[int, Value] = {}
        # Tensors live as long as the recorder: neither an id nor an address of a storage is ever used twice.
        self._aliases: dict[int, list[torch.Tensor]] = {}

    def value(self, tensor: torch.Tensor) -> Value:
        found = self._values.get(id(tensor))
        return found if found is not None else self.bind(tensor, Value(tensor))

    def bind(self, tensor: torch.Tensor, value: Value) -> Value:
        if id(tensor) not in self._values:
            self._aliases.setdefault(storage_key(tensor), []).append(tensor)
        self._values[id(tensor)] = value
        return value

    def listen(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if self.paused or self.node is None or operator.namespace == "prim":
            return
        schema = operator._schema
        written = _written(schema, args, kwargs) if schema.is_mutable else []
        name = base_name(operator)
        if name in ("baddbmm", "addmm") and isinstance(out, torch.Tensor):
            # The product alone is a value, too.
            product = self._make(name.removeprefix("badd").removeprefix("add"), None, args[1:3], {})
            product.outputs.append(Value(out, product))
            op = self._make("scaled_add", schema, args[:1], kwargs)
            op.args = (*op.args, product.outputs[0])
            product.outputs[0].users.append(op)
            op.outputs.append(self.bind(out, Value(out, op)))
            return
        if name == "permute" and list(args[1]) == list(range(len(args[1]))):
            self.bind(out, self.value(args[0]))  # einsum makes such ones
            return
        if not written:
            self._add(name, schema, args, kwargs, [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
            self.trace.ops[-1].target = operator
            return
        functional = functional_counterpart(operator)
        op = None
        if functional is not None and len(written) == 1 and written[0] is args[0]:
            op = self._make(base_name(functional), functional._schema, args, kwargs)
            op.target = functional
        for tensor in written:
            self._write(tensor, op)

    def keep(self, tensor: torch.Tensor) -> None:
        """Let values of a tensor keep its sizes and strides, which are about to be changed in place."""
        kept = tensor.detach()
        for value in (self.value(tensor), *(v for op in self.trace.ops for v in (*op.inputs, *op.outputs))):
            if value.fake is tensor:
                value.fake = kept

    def note(self, name: str, schema_args: Sequence[Any], kwargs: Mapping[str, Any], *out: torch.Tensor) -> None:
        """An operator of ours that stands for several."""
        self._add(name, None, schema_args, kwargs, out)

    def opaque(self, out: Any) -> None:
        """Forget what `out` holds."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.bind(tensor, Value(tensor))

    def _make(self, name: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Op:
        convert: Any = lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        given: Any = (tuple(args), dict(kwargs))
        taken, named = map_aggregate(given, convert)
        op = Op(
            name,
            taken,
            named,
            [],
            self.node,
            tuple(a.name for a in schema.arguments) if schema is not None else (),
        )
        for value in op.inputs:
            value.users.append(op)
        self.trace.ops.append(op)
        return op

    def _add(
        self, name: str, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Sequence[torch.Tensor]
    ) -> None:
        op = self._make(name, schema, args, kwargs)
        for index, tensor in enumerate(out):
            value = Value(tensor, op, index)
            op.outputs.append(value)
            self.bind(tensor, value)

    def _write(self, tensor: torch.Tensor, op: Op | None) -> None:
        value = Value(tensor, op)
        if op is not None:
            op.outputs.append(value)
        self.value(tensor)
        for other in self._aliases[storage_key(tensor)]:
            old = self._values[id(other)]
            for holder in old.holders:
                if holder is not self.node:
                    self.trace.changed.setdefault(holder, self.trace.order.get(self.node, len(self.trace.order)))
            self._values[id(other)] = value if _same_place(other, tensor) else self._overwritten(other, old, value)

    def _overwritten(self, tensor: torch.Tensor, old: Value, new: Value) -> Value:
        """What a tensor holds after `new` was written to a part of its memory."""
        op = Op("overwritten", (old, new), {}, [], self.node)
        op.outputs.append(Value(tensor, op))
        self.trace.ops.append(op)
        for value in (old, new):
            value.users.append(op)
        return op.outputs[0]


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    given = [*zip(schema.arguments, args, strict=False), *((a, kwargs.get(a.name)) for a in schema.arguments)]
    return [tensor for argument, tensor in given if argument.is_write and isinstance(tensor, torch.Tensor)]


def _same_place(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left is right:
        return True
    if left.dtype != right.dtype or left.dim() != right.dim():
        return False
    places = [(*t.shape, *t.stride(), t.storage_offset()) for t in (left, right)]
    return all(bool(a == b) for a, b in zip(*places, strict=True))


class _Runner(Interpreter):
    """Runs one region; calls of regions that have one caller are followed."""

    def __init__(
        self, module: GraphModule, recorder: _Recorder, followed: set[GraphModule], calls: RepeatedCalls | None
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.recorder, self.followed, self.calls = recorder, followed, calls
        # An error's text would otherwise be made from the whole graph, for each node that fails.
        self.extra_traceback = False

    def run_with(self, inputs: Sequence[Any]) -> Any:
        return self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        recorder, outer = self.recorder, self.recorder.node
        recorder.node = n
        try:
            result = self._run(n)
        except Exception as error:  # noqa: BLE001 - noted in `failed`; the results are opaque
            recorder.trace.failed[n] = f"{type(error).__name__}: {error}".splitlines()[0]
            result = self._from_example(n)
        finally:
            recorder.node = outer
        recorder.trace.order[n] = len(recorder.trace.order)
        if isinstance(result, torch.Tensor):
            value = recorder.value(result)
            recorder.trace.values[n] = value
            value.holders.append(n)
        return result

    def _run(self, n: Node) -> Any:
        if n.op == "get_attr":
            held = self.fetch_attr(str(n.target))
            if not isinstance(held, torch.Tensor):
                return held
            fake = fake_value(n)
            return fake.detach() if isinstance(fake, torch.Tensor) else self.recorder.fake_of(held)
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "call_module":
            return self._from_example(n)
        if is_scaled_dot_product_attention(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            out = self._from_example(n)
            if isinstance(out, torch.Tensor):
                self.recorder.note(CALL, args, kwargs, out)
            return out
        if n.target is FLEX:
            return self._call_flex(n)
        if isinstance(n.target, HigherOrderOperator):
            return self._call_region(n)
        if changes_grad_mode(n):
            return None
        if isinstance(number := n.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool):
            return number  # run again, `item` would give a new symbol that the rest of the graph does not know
        if (probability := active_dropout(n)) is not None:
            args, _ = self.fetch_args_kwargs_from_env(n)
            out = self._from_example(n)
            if isinstance(args[0], torch.Tensor) and out is not args[0]:
                self.recorder.note("dropout", (args[0], probability), {}, out)
            return out
        if self.calls is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self.calls.run(n.target, args, kwargs, lambda: getattr(self, n.op)(n.target, args, kwargs))

    def _call_region(self, n: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        regions = [a for a in args if isinstance(a, GraphModule)]
        name = str(getattr(n.target, "__name__", n.target))
        if name in _GRADIENTS:
            out = self._from_example(n)
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            self.recorder.note(name, tensors, {}, *(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)))
            return out
        if len(regions) != 1 or regions[0] not in self.followed:
            return self._from_example(n)
        inputs = [a for a in args[args.index(regions[0]) + 1 :] if not isinstance(a, str)]
        if len(inputs) != len(regions[0].graph.find_nodes(op="placeholder")):
            return self._from_example(n)
        return _Runner(regions[0], self.recorder, self.followed, self.calls).run_with(inputs)

    def _call_flex(self, n: Node) -> Any:
        args, _ = self.fetch_args_kwargs_from_env(n)
        out = self._from_example(n)
        query, key, value, _, mask, _, _, _, reads = args
        made = self._mask_of(query, key, mask[-1], reads)
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.recorder.note(FLEX_CALL, (query, key, value, made, *mask[:-1]), {}, *results)
        return out

    def _mask_of(self, query: torch.Tensor, key: torch.Tensor, function: Any, reads: Sequence[Any]) -> Any:
        """The mask that a function of batch, head, query and key makes; None if it can't be run on all of them."""
        sizes = (*query.shape[:3], key.shape[2])
        indices: list[torch.Tensor] = []
        for place, size in enumerate(sizes):
            shape = [1] * place + [size] + [1] * (3 - place)
            indices.append(torch.arange(size, device=query.device).reshape(shape))
        start = len(self.recorder.trace.ops)
        made = _Runner(function, self.recorder, self.followed, self.calls).run_with([*indices, *reads])
        names = {op.name for op in self.recorder.trace.ops[start:]}
        known = isinstance(made, torch.Tensor) and made.dtype is torch.bool and made.dim() <= 4
        return made if known and names <= _OF_ELEMENTS else None

    def _from_example(self, n: Node) -> Any:
        """Results of a node that was not run, from what Dynamo noted of it."""
        self.recorder.paused = True
        try:
            fresh = tree_map(_copy, n.meta.get("example_value"))
        finally:
            self.recorder.paused = False
        self.recorder.opaque(fresh)
        return fresh


def _copy(value: Any) -> Any:
    """A tensor like `value` that shares no memory with it."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _single_calls(module: GraphModule) -> set[GraphModule]:
    """The regions that are fetched and called once in the whole graph: inside them, arguments have one meaning."""
    calls: Counter[GraphModule] = Counter()
    _count_calls(module, calls)
    return {region for region, count in calls.items() if count == 1}


def _count_calls(module: GraphModule, calls: Counter[GraphModule]) -> None:
    names = {n.target: len(n.users) for n in module.graph.find_nodes(op="get_attr")}
    by_name: dict[str, GraphModule] = dict(module.named_modules())  # type: ignore[arg-type]
    for name, count in names.items():
        if isinstance(child := by_name.get(str(name)), GraphModule):
            calls[child] += count
    for child in submodules(module):
        if calls[child] == 1:
            _count_calls(child, calls)
