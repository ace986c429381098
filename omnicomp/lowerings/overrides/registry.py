"""The registry of overrides: hand-written kernels in place of an operator, a pattern, or a whole block.

An override is a custom operator, so it stays inside Inductor's graph as an opaque node: using one does not cut the
model in pieces. It is declared with `@omnicomp.override(...)`, by import or through the entry-point group
`omnicomp.overrides`; two of one name are an error.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from omnicomp._torch.autograd import overrides as torch_overrides
from omnicomp._torch.autograd.overrides import OpOverload
from omnicomp._torch.inductor.own_context import apart
from omnicomp.errors import OptionError, OverrideError, nearest
from omnicomp.lowerings.overrides.declaration import FORWARD_ONLY, Check, Function
from omnicomp.lowerings.overrides.declaration import Override as Override
from omnicomp.lowerings.overrides.trust import distrusted
from omnicomp.options.checks import listed
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger

log = logger("omnicomp.overrides")

GROUP: Final = "omnicomp.overrides"

_SHIPPED: Final = tuple(
    f"omnicomp.lowerings.overrides.{name}" for name in ("int8_linear", "linear_cross_entropy", "softmax_topk")
)

_registry: dict[str, Override] = {}
_lock = new_lock()


def override(
    *,
    op: Any = None,
    module: str | type | None = None,
    search: Function | None = None,
    reference: Function | None = None,
    example: Callable[[], Sequence[torch.Tensor]] | None = None,
    scalars: Mapping[str, int | float] | None = None,
    operators: Sequence[Any] = (),
    name: str | None = None,
    devices: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] = (),
    training: bool | str | None = None,
    backward: Function | None = None,
    setup_context: Function | None = None,
    excerpt: Function | None = None,
    mutates: Sequence[str] | None = None,
    priority: int = 0,
    check: Check | None = None,
    capturable: bool = False,
    sources: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Register the decorated function as an override.

    Four forms:

    * operator form, `op=torch.ops.aten.foo.default`: the function has the operator's signature and must not change its
      inputs. It becomes a custom operator of the same schema and takes that operator's place in every post-autograd
      graph (forward, backward and inference).
    * pattern form, `reference=f, example=lambda: (tensor, …), operators=[torch.ops.my.op.default]`: wherever a
      post-autograd graph computes what the plain torch function `f` computes, the decorated function is called
      instead; it must call the custom operators that it names.
    * tag form, `module="LlamaMLP"`, `module="layers.*.mlp"` or `module=LlamaMLP`: a call of the operator takes the
      place of everything that such a module computes, before autograd. The decorated function is a custom operator
      (`torch.library.custom_op`, `triton_op`) or an annotated function, which becomes one and needs `reference` as its
      fake kernel. Its parameters without a default take the activations that come into the block, in the order in
      which it first uses them; a parameter named after one of the block's own (`up_weight` for `up.weight`) takes
      that. It returns what the rest of the program uses of the block, in the order in which it is made.
    * search form, `search=find, reference=f, operators=[torch.ops.my.op.default]`: `find(graph_module)` reads a Dynamo
      graph, before autograd, and yields an `omnicomp.lowerings.overrides.search.Found` for each place, or an `Ended`
      where reading ended. The first operator is what `Found.write` calls; `f` computes what that does, with its
      parameters. For computations that are written in many ways, or that have a backward of their own.

    Args:
        op: the operator to replace.
        module: a module class; or the name of one, plain or with its module; or the end of a qualified name in the
            model, with the wildcards of `fnmatch` within each step.
        search: finds matches (search form).
        reference: what the override computes, in plain torch, with the override's parameters; required in the pattern
            form, where it is the pattern. By default it is the matched computation.
        example: makes example tensors for the tensor parameters of `reference`, in order (pattern form).
        scalars: an example value for each number parameter of `reference`, occurring nowhere else in it (pattern form).
        operators: the custom operators that the function calls (pattern and search form); further ones, such as a
            backward's kernel (tag form).
        name: unique name; the function's by default.
        devices: device types with a kernel; any if empty.
        dtypes: floating-point dtypes with a kernel; any if empty.
        training: True, or `"forward only"`, which refuses a graph that is to be differentiated. By default, an operator
            is replaced everywhere, a pattern only in inference, and a block in training if its operator has a
            derivative. Operators and patterns are replaced after autograd: their gradients are those of the user's own
            program, and no derivative of the override's is asked for.
        backward: the derivative, as `torch.library.register_autograd` takes it (tag form).
        setup_context: what it saves for `backward`, as `torch.library.register_autograd` takes it.
        excerpt: gets the arguments of a call of the operator, and returns those of a smaller one, as a tuple, or None.
            Verification compares the smaller call with `reference`, where the whole call would take much memory;
            an error of the whole call should show in it, too. Not for operators that change their inputs.
        mutates: names of the arguments that the operator changes; by default what its schema says (tag form).
        priority: of two overrides for one place the one with the higher number is taken, and of equal ones the one
            that was registered first.
        check: gets the fake arguments and returns None or a `Reason` with code `override_refused`. In the tag form,
            one that has a parameter `block` also gets the `omnicomp.lowerings.overrides.blocks.Block`.
        capturable: whether all that a call does on a GPU is in the kernels that it launches, so that a CUDA graph may
            replay them without the function. What `torch.library.triton_op` made needs no declaration.
        sources: further files that the kernels are made of.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        OverrideError: the declaration is incomplete or contradicts itself, or the name is taken.
    """
    _check_form(op, module, search, reference, example, operators)
    _check_values(devices, dtypes, check)
    if training not in (None, True, FORWARD_ONLY):
        raise OverrideError(f"training= takes True or {FORWARD_ONLY!r}, not {training!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OverrideError(f"priority= takes a whole number, not {priority!r}")
    if backward is not None and (module is None or training == FORWARD_ONLY):
        raise OverrideError(
            "backward= belongs to an override with module= that may be used in training; an operator or a pattern is "
            "replaced after autograd, with the gradient of the program itself"
        )
    if setup_context is not None and backward is None:
        raise OverrideError("setup_context= prepares backward=, which is missing")
    if excerpt is not None and mutates:
        raise OverrideError("excerpt= is for operators that change none of their inputs, and mutates= names some")

    _load_shipped()

    def register(function: Function) -> Function:
        plain = torch_overrides.python_function(function)
        chosen = name or plain.__name__
        with _lock:
            if chosen in _registry:
                raise OverrideError(f"there already is an override named {chosen!r}; choose another name")
            if op is not None:
                called = (_define(chosen, op, function),)
            elif module is not None:
                called = (_operator(chosen, function, reference, mutates), *operators)
            else:
                called = tuple(operators)
            changed = _mutates(chosen, called, mutates, allowed=module is not None)
            if backward is not None:
                _register_backward(chosen, called[0], backward, setup_context)
            _registry[chosen] = Override(
                name=chosen,
                declared=function,
                function=plain,
                operators=called,
                op=op,
                module=module,
                search=search,
                reference=reference,
                example=example,
                scalars=dict(scalars or {}),
                devices=tuple(devices),
                dtypes=tuple(dtypes),
                training=training,
                mutates=changed,
                priority=priority,
                backward=backward,
                setup_context=setup_context,
                excerpt=excerpt,
                check=check,
                capturable=capturable,
                sources=tuple(sources),
                doc=(inspect.getdoc(plain) or "").split("\n", 1)[0],
            )
        return function

    return register


def _check_form(op: Any, module: Any, search: Any, reference: Any, example: Any, operators: Sequence[Any]) -> None:
    if search is not None:
        if op is not None or module is not None:
            raise OverrideError("an override takes the place of one of op=, module= and search=; give exactly one")
        if not callable(search) or reference is None or not operators:
            raise OverrideError("the search form needs a function, and reference= and operators=")
        return
    if op is not None and module is not None:
        raise OverrideError("an override takes the place of either op= or module=; give exactly one of them")
    if op is None and module is None and reference is None:
        raise OverrideError("an override takes the place of op=, module= or reference=; give exactly one of them")
    if op is not None and not isinstance(op, OpOverload):
        raise OverrideError(f"op= takes an operator overload such as torch.ops.aten.topk.default, not {op!r}")
    if module is not None and not (isinstance(module, str) and module) and not _is_module_class(module):
        raise OverrideError(f"module= takes a class of modules, the name of one or a path in the model, not {module!r}")
    if op is None and module is None and (example is None or not operators):
        raise OverrideError("the pattern form needs example= (tensors to trace reference= with) and operators=")
    if reference is not None and not callable(reference):
        raise OverrideError(f"reference= takes a function, not {reference!r}")


def _check_values(devices: Any, dtypes: Any, check: Any) -> None:
    if isinstance(devices, str) or not all(isinstance(each, str) for each in devices):
        raise OverrideError(f"devices= takes device types such as ('cpu', 'cuda'), not {devices!r}")
    if isinstance(dtypes, torch.dtype) or not all(isinstance(each, torch.dtype) for each in dtypes):
        raise OverrideError(f"dtypes= takes dtypes such as (torch.float32, torch.bfloat16), not {dtypes!r}")
    if check is not None and not callable(check):
        raise OverrideError(f"check= takes a function, not {check!r}")


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


_library: Final = torch.library.Library("omnicomp_override", "DEF")
_generation: dict[str, int] = {}


def _unique(name: str) -> str:
    """A name for an operator: one that was unregistered can come back, but the dispatcher's definitions stay."""
    number = _generation[name] = _generation.get(name, -1) + 1
    return name if number == 0 else f"{name}_{number}"


def _define(name: str, op: OpOverload, function: Function) -> Any:
    """Make a custom operator with the schema of `op` that runs `function`; its fake kernel is `op` itself."""
    if op._schema.is_mutable:
        raise OverrideError(f"{op} changes its inputs; only operators that do not can be overridden")
    needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    by_name = {argument.name: None for argument in needed if argument.kwarg_only}
    try:
        plain = inspect.signature(torch_overrides.python_function(function))
        plain.bind(*(None for argument in needed if not argument.kwarg_only), **by_name)
    except TypeError as error:
        raise OverrideError(f"{name!r} does not take the arguments of {op._schema}: {error}") from None
    unique = _unique(name)
    schema = str(op._schema)
    _library.define(unique + schema[schema.index("(") :])
    torch_overrides.put_kernel(_library, unique, function, "CompositeExplicitAutograd")
    torch_overrides.put_fake(_library, unique, op)
    return getattr(torch.ops.omnicomp_override, unique).default


def _operator(name: str, function: Any, reference: Function | None, mutates: Sequence[str] | None) -> Any:
    """The operator of a block's override: the decorated one, or one made of an annotated function."""
    operator = torch_overrides.operator_of(function)
    if operator is not None:
        return operator
    if reference is None:
        raise OverrideError(
            f"{name!r} is a plain function: give reference=, a torch function with the same parameters that also tells "
            "the shapes of its result, or make it a torch.library.custom_op with register_fake"
        )
    try:
        made = torch.library.custom_op(
            f"omnicomp_override::{_unique(name)}", function, mutates_args=tuple(mutates or ())
        )
    except ValueError as error:
        first = str(error).split("\n", 1)[0]
        raise OverrideError(f"{name!r} can't be made an operator: {first}") from None
    torch.library.register_fake(made, reference)
    return torch_overrides.operator_of(made)


def _mutates(name: str, called: Sequence[Any], declared: Sequence[str] | None, *, allowed: bool) -> tuple[str, ...]:
    """Names of the arguments that the operators change, which the declaration may repeat but not contradict."""
    found = tuple(dict.fromkeys(n for operator in called for n in torch_overrides.mutated_arguments(operator)))
    if declared is not None and set(declared) != set(found):
        says = ", ".join(found) or "nothing"
        raise OverrideError(f"{name!r} declares mutates={tuple(declared)!r}, but its operator's schema says {says}")
    if found and not allowed:
        raise OverrideError(
            f"{name!r} changes its argument {found[0]}; only an override with module= may change its inputs"
        )
    return found


def _register_backward(name: str, operator: Any, backward: Function, setup_context: Function | None) -> None:
    try:
        torch.library.register_autograd(operator, backward, setup_context=setup_context)
    except (NotImplementedError, RuntimeError) as error:
        first = str(error).split("\n", 1)[0]
        raise OverrideError(f"{name!r} can't be given the derivative backward=: {first}") from error


def unregister(name: str) -> None:
    """Forget an override.

    Raises:
        OverrideError: there is none of that name.
    """
    _load_shipped()
    with _lock:
        if _registry.pop(name, None) is None:
            raise OverrideError(f"there is no override named {name!r}")


_shipped = False
_loading: Final = threading.local()


def _load_shipped() -> None:
    """Import the overrides that ship, before any other is registered or asked for; no import of the package waits."""
    global _shipped
    if _shipped or _loading.__dict__.get("under_way"):
        return  # they are there, or one of them registers itself
    _loading.under_way = True
    try:
        torch_overrides.tell_inspect(*_SHIPPED)
        for name in _SHIPPED:  # where another thread imports one, this waits
            apart(functools.partial(importlib.import_module, name))
        _shipped = True
    finally:
        _loading.under_way = False


@functools.cache
def broken() -> dict[str, str]:
    """Import the entry points of the group; returns the errors of those that cannot be imported, by name."""
    _load_shipped()
    errors: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            apart(entry.load)  # it may be the middle of a compilation, where tensors are fake
        except Exception as error:  # noqa: BLE001 - someone else's package; kept, logged, and put into the timeline
            errors[entry.name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            log.warning("the override %s can't be loaded: %s", entry.name, errors[entry.name])
    return errors


def registered() -> tuple[Override, ...]:
    """All overrides, in the order of registration."""
    broken()
    with _lock:
        return tuple(_registry.values())


def enabled(disabled: Sequence[str], chosen: Sequence[str] | None = None) -> tuple[Override, ...]:
    """The overrides that a policy allows, in the order in which they are asked: by priority, then as registered."""
    items = (i for i in registered() if i.name not in disabled and (chosen is None or i.name in chosen))
    return tuple(sorted(items, key=lambda item: -item.priority))


def digest(disabled: Sequence[str], chosen: Sequence[str] | None = None) -> str:
    """Hash of the enabled overrides, in the order in which they are asked, for the compile caches' keys."""
    value = hashlib.sha256()
    for item in enabled(disabled, chosen):
        value.update(item.digest.encode())
        # What was compiled before an override was found wrong calls it, and must not come back from a cache.
        devices = item.devices or ("cpu", "cuda")
        if any(distrusted(item, torch.device(each)) is not None for each in devices if _is_device(each)):
            value.update(b"found wrong")
    return value.hexdigest()[:16]


def _is_device(type: str) -> bool:
    """Whether torch knows a type of devices of this name; one from outside may not have been named yet."""
    try:
        return bool(torch.device(type).type)
    except RuntimeError:
        return False


def select(entries: Sequence[Any]) -> tuple[str, ...]:
    """The overrides that a list asks for, by name and sorted.

    Args:
        entries: names, decorated functions, or import paths of modules that declare overrides; those are imported.

    Raises:
        OverrideError: an entry is none of these.
    """
    return tuple(sorted({name for entry in entries for name in _select(entry)}))


def check_overrides(name: str, value: Any) -> tuple[str, ...]:
    """The option `overrides`: a list for `select`.

    Raises:
        OptionError: it is no list, or an entry is unknown.
    """
    try:
        return select(listed(name, value, "overrides"))
    except OverrideError as error:
        raise OptionError(f"{name}: {error}") from error


def _select(entry: Any) -> list[str]:
    items = registered()
    if not isinstance(entry, str):
        found = [item.name for item in items if entry is item.declared or entry is item.function]
        if not found:
            shown = getattr(entry, "__name__", None) or repr(entry)
            raise OverrideError(f"{shown} is not an override; decorate it with @omnicomp.override")
        return found
    if any(item.name == entry for item in items):
        return [entry]
    if not _is_importable(entry):
        names = [item.name for item in items]
        failed = broken().get(entry)
        hint = f"; the plugin of that name can't be loaded: {failed}" if failed else nearest(entry, names)
        raise OverrideError(f"there is no override named {entry!r}{hint or '; known ones are ' + ', '.join(names)}")
    try:
        importlib.import_module(entry)
    except Exception as error:
        first = str(error).split("\n", 1)[0]
        raise OverrideError(f"the module {entry!r} can't be imported: {type(error).__name__}: {first}") from error
    found = [i.name for i in registered() if f"{i.function.__module__}.".startswith(f"{entry}.")]
    if not found:
        raise OverrideError(f"the module {entry!r} declares no override")
    return found


def _is_importable(name: str) -> bool:
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent that is missing, or a module without a spec, such as __main__
        return False
