"""The declaration of an override: the computation that it replaces, its operator, and where it may be used."""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch

from omnicomp._torch.autograd import overrides as torch_overrides
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp.timeline import Reason

Check = Callable[..., Reason | None]
Function = Callable[..., Any]

FORWARD_ONLY: Final = "forward only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Override:
    """A registered override.

    Attributes:
        name: unique name.
        declared: the decorated object.
        function: its Python function.
        operators: the custom operators that it calls; a node with one of these targets is on this override. In the
            operator and tag forms the first is the replacement.
        op: the operator that it replaces, for the operator form.
        module: a class of modules, the name of one, or a path with wildcards, for the tag form.
        search: finds matches in a Dynamo graph, for the search form.
        reference: the computation that it replaces; None for the matched computation itself.
        example: makes example tensors for tracing `reference`, for the pattern form.
        scalars: example values of the parameters of `reference` that are numbers, for the pattern form.
        devices: device types that it has kernels for.
        dtypes: dtypes that it takes; empty for any.
        training: True, `forward only`, or None for the default of its operator.
        mutates: names of the arguments that its operator changes.
        priority: the higher one is asked first.
        backward: the derivative that was given with the declaration.
        setup_context: the function that saves values for it.
        excerpt: makes the arguments of a smaller call of the operator, which is verified in the place of a large one.
        check: called with the fake arguments; returns None, or the reason why it refuses them.
        capturable: whether a CUDA graph may replay the kernels of a call.
        sources: files whose content changes what it computes, for the compile caches' keys.
        doc: first line of its documentation.
    """

    name: str
    declared: Any
    function: Function
    operators: tuple[Any, ...]
    op: Any = None
    module: str | type | None = None
    search: Function | None = None
    reference: Function | None = None
    example: Callable[[], Sequence[torch.Tensor]] | None = None
    scalars: Mapping[str, int | float] = dataclasses.field(default_factory=dict[str, int | float])
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    training: bool | str | None = None
    mutates: tuple[str, ...] = ()
    priority: int = 0
    backward: Function | None = None
    setup_context: Function | None = None
    excerpt: Function | None = None
    check: Check | None = None
    capturable: bool = False
    sources: tuple[str, ...] = ()
    doc: str = ""

    @property
    def form(self) -> str:
        """`operator`, `pattern`, `tag` or `search`."""
        if self.op is not None:
            return "operator"
        if self.search is not None:
            return "search"
        return "pattern" if self.module is None else "tag"

    @property
    def trains(self) -> bool:
        """Whether it may be used in a graph that is to be differentiated.

        In the operator and pattern forms, autograd has derived the backward from the user's program before an override
        is put into it, so no derivative of its own is needed: this is the declared value, and without a declaration
        True for an operator, which is replaced by what equals it everywhere, and False for a pattern. In the tag and
        search forms the operator itself is differentiated, so that a derivative must have been registered for it; this
        is looked up here, as it may be registered after the override.
        """
        if self.training == FORWARD_ONLY:
            return False
        if self.form in ("tag", "search"):
            return torch_overrides.has_backward(self.operators[0])
        return self.training is True or self.form == "operator"

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the override's source and declaration."""
        cls = self.module
        module = f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else cls
        declared = (self.name, str(self.op), self.devices, [str(d) for d in self.dtypes], module)
        declared += (self.trains, self.mutates, self.priority)
        value = hashlib.sha256(repr(declared).encode())
        own = (self.reference, self.check, self.backward, self.setup_context, self.excerpt, self.search)
        own = (*torch_overrides.functions_of(self.declared), *own)
        # Those that ship are declared by `sources` as whole files, which are read faster than parsed.
        for item in () if str(self.function.__module__).startswith("omnicomp.") else own:
            if item is not None:
                value.update(_source(item))
        for path in self.sources:
            value.update(Path(path).read_bytes())
        return value.hexdigest()[:16]

    def refusal(self, *args: Any, **kwargs: Any) -> Reason | None:
        """Why the override does not take these (fake) arguments: device, dtype, or its own check; None if it does."""
        reason = self.unfit((*args, *kwargs.values()))
        if reason is not None:
            return reason
        return self.checked(*args, **kwargs)

    def checked(self, *args: Any, **kwargs: Any) -> Reason | None:
        """What its own check says of these (fake) arguments; one that raises, or gives no `Reason`, refuses them."""
        if self.check is None:
            return None
        try:
            reason: Any = self.check(*args, **kwargs)
        except CONTROL_FLOW:
            raise
        except Exception as error:  # noqa: BLE001 - becomes the reason
            return raised(self, f"the check of the override {self.name} raised", error)
        if reason is None or isinstance(reason, Reason):
            return reason
        return refused(
            self,
            f"the check of the override {self.name} returned neither None nor a Reason",
            observed=repr(reason),
            lever="return None to take the call, or an omnicomp.timeline.Reason to refuse it",
        )

    def unfit(self, values: Sequence[Any]) -> Reason | None:
        """Why the declaration rules these (fake) arguments out: device or dtype."""
        for tensor in (a for a in values if isinstance(a, torch.Tensor)):
            if self.devices and tensor.device.type not in self.devices:
                return self._no_kernel(f"device={tensor.device.type}", f"one of {', '.join(self.devices)}")
            if self.dtypes and tensor.is_floating_point() and tensor.dtype not in self.dtypes:
                return self._no_kernel(f"dtype={tensor.dtype}", f"one of {', '.join(map(str, self.dtypes))}")
        return None

    def _no_kernel(self, observed: str, needed: str) -> Reason:
        return refused(
            self,
            f"the override {self.name} has no kernel for these arguments",
            observed=observed,
            needed=needed,
            lever=f"bring the inputs to {needed}, or declare more in @omnicomp.override",
        )

    def not_differentiable(self) -> Reason:
        """Why it is left out of a graph that is to be differentiated."""
        if self.form in ("tag", "search") and self.training != FORWARD_ONLY:
            lever = "give backward= to @omnicomp.override, or register one by torch.library.register_autograd"
            observed = "no derivative is registered for its operator"
        else:
            lever = "run under torch.no_grad(), or declare training=True if it may be used in training"
            observed = "forward only"
        return refused(
            self,
            f"the override {self.name} is for inference, and the graph is to be differentiated",
            observed=observed,
            needed="training=True",
            lever=lever,
        )


def refused(item: Override, sentence: str, *, observed: str = "", needed: str = "", lever: str = "") -> Reason:
    """The reason why an override is not used where it matched."""
    return Reason(
        code="override_refused", by=item.name, sentence=sentence, observed=observed, needed=needed, lever=lever
    )


def raised(item: Override, sentence: str, error: Exception) -> Reason:
    """The reason why an override is not used where something raised while that was judged."""
    first = str(error).split("\n", 1)[0]
    return refused(
        item,
        f"{sentence}: {first}" if first else sentence,
        observed=type(error).__name__,
        lever="try the override's fake kernel and check on fake tensors of these shapes",
    )


def _source(item: Any) -> bytes:
    """The source of a function, and the values that distinguish it from others of the same source."""
    try:
        text = inspect.getsource(item).encode()
    except (OSError, TypeError):
        code = getattr(item, "__code__", None)
        if code is None:
            return repr(item).encode()
        text = repr(_code(code)).encode()  # typed in, or made by another program: the same in each process
    cells = map(_content, getattr(item, "__closure__", None) or ())
    defaults = getattr(item, "__defaults__", None) or ()
    bound = (*cells, *defaults, *(getattr(item, "__kwdefaults__", None) or {}).items())
    return text + repr([_value(value) for value in bound]).encode()


def _code(code: CodeType) -> tuple[Any, ...]:
    consts = tuple(_code(each) if isinstance(each, CodeType) else _value(each) for each in code.co_consts)
    return code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, consts


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _value(value: Any) -> Any:
    """A value as it reads in every process; of what has an address in its text, the type."""
    if isinstance(value, tuple):
        return tuple(map(_value, value))  # pyright: ignore[reportUnknownArgumentType]
    plain = isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None)))
    return repr(value) if plain else type(value).__qualname__


class Refused(Exception):
    """What an override matched is left as it is."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.sentence)
        self.reason = reason
