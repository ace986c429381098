"""Overrides: hand-written kernels that take the place of an operator or of a pattern of operators.

An override is a custom operator, so it stays inside Inductor's graph as an opaque node: using one does not cut the
model in pieces. It is declared with `@omnicomp.override(...)`, by import or through the entry-point group
`omnicomp.overrides`; two of one name are an error.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.patterns import Match, build_pattern
from omnicomp.errors import OverrideError
from omnicomp.graphs import fake_value, module_path, op_name, source_line
from omnicomp.lowerings.base import LoweringContext
from omnicomp.timeline import NodePlacement, Reason

__all__ = ["GROUP", "Override", "apply_overrides", "digest", "override", "registered", "unregister"]

log = logging.getLogger("omnicomp.overrides")

GROUP: Final = "omnicomp.overrides"
Check = Callable[..., Reason | None]
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """A registered override.

    Attributes:
        name: unique name.
        function: the Python function that was decorated.
        operators: the custom operators that it calls; a node with one of these targets is on this override.
        op: the operator that it replaces, for the operator form.
        reference: the computation that it replaces, for the pattern form.
        example: makes example tensors for tracing `reference`.
        scalars: example values of the parameters of `reference` that are numbers.
        devices: device types that it has kernels for.
        dtypes: dtypes that it takes; empty for any.
        check: called with the fake arguments; returns None, or the reason why it refuses them.
        sources: files whose content changes what it computes, for the compile caches' keys.
        doc: first line of its documentation.
    """

    name: str
    function: Function
    operators: tuple[Any, ...]
    op: Any = None
    reference: Function | None = None
    example: Callable[[], Sequence[torch.Tensor]] | None = None
    scalars: Mapping[str, int | float] = dataclasses.field(default_factory=dict[str, int | float])
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    check: Check | None = None
    sources: tuple[str, ...] = ()
    doc: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the override's source and declaration."""
        value = hashlib.sha256(repr((self.name, str(self.op), self.devices, [str(d) for d in self.dtypes])).encode())
        for item in (self.function, self.reference, self.check):
            if item is not None:
                value.update(_source(item))
        for path in self.sources:
            value.update(Path(path).read_bytes())
        return value.hexdigest()[:16]

    def refusal(self, *args: Any, **kwargs: Any) -> Reason | None:
        """Why the override does not take these (fake) arguments: device, dtype, or its own check; None if it does."""
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            if self.devices and tensor.device.type not in self.devices:
                return self._refused(f"device={tensor.device.type}", f"one of {', '.join(self.devices)}")
            if self.dtypes and tensor.is_floating_point() and tensor.dtype not in self.dtypes:
                return self._refused(f"dtype={tensor.dtype}", f"one of {', '.join(map(str, self.dtypes))}")
        return self.check(*args, **kwargs) if self.check is not None else None

    def _refused(self, observed: str, needed: str) -> Reason:
        return Reason(
            code="override_refused",
            by=self.name,
            sentence=f"the override {self.name} has no kernel for these arguments",
            observed=observed,
            needed=needed,
            lever=f"bring the inputs to {needed}, or declare more in @omnicomp.override",
        )


_registry: dict[str, Override] = {}
_lock = threading.RLock()


def override(
    *,
    op: Any = None,
    reference: Function | None = None,
    example: Callable[[], Sequence[torch.Tensor]] | None = None,
    scalars: Mapping[str, int | float] | None = None,
    operators: Sequence[Any] = (),
    name: str | None = None,
    devices: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] = (),
    check: Check | None = None,
    sources: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as an override.

    Two forms:

    * operator form, `op=torch.ops.aten.foo.default`: the function has the operator's signature and must not change its
      inputs. It becomes a custom operator of the same schema and takes that operator's place in every post-autograd
      graph (forward, backward and inference).
    * pattern form, `reference=f, example=lambda: (tensor, …), operators=[torch.ops.my.op.default]`: wherever a graph
      computes what the plain torch function `f` computes, the decorated function is called instead; it must call the
      custom operators that it names. Forward only: it is looked for in inference graphs.

    Args:
        op: the operator to replace.
        reference: the computation to replace; its parameters are the override's.
        example: makes example tensors for the tensor parameters of `reference`, in order.
        scalars: an example value for each number parameter of `reference`, occurring nowhere else in it.
        operators: the custom operators that the function calls (pattern form).
        name: unique name; the function's by default.
        devices: device types with a kernel; any if empty.
        dtypes: floating-point dtypes with a kernel; any if empty.
        check: gets the fake arguments and returns None or a `Reason` with code `override_refused`.
        sources: further files that the kernels are made of.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        OverrideError: the declaration is incomplete or the name is taken.
    """
    if (op is None) == (reference is None):
        raise OverrideError("an override takes the place of either op= or reference=; give exactly one of them")
    if op is not None and not isinstance(op, torch._ops.OpOverload):
        raise OverrideError(f"op= takes an operator overload such as torch.ops.aten.topk.default, not {op!r}")
    if reference is not None and (example is None or not operators):
        raise OverrideError("the pattern form needs example= (tensors to trace reference= with) and operators=")

    def register(function: Function) -> Function:
        chosen = name or function.__name__
        with _lock:
            if chosen in _registry:
                raise OverrideError(f"there already is an override named {chosen!r}; choose another name")
            _registry[chosen] = Override(
                name=chosen,
                function=function,
                operators=(_define(chosen, op, function),) if op is not None else tuple(operators),
                op=op,
                reference=reference,
                example=example,
                scalars=dict(scalars or {}),
                devices=tuple(devices),
                dtypes=tuple(dtypes),
                check=check,
                sources=tuple(sources),
                doc=(inspect.getdoc(function) or "").split("\n", 1)[0],
            )
        return function

    return register


_library: Final = torch.library.Library("omnicomp_override", "DEF")
_generation: dict[str, int] = {}


def _define(name: str, op: torch._ops.OpOverload, function: Function) -> Any:
    """Make a custom operator with the schema of `op` that runs `function`; its fake kernel is `op` itself."""
    if op._schema.is_mutable:
        raise OverrideError(f"{op} changes its inputs; only operators that do not can be overridden")
    # A name that was unregistered can come back, but the dispatcher's definitions stay: they are numbered.
    number = _generation[name] = _generation.get(name, -1) + 1
    unique = name if number == 0 else f"{name}_{number}"
    schema = str(op._schema)
    _library.define(unique + schema[schema.index("(") :])
    _library.impl(unique, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"omnicomp_override::{unique}", op, lib=_library)
    return getattr(torch.ops.omnicomp_override, unique).default


def unregister(name: str) -> None:
    """Forget an override.

    Raises:
        OverrideError: there is none of that name.
    """
    with _lock:
        if _registry.pop(name, None) is None:
            raise OverrideError(f"there is no override named {name!r}")
        _patterns.pop(name, None)


@functools.cache
def _discover() -> dict[str, str]:
    """Import the entry points of the group; what fails is kept with its reason."""
    errors: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - someone else's package; kept as its reason and logged
            errors[entry.name] = f"{type(error).__name__}: {error}"
            log.warning("the override %s can't be loaded: %s", entry.name, errors[entry.name])
    return errors


def registered() -> tuple[Override, ...]:
    """All overrides, in the order of registration."""
    _discover()
    with _lock:
        return tuple(_registry.values())


def digest(disabled: Sequence[str]) -> str:
    """Hash of the enabled overrides, for the compile caches' keys."""
    value = hashlib.sha256()
    for item in registered():
        if item.name not in disabled:
            value.update(item.digest.encode())
    return value.hexdigest()[:16]


def apply_overrides(module: GraphModule, context: LoweringContext) -> tuple[NodePlacement, ...]:
    """Put overrides into a post-autograd graph, in place.

    Returns:
        The places at which an override matched but refused, with its reason.
    """
    refused: list[NodePlacement] = []
    changed = False
    for item in registered():
        if item.name in context.policy.disable_overrides:
            continue
        if item.op is not None:
            changed |= _replace_operator(item, module, refused)
        elif context.part == "inference":
            changed |= _replace_pattern(item, module, refused)
    if changed:
        module.graph.lint()
        module.recompile()
    return tuple(refused)


def _replace_operator(item: Override, module: GraphModule, refused: list[NodePlacement]) -> bool:
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=item.op):
        args = torch.fx.map_arg(node.args, fake_value)
        kwargs = torch.fx.map_arg(dict(node.kwargs), fake_value)
        reason = item.refusal(*args, **kwargs)
        if reason is not None:
            refused.append(_declined(node, reason))
            continue
        node.target = item.operators[0]
        changed = True
    return changed


_patterns: dict[str, Callable[[torch.fx.Graph], int]] = {}
_active: Final = threading.local()


def _replace_pattern(item: Override, module: GraphModule, refused: list[NodePlacement]) -> bool:
    with _lock:
        rewrite = _patterns.get(item.name)
        if rewrite is None:
            assert item.reference is not None
            assert item.example is not None
            rewrite = build_pattern(
                item.reference, item.function, item.example(), item.scalars, functools.partial(_accepts, item)
            )
            _patterns[item.name] = rewrite
    _active.refused, _active.origins = refused, {}
    try:
        changed = rewrite(module.graph) > 0
        for node in module.graph.nodes if changed else ():
            if node.target in item.operators and not node.meta.get("stack_trace"):
                # The matcher makes new nodes without the user's source line; give them that of what they replace.
                node.meta.update(_active.origins.get(node.args[0], {}))
        return changed
    finally:
        _active.refused, _active.origins = None, {}


def _accepts(item: Override, match: Match, values: dict[str, Any]) -> bool:
    reason = item.refusal(*(fake_value(value) for value in values.values()))
    anchor = next(n for n in reversed(match.nodes) if n.op == "call_function" and n.target is not operator.getitem)
    if reason is None:
        first = next(iter(values.values()))
        _active.origins[first] = {k: anchor.meta[k] for k in ("stack_trace", "nn_module_stack") if k in anchor.meta}
        return True
    refused: list[NodePlacement] | None = getattr(_active, "refused", None)
    if refused is not None:
        refused.append(_declined(anchor, reason))
    return False


def _declined(node: Node, reason: Reason) -> NodePlacement:
    source = source_line(node)
    located = dataclasses.replace(reason, node=f"{node.name} ({op_name(node)})", source=source)
    return NodePlacement(
        node=node.name,
        op=op_name(node),
        lowering="inductor",
        source=source,
        module=module_path(node),
        chain=(located,),
    )


def _source(item: Any) -> bytes:
    try:
        return inspect.getsource(item).encode()
    except (OSError, TypeError):
        return repr(item).encode()
