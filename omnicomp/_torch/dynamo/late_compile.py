"""Compiling a Dynamo graph after Dynamo's own compilation of it is over: what has to be kept, and what to restore.

AOTAutograd compiles a backward in the same way when it is first needed. A forward needs more: fake inputs (the real
ones must not be kept alive), a tracing context of its own, and an answer to what the compilation finds out about
symbolic sizes, as Dynamo's guards are made by then.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch._guards
from torch._dynamo.convert_frame import preserve_global_state
from torch._dynamo.utils import (
    clear_torch_function_mode_stack,
    dynamo_timed,
    get_metrics_context,
    get_torch_function_mode_stack,
    set_torch_function_mode_stack,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from omnicomp import records


@records.dataclass(frozen=True, kw_only=True)
class SizeGuards:
    """What a late compilation found out about symbolic sizes."""

    # Whether a call's inputs have such sizes; None if there is nothing to check.
    holds: Callable[[Sequence[Any]], bool] | None
    text: str = ""  # the conditions, for people


@records.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is kept of a compilation by Dynamo."""

    inputs: tuple[Any, ...]
    fake_mode: Any
    compile_context: Any
    grad: bool
    carried: dict[str, Any]


# Set by Dynamo before it calls the backend, where the version has them.
_CARRIED = ("module_context", "ddp_optimizer_ctx", "hop_dispatch_set_cache", "cudagraph_annotation")


def is_tracing() -> bool:
    """Whether Dynamo is compiling, so that a scene can be kept."""
    context = torch._guards.TracingContext.try_get()
    return context is not None and context.fake_mode is not None


def keep_scene(inputs: Sequence[Any]) -> Scene:
    """Keep what a compilation after Dynamo's needs; called while Dynamo compiles, before anything else does.

    Args:
        inputs: what Dynamo passed to the backend; real tensors become the fake ones that Dynamo traced with.

    Raises:
        RuntimeError: Dynamo is not compiling.
    """
    context = torch._guards.TracingContext.get()
    mode: Any = context.fake_mode

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_fake(value):
            return value
        known = context.tensor_to_context.get(value)
        source = known.tensor_source if known is not None else None
        return mode.from_tensor(value, symbolic_context=known, source=source, trace=False)

    with mode:
        fakes = tuple(map(fake, inputs))
    return Scene(
        inputs=fakes,
        fake_mode=mode,
        compile_context=torch._guards.CompileContext.try_get(),
        grad=torch.is_grad_enabled(),
        carried={name: getattr(context, name) for name in _CARRIED if hasattr(context, name)},
    )


def compile_late(scene: Scene, build: Callable[[Sequence[Any]], Any]) -> tuple[Any, SizeGuards]:
    """Compile outside of Dynamo's compilation, with everything as it was there.

    Random numbers and modes of the caller are left as they are.

    Returns:
        What `build` returned, and what it found out about sizes.
    """
    environment = scene.fake_mode.shape_env
    known = len(environment.guards) if environment is not None else 0
    context = torch._guards.TracingContext(scene.fake_mode)
    for name, value in scene.carried.items():
        setattr(context, name, value)

    def inside() -> Any:
        modes = get_torch_function_mode_stack()
        clear_torch_function_mode_stack()
        try:
            with (
                torch._guards.compile_context(scene.compile_context),
                torch._guards.tracing(context),
                _disable_current_modes(),
                torch.set_grad_enabled(scene.grad),
                get_metrics_context(),
                dynamo_timed("omnicomp.compile_late", log_pt2_compile_event=True),
            ):
                return build(scene.inputs)
        finally:
            set_torch_function_mode_stack(modes)

    built = preserve_global_state(inside)()
    return built, _size_guards(scene, known)


def _size_guards(scene: Scene, known: int) -> SizeGuards:
    """The guards on sizes since the first `known`, as a function of a call's inputs."""
    environment: Any = scene.fake_mode.shape_env
    if environment is None or len(environment.guards) == known:
        return SizeGuards(holds=None)
    guards = environment.guards[known:]
    text = " and ".join(dict.fromkeys(str(guard.expr) for guard in guards))
    positions = [i for i, v in enumerate(scene.inputs) if isinstance(v, torch.SymInt) and v.node.has_hint()]
    symints = [scene.inputs[i] for i in positions]
    seen = {s.node.expr for s in symints if isinstance(s.node.expr, sympy.Symbol)}
    seen |= {s.node._expr for s in symints if isinstance(s.node._expr, sympy.Symbol)}
    if any(guard.expr.free_symbols - seen for guard in guards):
        return SizeGuards(holds=_Holds("False", ()), text=f"{text}, which no input tells")
    code = environment.produce_guards_expression(placeholders=symints, guards=guards)
    if code is None:
        return SizeGuards(holds=None)
    return SizeGuards(holds=_Holds(code, tuple(positions)), text=text)


_evaluator = functools.cache(ShapeEnv)  # evaluating such a condition reads nothing of it


@records.dataclass(frozen=True)
class _Holds:
    """Whether the sizes among a call's inputs are as a condition in Python says; it pickles."""

    code: str
    positions: tuple[int, ...]

    def __call__(self, args: Sequence[Any]) -> bool:
        return bool(_evaluator().evaluate_guards_expression(self.code, [args[i] for i in self.positions]))


def hinted(value: Any) -> Any:
    """The number that a symbolic size has in the call that is compiled for; other values as they are. Adds no guard."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def is_subclass(value: Any) -> bool:
    """Whether a value is a tensor that wraps others, such as a distributed one."""
    return is_traceable_wrapper_subclass(value)


def scene_of(inputs: Sequence[Any]) -> Scene:
    """The scene of a graph that no compilation by Dynamo is under way for.

    Args:
        inputs: fake tensors of one mode and symbolic sizes; or real tensors, whose sizes the graph is compiled for.
    """
    mode: Any = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    if mode is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        inputs = [mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in inputs]
    return Scene(
        inputs=tuple(inputs),
        fake_mode=mode,
        compile_context=torch._guards.CompileContext.try_get(),
        grad=torch.is_grad_enabled(),
        carried={},
    )
