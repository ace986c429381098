"""The model that is brought up: one of omnicomp's by name, or a function of the user's."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.autograd.aot_autograd import compile_graph
from omnicomp._torch.devices.dispatcher import HigherOrderOperator, OpOverload, hearing, qualified_name, unheard
from omnicomp.errors import OmnicompError, first_line, wrong_value
from omnicomp.testing import models
from omnicomp.testing.isolated import find_function
from omnicomp.testing.operators import kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with inputs, on the CPU."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def loss(self, result: Any) -> torch.Tensor:
        """A number to differentiate: the `loss` that the model returns, or the mean square of what it returns.

        Raises:
            OmnicompError: nothing that it returns has a history.
        """
        given = getattr(result, "loss", None)
        if isinstance(given, torch.Tensor):
            return given
        leaves = [leaf for leaf in tree_leaves(_plain(result)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not leaves:
            raise OmnicompError("nothing that the model returns can be differentiated; leave --train out")
        return torch.stack([leaf.abs().square().mean() for leaf in leaves]).sum()


def _plain(result: Any) -> Any:
    """The structure of a result; the outputs of transformers are dictionaries."""
    return dict(result) if isinstance(result, Mapping) else result


def check_name(name: str, size: str = "tiny") -> None:
    """Check the form of a model's name; `load` looks functions up.

    Raises:
        OmnicompError: it is no model of omnicomp's and no `file.py:function`, or the size is unknown.
    """
    if size not in models.SIZES:
        raise wrong_value("size", size, known=models.SIZES)
    if ":" not in name and name not in models.MODELS:
        raise wrong_value("the model", name, known=(*models.MODELS, "file.py:function"))


def load(name: str, size: str = "tiny", *, training: bool = False) -> Subject:
    """Build a model.

    Args:
        name: a key of `omnicomp.testing.models.MODELS`, or `file.py:function` or `module:function` of a function that
            returns a module and its inputs: a tensor, a tuple or list of arguments, or a dictionary of named ones.
        size: of omnicomp's own models.
        training: whether it is put into training mode; else into evaluation mode.

    Raises:
        OmnicompError: there is no such model, or building it raises.
    """
    check_name(name, size)
    if ":" not in name:
        try:
            case = models.build(name, size)
        except ImportError as error:
            raise OmnicompError(f"{name} needs transformers: pip install omnicomp[test] ({error})") from error
        return Subject(model=case.model.train(training), kwargs=case.inputs)
    function = find_function(name)
    torch.manual_seed(0)
    try:
        made = function()
    except Exception as error:
        raise OmnicompError(f"{name} raises {type(error).__name__}: {error}") from error
    with contextlib.suppress(TypeError, ValueError):
        model, inputs = made
        if isinstance(model, nn.Module):
            return _subject(model.cpu().train(training), inputs)
    raise OmnicompError(f"{name} has to return a module and its inputs, and returns a {type(made).__name__}")


def _subject(model: nn.Module, inputs: Any) -> Subject:
    if isinstance(inputs, Mapping):
        return Subject(model=model, kwargs=dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Subject(model=model, args=tuple(inputs))
    return Subject(model=model, args=(inputs,))


@dataclasses.dataclass(kw_only=True)
class Call:
    """Calls of one operator with the same dtypes and the same class of shapes."""

    operator: OpOverload  # what is called
    name: str  # `aten::add.Tensor`
    dtypes: tuple[str, ...]  # of its tensors, in the order of the arguments
    # For each tensor its dimensions and whether it is `strided` (not contiguous), `broadcast` (a stride of 0) or
    # `empty`.
    shapes: tuple[str, ...]
    args: tuple[Any, ...]  # positional arguments of the first call, on the CPU
    kwargs: dict[str, Any]  # keyword arguments of the first call
    count: int = 0  # how often it is called
    captured: bool = False  # whether it is called in a graph of torch.compile; else between them, in eager
    parts: tuple[str, ...] = ()  # `forward`, `backward` or `inference`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """What torch.compile sees of a model."""

    calls: tuple[Call, ...]  # distinct calls, the most frequent first
    graphs: int  # how many graphs were captured
    note: str = ""  # why the model is not one graph; empty if it is


class _Collector:
    """A backend of torch.compile that runs graphs after autograd as they are, and notes each operator."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], Call] = {}
        self.graphs = 0

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **ignored: Any) -> Any:
        del ignored
        self.graphs += 1
        return compile_graph(gm, inputs, self._part)

    def _part(
        self, module: GraphModule, inputs: Sequence[Any], *, is_backward: bool = False, is_inference: bool = False
    ) -> Callable[[list[Any]], Any]:
        del inputs
        part = "backward" if is_backward else "inference" if is_inference else "forward"
        note = self.note

        class Noting(Interpreter):
            def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                note(target, args, kwargs, captured=True, part=part)
                return super().call_function(target, args, kwargs)

        def run(values: list[Any]) -> Any:
            # What runs between the graphs is heard; what runs in them is noted already.
            with unheard():
                return Noting(module).run(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def note(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, captured: bool, part: str = ""
    ) -> None:
        if isinstance(target, HigherOrderOperator) or not isinstance(target, OpOverload):
            return
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        name = qualified_name(target)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        shapes = tuple(map(_shape, tensors))
        key = (name, dtypes, shapes)
        call = self.calls.get(key)
        if call is None:
            sample = tree_map(lambda leaf: kept(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, dict(kwargs)))
            call = Call(
                operator=target, name=name, dtypes=dtypes, shapes=shapes, args=tuple(sample[0]), kwargs=sample[1]
            )
            self.calls[key] = call
        call.count += 1
        call.captured |= captured
        if part and part not in call.parts:
            call.parts = (*call.parts, part)


def _shape(tensor: torch.Tensor) -> str:
    words = [f"{tensor.dim()}d"]
    if tensor.layout is not torch.strided:
        return f"{words[0]} {str(tensor.layout).removeprefix('torch.')}"
    if tensor.numel() == 0:
        words.append("empty")
    elif any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        words.append("broadcast")
    elif not tensor.is_contiguous():
        words.append("strided")
    return " ".join(words)


def capture(subject: Subject, *, training: bool = False) -> Capture:
    """Run a model on the CPU, in as few graphs as torch.compile makes of it, and note every operator.

    Raises:
        Exception: whatever the model itself raises in eager.
    """
    note, whole = "", _Collector()
    torch.compiler.reset()
    try:
        _run(subject, torch.compile(subject.model, backend=whole, fullgraph=True), training=training)
        return _ordered(whole, "")
    except Exception as error:  # noqa: BLE001 - becomes the note
        note = first_line(error)
    parts = _Collector()
    torch.compiler.reset()
    compiled = torch.compile(subject.model, backend=parts)
    _run(subject, compiled, training=training)
    parts.calls.clear()

    def heard(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        parts.note(target, args, kwargs, captured=False)

    with hearing(heard):
        _run(subject, compiled, training=training)
    return _ordered(parts, note)


def _ordered(found: _Collector, note: str) -> Capture:
    calls = sorted(found.calls.values(), key=lambda call: (-call.count, call.name, call.dtypes, call.shapes))
    return Capture(calls=tuple(calls), graphs=found.graphs, note=note)


def _run(subject: Subject, call: Callable[..., Any], *, training: bool) -> None:
    torch.manual_seed(0)
    if not training:
        with torch.no_grad():
            call(*subject.args, **subject.kwargs)
        return
    subject.model.zero_grad()
    subject.loss(call(*subject.args, **subject.kwargs)).backward()
    subject.model.zero_grad()
