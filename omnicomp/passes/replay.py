"""What a pass decided for a graph is kept in a file, and done again without reading the graph.

The key of an entry is all that the pass reads: the graph with its fake values, names and source lines, constants, the
pass with its options, the device, settings of torch, and the versions of torch and omnicomp. Classes of masks are asked
for again, and an entry counts only for those that it was made for. What is kept is how the graph changed, as data: the
nodes that were inserted, changed and erased. An entry that does not lead to the fake values that it was made with is a
miss. So are a damaged file, one of another version, and one that another user may have written.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.attention import flash_implementation, without_guards
from omnicomp._torch.autograd.sdpa import in_transform
from omnicomp._torch.devices.precision import tf32_settings
from omnicomp._torch.fx import copy_module, forget_tensors
from omnicomp._torch.inductor.graph_text import TextGraph, dump_constant
from omnicomp._torch.inductor.store import JsonStore
from omnicomp._torch.inductor.versions import keeps_caches
from omnicomp._torch.symbols import environment_text, free_unbacked_symbols
from omnicomp._torch.targets import find_target, is_torchs, name_target
from omnicomp.analysis.nodes import evaluate, fake_value, module_path, source_line, submodules
from omnicomp.errors import first_line
from omnicomp.options.digest import package_digest
from omnicomp.passes.assumptions import Assumption
from omnicomp.passes.base import DECISION, PassContext
from omnicomp.passes.graph_data import (
    Plain,
    UnkeptError,
    attributes_of,
    dump_argument,
    dump_graph,
    dump_held,
    dump_target,
    dump_value,
    load_argument,
    load_graph,
    load_held,
    load_value,
)
from omnicomp.passes.mask_classes import MaskClass
from omnicomp.timeline import Cache, Event, Rewrite
from omnicomp.timeline.files import event_from_dict

CACHE: Final = "decisions"

# A smaller graph is read in about the time of a look into a file.
_LEAST_NODES: Final = 64
_CASES: Final = 4
_MOST_BYTES: Final = 2**24


def _as_is(value: Any) -> Any:
    return value


def _cases(value: Any) -> list[dict[str, Any]]:
    if _sum(value["cases"]) != value["sum"]:
        raise ValueError("its contents do not add up")
    return value["cases"]


STORE: Final = JsonStore[Any](CACHE, _as_is, _cases, files=256, size=_MOST_BYTES)


def decided(
    settings: Sequence[Any],
    module: GraphModule,
    context: PassContext,
    run: Callable[[], bool],
    final: Callable[[], bool],
) -> bool:
    """Rewrite a graph as it was rewritten before, or run a pass on it and keep what it did.

    Args:
        settings: what the pass goes by besides the graph and the context; each with a `repr` that tells it.
        module: the graph.
        context: the context of the pass.
        run: the pass; returns whether it changed anything.
        final: whether what it did would be done again; asked for when it has run.

    Returns:
        Whether anything changed.
    """
    if not context.replay or len(module.graph.nodes) < _LEAST_NODES or not keeps_caches():
        return run()
    try:
        key = _key(settings, module, context)
    except Exception as why:  # noqa: BLE001 - becomes a note in the timeline, and the pass runs
        _tell(context, "bypass", note=str(why) if isinstance(why, UnkeptError) else first_line(why))
        return run()
    cases, wrong = STORE.read(key)
    for case in cases or ():
        try:
            done = _replay(case, module, context)
        except Exception as error:  # noqa: BLE001 - becomes a note in the timeline, and the pass runs
            wrong = f"an entry can't be used: {first_line(error)}"
            continue
        if done is not None:
            _tell(context, "hit", key)
            context.memo[DECISION] = key
            return done
        wrong = wrong or "the masks are of other classes"
    _tell(context, "miss", key, note=wrong)
    before = _Before(module, context)
    try:
        modified = run()
        why = "what was measured is not final" if not final() else before.keep(key, cases or [])
    finally:
        before.forget()
    if why:
        _tell(context, "bypass", key, note=why)
    else:
        context.memo[DECISION] = key
    return modified


def _tell(context: PassContext, verdict: str, key: str = "", note: str = "") -> None:
    context.timeline.append(Cache(graph=context.graph_id, part="", cache=CACHE, verdict=verdict, key=key, note=note))


# The key


def _key(settings: Sequence[Any], module: GraphModule, context: PassContext) -> str:
    """The hash of all that the pass reads.

    Raises:
        UnkeptError: something can't be told by a hash.
    """
    if context.root is not module or next(submodules(module), None) is not None:
        raise UnkeptError("the graph calls others")
    if in_transform():
        raise UnkeptError("it is compiled within a transform of torch.func")
    device = context.device
    # How much memory there is, and how many devices, is no part of what a kernel can do.
    capabilities = dataclasses.replace(device.capabilities(), memory_bytes=0, device_count=0)
    told: list[Any] = [
        package_digest(),
        torch.__version__,
        torch.version.cuda,
        *settings,
        (device.type, capabilities, context.training, context.speculate),
        _state_of_torch(device.type),
    ]
    storages: dict[int, int] = {}
    symbolic: list[Any] = []
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        line: list[Any] = [node.name, node.op, _target_text(module, node)]
        line += [_argument_text(node.args), _argument_text(node.kwargs), _value_text(value, symbolic)]
        line += [source_line(node), module_path(node)]
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            line += [type(value).__name__, value.is_inference(), value.is_inference() or value._version]
            if value.layout is torch.strided:
                storage = value.untyped_storage()._cdata
                line.append(storages.setdefault(storage, len(storages)))
        told.append(line)
    if symbolic:
        if any(free_unbacked_symbols(item) for item in symbolic):
            raise UnkeptError("a size depends on data")
        told.append(environment_text(symbolic[0]))
    return hashlib.sha256("\n".join(map(repr, told)).encode("utf-8", "backslashreplace")).hexdigest()[:40]


def _state_of_torch(device: str) -> tuple[Any, ...]:
    backends, cuda = torch.backends.cuda, ()
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        cuda = (str(properties), torch.backends.cudnn.version())
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        (torch.get_float32_matmul_precision(), *tf32_settings()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()),
        (backends.math_sdp_enabled(), backends.cudnn_sdp_enabled()),
        flash_implementation(),
        cuda,
    )


def _target_text(module: GraphModule, node: Node) -> Any:
    if node.op in ("placeholder", "output", "call_method"):
        return str(node.target)
    if node.op == "get_attr":
        try:
            return json.dumps(dump_constant(str(node.target), getattr(module, str(node.target))), sort_keys=True)
        except (AttributeError, ValueError) as error:
            raise UnkeptError(str(error)) from error
    target: Any = node.target
    # What a function of the program's does is not in the graph.
    if node.op != "call_function" or not is_torchs(target):
        raise UnkeptError(f"the graph calls {getattr(target, '__name__', target)}, which is not torch's")
    return name_target(target) or repr(target)


def _argument_text(value: Any) -> Any:
    kind = type(value)
    if kind is Node:
        return value
    if isinstance(value, tuple | list):
        return (kind is tuple, [_argument_text(item) for item in value])
    if isinstance(value, dict):
        return {key: _argument_text(item) for key, item in value.items()}
    if isinstance(value, slice):
        return (slice, [_argument_text(item) for item in (value.start, value.stop, value.step)])
    if value is None or isinstance(value, (*_NUMBERS, *_TORCHS)) or value is Ellipsis:
        return value
    raise UnkeptError(f"an argument is a {kind.__name__}")


def _value_text(value: Any, symbolic: list[Any]) -> Any:
    """A fake value as a text, or as a tuple of such."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or type(value).__module__ not in _PLAIN_TENSORS:
            raise UnkeptError(f"a value is a {type(value).__name__} of layout {value.layout}")
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if any(type(size) is not int for size in sizes):
            symbolic += [size for size in sizes if isinstance(size, torch.SymInt)]
        return f"{value.dtype} {sizes} {value.device} {value.requires_grad}"
    if isinstance(value, tuple | list):
        return tuple(_value_text(item, symbolic) for item in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        symbolic.append(value)
        return f"symbolic {value}"
    if value is None or isinstance(value, (*_NUMBERS, *_TORCHS)):
        return repr(value)
    return type(value).__name__


_NUMBERS: Final = (bool, int, float, complex, str)
_TORCHS: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN_TENSORS: Final = ("torch", "torch.nn.parameter", "torch._subclasses.fake_tensor")


# What is kept


class _Before:
    """A graph as it was before a pass, with which it is compared behind it."""

    def __init__(self, module: GraphModule, context: PassContext) -> None:
        self.module, self.context = module, context
        self.copy = copy_module(module, lazy=True)
        self.nodes: dict[Node, tuple[Any, ...]] = {node: _state(node) for node in module.graph.nodes}
        self.attributes = attributes_of(module)
        self.events = len(context.timeline.events())
        self.symbols = self._symbols()
        context.settled.clear()

    def _symbols(self) -> str:
        values = [value for state in self.nodes.values() if isinstance(value := state[-1], torch.Tensor)]
        symbolic = next((size for v in values for size in (*v.shape, *v.stride()) if type(size) is not int), None)
        return "" if symbolic is None else environment_text(symbolic)

    def forget(self) -> None:
        """Let go of the copy."""
        forget_tensors(self.copy)

    def keep(self, key: str, others: Sequence[dict[str, Any]]) -> str:
        """Store what the pass did, if doing it again leads to the same; returns why it was not stored."""
        context = self.context
        if self._symbols() != self.symbols:
            return "the pass learned of sizes"
        try:
            case = self._case()
            again = dataclasses.replace(
                context,
                timeline=type(context.timeline)(),
                root=self.copy,
                assumptions=[],
                rewrites=type(context.rewrites)(),
                answers={question.key: holds for question, _, holds in context.settled},
                settled=[],
            )
            if _replay(json.loads(json.dumps(case)), self.copy, again) is None:
                return "its assumptions can't be stored"
            if [_shown(n) for n in self.copy.graph.nodes] != [_shown(n) for n in self.module.graph.nodes]:
                return "the graph can't be made again from what is stored"
            if list(map(_bare, again.timeline.events())) != list(map(_bare, self._events())):
                return "its events can't be stored"
            if _told(again) != _told(context):
                return "what it assumed can't be stored"
        except Exception as error:  # noqa: BLE001 - becomes a note in the timeline; the graph is as the pass left it
            return f"it can't be stored: {first_line(error)}"
        cases = [case, *others][:_CASES]
        return STORE.write(key, {"cases": cases, "sum": _sum(cases)})

    def _events(self) -> tuple[Event, ...]:
        return self.context.timeline.events()[self.events :]

    def _case(self) -> dict[str, Any]:
        settled: list[dict[str, Any]] = [
            {"question": _dumped(question), "guess": _class(guess), "holds": _class(holds)}
            for question, guess, holds in self.context.settled
        ]
        kept = {item.key for item in self.context.assumptions}
        for item, (question, _, _) in zip(settled, self.context.settled, strict=True):
            item["kept"] = question.key in kept
        if len(kept) != sum(item["kept"] for item in settled):
            raise UnkeptError("something was assumed that is no class of a mask")
        new = attributes_of(self.module)
        if any(new.get(name) is not value for name, value in self.attributes.items()):
            raise UnkeptError("the pass changed an attribute of the graph")
        return {
            "settled": settled,
            "attributes": {n: dump_held(n, v) for n, v in new.items() if n not in self.attributes},
            "steps": list(self._steps()),
            "events": [event.to_dict() for event in self._events()],
        }

    def _steps(self) -> Iterator[list[Any]]:
        """The graph in its order: runs of nodes that stayed, and others."""
        places = {node: place for place, node in enumerate(self.nodes)}
        targets = {node.target: node.name for node in self.nodes if node.op == "call_function"}
        start: int = 0
        end: int = 0
        last: int = 0
        for node in self.module.graph.nodes:
            place = places.get(node)
            if place is not None and place < last:
                raise UnkeptError("the pass changed the order of nodes")
            last = last if place is None else place + 1
            before = self.nodes.get(node)
            if before is not None and place is not None and _same(before, _state(node)):
                if place != end:
                    if end > start:
                        yield ["stay", start, end]
                    start = place
                end = last
                continue
            if end > start:
                yield ["stay", start, end]
            start = end = last
            target = dump_target(node, targets)
            call = [node.op, target, dump_argument(node.args), dump_argument(node.kwargs)]
            value = node.meta.get("example_value")
            grad = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
            told = node.op == "call_method" or (node.op == "call_function" and is_torchs(node.target))
            described = [_value_text(value, []), grad, None if told else dump_value(value)]
            if before is None:
                yield ["new", node.name, *call, self._like(node), *described]
            else:
                yield ["change", place, *call, *([None] if before[-1] is value else described)]
        if end > start:
            yield ["stay", start, end]

    def _like(self, node: Node) -> str:
        """The node of the old graph whose source and module a new node has, or nothing."""
        return self._inherited.get(tuple(id(node.meta.get(key)) for key in _INHERITED), "")

    @functools.cached_property
    def _inherited(self) -> dict[tuple[int, ...], str]:
        found: dict[tuple[int, ...], str] = {}
        for node in self.nodes:
            found.setdefault(tuple(id(node.meta.get(key)) for key in _INHERITED), node.name)
        return found


_INHERITED: Final = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


def _state(node: Node) -> tuple[Any, ...]:
    return (node.name, node.op, node.target, node.args, node.kwargs, node.meta.get("example_value"))


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return before[:5] == now[:5] and before[5] is now[5]


def _shown(node: Node) -> tuple[Any, ...]:
    value = _value_text(node.meta.get("example_value"), [])
    target = name_target(node.target) or str(node.target)
    return (node.name, node.op, target, repr(node.args), repr(node.kwargs), value, source_line(node), module_path(node))


def _told(context: PassContext) -> list[Any]:
    return [dataclasses.astuple(dataclasses.replace(a, check=TextGraph({}))) + a.key for a in context.assumptions]


def _bare(event: Event) -> Event:
    """An event without what the recorder stamps it with."""
    return dataclasses.replace(event, time=0.0, seq=-1)


def _sum(value: Plain) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _class(value: MaskClass) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _dumped(question: Assumption) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(question) if field.name not in ("check", "accepts", "holds")]
    fields = {name: getattr(question, name) for name in names}
    if not isinstance(question.check, GraphModule):
        raise UnkeptError("the check of a mask is no graph")
    return {**fields, "check": dump_graph(question.check), "accepts": sorted(question.accepts)}


def _loaded(data: dict[str, Any]) -> Assumption:
    made: dict[str, Any] = {"check": load_graph(data["check"], None), "accepts": frozenset(data["accepts"])}
    made = {**data, **made, "inputs": tuple(data["inputs"])}
    return Assumption(**made)


# Doing it again


def _replay(case: Mapping[str, Any], module: GraphModule, context: PassContext) -> bool | None:
    """Do again what was done; None if masks are of other classes, and the graph is as it was.

    Raises:
        Exception: the graph is as it was.
    """
    events = [event for event in map(event_from_dict, case["events"]) if event is not None]
    if len(events) != len(case["events"]):
        raise ValueError("an event is of an unknown type")
    assumptions = list(context.assumptions)
    edit = _Edit(module)
    try:
        for item in case["settled"]:
            question = _loaded(item["question"])
            if context.settle(question, MaskClass(**item["guess"])) != MaskClass(**item["holds"]):
                context.assumptions[:] = assumptions
                return None
            if not item["kept"]:
                context.withdraw(question)
        edit.attributes(case["attributes"])
        for step in case["steps"]:
            edit.step(*step)
        edit.finish()
    except BaseException:
        context.assumptions[:] = assumptions
        edit.undo()
        raise
    for event in events:
        if isinstance(event, Rewrite) and not event.kept:
            context.count(event.name)
        context.timeline.append(dataclasses.replace(event, graph=context.graph_id))
    return edit.changed


class _Edit:
    """Changes of a graph that are taken back if one of them fails."""

    def __init__(self, module: GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.old = list(module.graph.nodes)
        self.nodes = {node.name: node for node in self.old}
        self.place = 0  # of the next old node
        self.at = module.graph._root
        self.changed = False
        self._stayed: set[Node] = set()
        self._new: list[Node] = []
        self._before: list[tuple[Node, tuple[Any, ...]]] = []
        self._added: list[str] = []
        self._like = next((v for n in self.old if isinstance(v := fake_value(n), torch.Tensor)), None)

    def attributes(self, values: Mapping[str, Any]) -> None:
        """Add what the module holds."""
        for name, data in values.items():
            if hasattr(self.module, name):
                raise ValueError(f"the graph has an attribute {name} already")
            self._added.append(name)
            setattr(self.module, name, load_held(data, self._like))

    def step(self, kind: str, *what: Any) -> None:
        """Go on by one step of the list that was stored."""
        if kind == "stay":
            start, end = what
            run = self.old[start:end]
            self._stayed.update(run)
            self.at = run[-1]
        elif kind == "change":
            place, op, target, args, kwargs, value, *rest = what
            node = self.at = self.old[place]
            self._stayed.add(node)
            self._before.append((node, _state(node)))
            node.op, node.target = op, self._target(op, target)
            node.args, node.kwargs = load_argument(args, self.nodes), load_argument(kwargs, self.nodes)
            if value is not None:
                self._describe(node, value, *rest)
        elif kind == "new":
            name, op, target, args, kwargs, like, value, *rest = what
            with self.graph.inserting_after(self.at):
                node = self.graph.create_node(
                    op,
                    self._target(op, target),
                    load_argument(args, self.nodes),
                    load_argument(kwargs, self.nodes),
                    name=name,
                )
            self._new.append(node)
            node.name = name
            self.nodes[name] = self.at = node
            if like:
                source = self.nodes[like]
                node.meta.update({key: source.meta[key] for key in _INHERITED if key in source.meta})
            self._describe(node, value, *rest)
        else:
            raise ValueError(f"a step is {kind!r}")

    def _target(self, op: str, target: Any) -> Any:
        if op != "call_function":
            return target
        return self.nodes[target["of"]].target if isinstance(target, dict) else find_target(target)

    def _describe(self, node: Node, text: Any, grad: bool, made: Any) -> None:
        if made is not None:
            value = load_value(made, self._like)
        else:
            target: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
            leaves = [fake_value(item) for item in node.all_input_nodes]
            like = next((item for item in leaves if isinstance(item, torch.Tensor)), self._like)
            assert isinstance(like, torch.Tensor)
            # As the passes insert nodes: dtypes are explicit.
            with torch.set_grad_enabled(grad), torch.autocast(like.device.type, enabled=False), without_guards(like):
                value = evaluate(target, node.args, dict(node.kwargs), like=like)
        if json.loads(json.dumps(_value_text(value, []))) != text:
            raise ValueError(f"{node.name} has another value than it had")
        node.meta["example_value"] = value

    def finish(self) -> None:
        """Erase what is not in the list."""
        kept = {*self._stayed, *self._new}
        erased = [node for node in self.old if node not in kept]
        for node in erased:
            if node.op in ("placeholder", "output") or any(user in kept for user in node.users):
                raise ValueError(f"{node.name} is still used")
        for node in reversed(erased):
            self.graph.erase_node(node)
        self.changed = bool(erased or self._new or self._before)

    def undo(self) -> None:
        """Make the graph what it was."""
        for node, (_, op, target, args, kwargs, value) in reversed(self._before):
            node.op, node.target, node.args, node.kwargs = op, target, args, kwargs
            if value is not None:
                node.meta["example_value"] = value
        for node in reversed(self._new):
            self.graph.erase_node(node)
        for name in self._added:
            if hasattr(self.module, name):
                delattr(self.module, name)
