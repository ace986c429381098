"""A Dynamo graph as bytes, with what its compilation in another process needs: fake inputs, sources, global state.

The bytes are made by torch's pickler for FX graphs. Fake values of the nodes inside are left out, as running the graph
on fake tensors makes them again. Classes of modules become empty classes of the same name: the compiler reads nothing
else of them, and the other process need not import the program.
"""

import contextlib
import dataclasses
import importlib
import io
import pickle
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import sympy
import torch
import torch._guards
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDesc
from torch.fx import GraphModule
from torch.fx._graph_pickler import GraphPickler, Options, _SymNodePickleData
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from omnicomp import records
from omnicomp._torch.dynamo.late_compile import Scene, is_subclass
from omnicomp._torch.fx import all_nodes, copy_module, describe, effects, like

_KEPT: Final = ("stack_trace", "nn_module_stack", "source_fn_stack", "tensor_dict", "custom", "recompute")
_VALUES: Final = ("example_value", "unbacked_bindings")
_MOST_BYTES: Final = 2**24
_CONFIGS: Final = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
_AUTOCAST: Final = ("cpu", "cuda")


class ShippingError(Exception):
    """A graph can't be compiled in another process; the message says why."""


@records.dataclass(frozen=True, kw_only=True)
class Shipped:
    """A graph in the process that compiles it."""

    module: GraphModule  # the graph
    scene: Scene  # its inputs, and what surrounds its compilation
    extra: Any  # what the sender added


def pack(gm: GraphModule, scene: Scene, extra: Any, modules: Sequence[str] = ()) -> bytes:
    """The bytes of a graph; called while Dynamo compiles it.

    Args:
        gm: the graph, which is not changed.
        scene: what was kept of Dynamo's compilation.
        extra: goes along; it pickles.
        modules: are imported before the graph is read, as they declare operators.

    Raises:
        ShippingError: the graph is bound to this process.
    """
    _check(gm, scene)
    copy = _reduced(copy_module(gm, lazy=True))
    body = {
        "graph": copy,
        "sources": [getattr(node, "_dynamo_source", None) for node in copy.graph.find_nodes(op="placeholder")],
        "parameters": getattr(gm, "_param_name_to_source", None),
        "inputs": scene.inputs,
        "environment": scene.fake_mode.shape_env,
        "compile_id": getattr(scene.compile_context, "compile_id", None),
        "grad": scene.grad,
        "extra": extra,
    }
    try:
        config = {name: _config_of(name) for name in _CONFIGS}
        return pickle.dumps((config, global_state(), tuple(modules), _dumps(body)))
    except Exception as error:
        raise ShippingError(f"it can't be pickled ({type(error).__name__}: {error})") from error


def symbols_of(inputs: Sequence[Any]) -> tuple[str, ...]:
    """The names of the symbols that are inputs of a graph; empty for other inputs."""
    return tuple(
        str(value.node._expr) if isinstance(value, torch.SymInt) and value.node._expr.is_Symbol else ""
        for value in inputs
    )


@contextlib.contextmanager
def _called_with(sizes: Mapping[str, int], environment: Any) -> Generator[None]:
    """Inside, a graph is read as if Dynamo had traced it in a call of these sizes."""

    def node(self: Any) -> SymNode:
        known = {each: sympy.Integer(sizes[str(each)]) for each in self.expr.free_symbols if str(each) in sizes}
        value = self.expr.xreplace(known)
        return SymNode(self.expr, environment, self.pytype, int(value) if known and value.is_number else self.hint)

    if not sizes:
        yield
        return
    with mock.patch.object(_SymNodePickleData, "_to_sym_node", node):
        yield
    values = getattr(environment, "backed_var_to_val", None)  # 2.13
    values = environment.var_to_val if values is None else values
    values.update({symbol: sympy.Integer(sizes[str(symbol)]) for symbol in values if str(symbol) in sizes})


@contextlib.contextmanager
def unpacked(data: bytes, sizes: Mapping[str, int] | None = None) -> Generator[Shipped]:
    """Inside, the process is as the one that packed a graph, as far as its compilation depends on that.

    Args:
        data: what `pack` returned.
        sizes: those of the call that it is compiled for, by symbol; without them, those of the call that was traced.

    Raises:
        ShippingError: the bytes name something that this process does not have.
    """
    config, state, modules, body = pickle.loads(data)
    with contextlib.ExitStack() as stack:
        for name, values in config.items():
            stack.enter_context(importlib.import_module(name).patch(values))
        stack.enter_context(_restored(state))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        try:
            for name in modules:
                importlib.import_module(name)
            with _called_with(sizes or {}, mode.shape_env):
                content: Any = GraphPickler.loads(body, mode)
        except Exception as error:
            raise ShippingError(f"it needs what only this process has ({type(error).__name__}: {error})") from error
        gm: GraphModule = content["graph"]
        for module in gm.modules():
            if isinstance(module, GraphModule):
                module.recompile()  # their code is that of a class, which is not pickled
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, source, value in zip(placeholders, content["sources"], content["inputs"], strict=True):
            node._dynamo_source, node.meta["example_value"] = source, value
        if content["parameters"] is not None:
            gm._param_name_to_source = content["parameters"]  # type: ignore[assignment]
        with torch.set_grad_enabled(content["grad"]):
            _describe(gm, content["inputs"])
        identity = content["compile_id"]
        scene = Scene(
            inputs=tuple(content["inputs"]),
            fake_mode=mode,
            compile_context=None if identity is None else torch._guards.CompileContext(identity),
            grad=content["grad"],
            carried={},
        )
        yield Shipped(module=gm, scene=scene, extra=content["extra"])


def _describe(gm: GraphModule, inputs: Sequence[Any]) -> None:
    """Give the nodes fake values; what the graph writes to is not written to in the inputs."""
    done = effects(gm, inputs, gradients=torch.is_grad_enabled())
    describe(gm, [like(value) for value in inputs] if done.written else inputs)


def _check(gm: GraphModule, scene: Scene) -> None:
    if any(map(is_subclass, scene.inputs)):
        raise ShippingError("an input is a tensor that wraps others")
    if scene.carried.get("ddp_optimizer_ctx") is not None:
        raise ShippingError("DistributedDataParallel splits the graph")
    size = 0
    for node in all_nodes(gm):
        if node.target in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation):
            raise ShippingError("it calls a Triton kernel of the program")
        if node.op == "call_function" and "c10d" in str(node.target):
            raise ShippingError("it communicates with other processes")
    for tensor in (*gm.parameters(), *gm.buffers(), *(v for v in vars(gm).values() if isinstance(v, torch.Tensor))):
        size += tensor.untyped_storage().nbytes()
    if size > _MOST_BYTES:
        raise ShippingError("its weights are attributes of the graph")


def _reduced(gm: GraphModule) -> GraphModule:
    """The graph with the metadata that is read before autograd, and that is not made again from the inputs."""
    data_dependent = any("unbacked_bindings" in node.meta for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        kept = (*_KEPT, *_VALUES) if data_dependent and node.op != "placeholder" else _KEPT
        node.meta = {key: value for key, value in node.meta.items() if key in kept}
    for child in gm.children():
        if isinstance(child, GraphModule):
            for node in all_nodes(child):
                node.meta = {key: value for key, value in node.meta.items() if key in (*_KEPT, *_VALUES)}
    gm.meta = {}
    return gm


class _Pickler(GraphPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MetaTensorDesc) and obj.fake_mode is not None:
            # torch takes the mode out of a tensor's own description, and leaves it in that of its base.
            return _described, (type(obj), {**_fields(obj), "fake_mode": None})
        if isinstance(obj, type) and issubclass(obj, torch.nn.Module) and obj is not torch.nn.Module:
            return _class_named, (obj.__module__, obj.__qualname__)
        return super().reducer_override(obj)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _described(cls: Callable[..., Any], fields: dict[str, Any]) -> Any:
    return cls(**fields)


def _class_named(module: str, name: str) -> type:
    if module.startswith("torch."):
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    return type(name.rpartition(".")[2], (torch.nn.Module,), {"__module__": module, "__qualname__": name})


def _dumps(value: Any) -> bytes:
    stream = io.BytesIO()
    options = Options(ops_filter=None, node_metadata_key_filter=None)
    _Pickler(stream, options).dump(value)
    return stream.getvalue()


def _config_of(name: str) -> dict[str, Any]:
    """What a configuration has otherwise than by default."""
    config: Any = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that are deprecated
        values = config.save_config_portable()
        return {key: value for key, value in values.items() if value != config._config[key].default}


_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "cudnn": (
        lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        lambda value: _set(torch.backends.cudnn, ("enabled", "benchmark", "deterministic"), value),
    ),
    "mkldnn": (
        lambda: (torch.backends.mkldnn.enabled,),
        lambda value: _set(torch.backends.mkldnn, ("enabled",), value),
    ),
    "attention": (
        lambda: (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        lambda value: _set_attention(*value),
    ),
}


def _set(owner: Any, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(owner, name, value)


def _set_attention(flash: bool, efficient: bool, math: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(math)


def global_state() -> dict[str, Any]:
    """The global state that tracing and code generation read."""
    state = {name: read() for name, (read, _) in _SETTINGS.items()}
    state["autocast"] = {
        device: (torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in _AUTOCAST
        if torch.is_autocast_enabled(device)
    }
    return state


@contextlib.contextmanager
def _restored(state: dict[str, Any]) -> Generator[None]:
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    with contextlib.ExitStack() as stack:
        try:
            for name, (_, write) in _SETTINGS.items():
                if state[name] != before[name]:
                    write(state[name])
            for device, (dtype, cached) in state["autocast"].items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cached))
            yield
        finally:
            for name, (_, write) in _SETTINGS.items():
                if state[name] != before[name]:
                    write(before[name])
