"""One operator of PyTorch's database under `torch.compile`, against eager: values, gradients, layout and aliasing.

The operators' own sample inputs are used. Where a result is not eager's to the tolerance of its dtype, both are
compared with the operator in double precision, as a compiler may round in another order than eager.
"""

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_map

from omnicomp import timeline
from omnicomp._torch import opinfo
from omnicomp.timeline import Capture, Retreat

__all__ = ["FORMS", "PASSING", "Outcome", "check_operator"]

Form = Literal["function", "in_place", "out"]
FORMS: Final[tuple[Form, ...]] = ("function", "in_place", "out")
PASSING: Final = ("ok", "retreated", "eager_fails")

_DOUBLE: Final = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_TIMES_EAGERS_ERROR: Final = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one sample.

    Attributes:
        operator: its name in the database.
        form: `function`, `in_place` (the method that writes to its input) or `out` (results into given tensors).
        sample: its number.
        verdict: `ok`; `retreated` (right, after something fell back); `eager_fails` (eager raises, so that nothing is
            asked of a compiler); or a failure: `raised`, `wrong_value`, `wrong_gradient`, `wrong_layout`.
        detail: the first line of what was raised or is wrong.
        retreats: `from -> to: reason` of each fall-back in the timeline.
        graphs: how many graphs reached the backend.
        seconds: of this sample, eager included.
    """

    operator: str
    form: str
    sample: int
    verdict: str
    detail: str = ""
    retreats: tuple[str, ...] = ()
    graphs: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing failed that eager does not fail."""
        return self.verdict in PASSING


@dataclasses.dataclass
class _Case:
    """A call: fresh inputs at each `inputs()`, and what is differentiated of the result."""

    function: Callable[..., Any]
    values: tuple[Any, Any, Any]
    process: Callable[[Any], Any]
    gradients: bool

    def inputs(self) -> tuple[Any, Any, Any]:
        memo: dict[int, Any] = {}
        return tree_map(lambda value: _copy(value, memo), self.values)

    def in_double(self) -> "_Case":
        double = tree_map(_doubled, self.values)
        return dataclasses.replace(self, values=double)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Result:
    """What a call left behind; tensors are detached, but `requires_grad` is noted.

    Attributes:
        values: leaves of what it returned; how they hang together is Dynamo's to rebuild, not a backend's.
        inputs: its tensor inputs after the call.
        gradients: of the inputs that require grad; None where there is none.
        requires_grad: of each value.
        aliases: for each value, the numbers of the inputs and values before it whose memory it shares.
    """

    values: list[Any]
    inputs: list[torch.Tensor]
    gradients: list[Any]
    requires_grad: list[bool]
    aliases: list[list[int]]


class _BackwardError(Exception):
    """The forward ran, and its backward raised."""


def check_operator(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    first: int = 0,
    samples: int = 2,
    gradients: bool = True,
    backend: str | Callable[..., Any] = "omni",
    options: Mapping[str, Any] | None = None,
    forms: Sequence[str] = ("function",),
    own_random: bool = False,
) -> list[Outcome]:
    """Compile an operator for some of its samples, and compare with eager.

    Args:
        name: as in `omnicomp._torch.opinfo.names`.
        dtype: of the samples; there are no outcomes if the operator does not take it.
        device: device type.
        first: number of the first sample.
        samples: how many at most.
        gradients: whether to compare gradients where the operator has them.
        backend: of `torch.compile`.
        options: of `torch.compile`.
        forms: which of `FORMS`; one that the operator lacks is left out.
        own_random: whether the compiler has random numbers of its own, so that only shapes and dtypes are compared
            where eager's results depend on the seed.

    Raises:
        OmnicompError: there is no such operator, or the database can't be imported.
    """
    entry = opinfo.find(name)
    if not opinfo.supports(entry, dtype, device):
        return []
    differentiable = gradients and opinfo.differentiable(entry, dtype, device)
    outcomes: list[Outcome] = []
    given = opinfo.samples(entry, dtype, device, first=first, count=samples, requires_grad=differentiable)
    for number, sample in enumerate(given, first):
        for form in forms:
            start = time.perf_counter()
            case = _case(entry, sample, form, gradients=differentiable)
            if case is None:
                continue
            verdict = _Check(entry, case, backend, options, own_random).run()
            outcomes.append(
                Outcome(operator=name, form=form, sample=number, seconds=time.perf_counter() - start, **verdict)
            )
    return outcomes


def _case(entry: Any, sample: Any, form: str, *, gradients: bool) -> _Case | None:
    """The call of a sample in one form, or None if the operator does not have it."""
    operator: Any = entry.op

    def function(input: Any, args: Any, kwargs: Any) -> Any:
        return operator(input, *args, **kwargs)

    values = (sample.input, tuple(sample.args), dict(sample.kwargs))
    if form == "in_place":
        method: Any = opinfo.in_place_variant(entry)
        if method is None or sample.broadcasts_input or (gradients and not entry.supports_inplace_autograd):
            return None

        def in_place(input: Any, args: Any, kwargs: Any) -> Any:
            return method(input.clone() if input.requires_grad else input, *args, **kwargs)

        function = in_place
    elif form == "out":
        if not entry.supports_out or "out" in values[2]:
            return None
        values = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, values)
        gradients = False
        try:
            torch.manual_seed(0)
            expected = function(*_Case(function, values, _same, False).inputs())
        except Exception as error:  # noqa: BLE001 - the form `function` reports it
            del error
            return None
        values[2]["out"] = tree_map(lambda v: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v, expected)
    return _Case(function, values, sample.output_process_fn_grad or _same, gradients)


def _same(value: Any) -> Any:
    return value


class _Check:
    """Runs a case in eager and compiled, and says how they differ."""

    def __init__(
        self,
        entry: Any,
        case: _Case,
        backend: str | Callable[..., Any],
        options: Mapping[str, Any] | None,
        own_random: bool,
    ) -> None:
        self._case = case
        self._backend = backend
        self._options = dict(options) if options else None
        self._own_random = own_random
        self._defined = opinfo.has_defined_values(entry)

    def run(self) -> dict[str, Any]:
        """The fields of the outcome."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = _call(self._case, self._case.function, seed=0)
            except Exception as error:  # noqa: BLE001 - becomes the outcome's detail
                return {"verdict": "eager_fails", "detail": _line(error)}
            torch.compiler.reset()
            timeline.clear()
            try:
                options: dict[str, Any] = {"options": self._options} if self._options else {}
                compiled: Any = torch.compile(self._case.function, backend=self._backend, **options)
                actual = _call(self._case, compiled, seed=0)
                wrong = self._difference(actual, expected)
            except Exception as error:  # noqa: BLE001 - becomes the outcome's detail
                stage = "backward: " if isinstance(error, _BackwardError) else ""
                wrong = ("raised", stage + _line(error.__cause__ or error if stage else error))
            return {**self._verdict(wrong), "graphs": _count(Capture)}

    def _verdict(self, wrong: tuple[str, str] | None) -> dict[str, Any]:
        retreats = tuple(
            f"{event.source_lowering} -> {event.target_lowering}: {event.reason.sentence if event.reason else ''}"
            for event in timeline.current().events()
            if isinstance(event, Retreat)
        )
        if wrong is None:
            return {"verdict": "retreated" if retreats else "ok", "retreats": retreats}
        return {"verdict": wrong[0], "detail": wrong[1], "retreats": retreats}

    def _difference(self, actual: _Result, expected: _Result) -> tuple[str, str] | None:
        """The failing verdict and its detail, or None."""
        if len(actual.values) != len(expected.values):
            return "wrong_value", f"returns {len(actual.values)} values instead of {len(expected.values)}"
        if actual.requires_grad != expected.requires_grad:
            return "wrong_gradient", f"requires_grad {actual.requires_grad} instead of {expected.requires_grad}"
        valued = self._defined and not (self._own_random and self._draws(expected))
        for kind, pairs in (
            ("value", list(zip(actual.values, expected.values, strict=True))),
            ("input after the call", list(zip(actual.inputs, expected.inputs, strict=True))),
            ("gradient", list(zip(actual.gradients, expected.gradients, strict=True))),
        ):
            for number, (got, wanted) in enumerate(pairs):
                message = _message(got, wanted, values=valued)
                if message and not (valued and self._as_good(kind, number, actual, expected)):
                    return "wrong_gradient" if kind == "gradient" else "wrong_value", f"{kind} {number}: {message}"
        for number, (got, wanted) in enumerate(zip(actual.values, expected.values, strict=True)):
            if _strides(got) != _strides(wanted):
                return "wrong_layout", f"value {number}: strides {_strides(got)} instead of {_strides(wanted)}"
        if actual.aliases != expected.aliases:
            return "wrong_layout", f"shares memory with {actual.aliases} instead of {expected.aliases}"
        return None

    def _draws(self, expected: _Result) -> bool:
        """Whether eager's results depend on the seed."""
        other = _call(self._case, self._case.function, seed=1)
        return any(_message(a, b, values=True) for a, b in zip(other.values, expected.values, strict=True))

    def _as_good(self, kind: str, number: int, actual: _Result, expected: _Result) -> bool:
        """Whether a result that is not eager's is at most a few times as far from the exact one as eager's is."""
        if self._draws(expected):
            return False  # double precision draws other numbers
        try:
            exact = _call(self._case.in_double(), self._case.function, seed=0)
        except Exception as error:  # noqa: BLE001 - no double precision, no excuse
            del error
            return False
        field = {"value": "values", "gradient": "gradients"}.get(kind, "inputs")
        got, wanted, true = (getattr(result, field)[number] for result in (actual, expected, exact))
        if not all(isinstance(item, torch.Tensor) for item in (got, wanted, true)):
            return False
        if got.shape != wanted.shape or got.dtype != wanted.dtype or wanted.dtype not in _DOUBLE:
            return False
        got, wanted, true = (item.to(_DOUBLE[wanted.dtype]) for item in (got, wanted, true))
        finite = torch.isfinite(wanted)
        if not torch.equal(finite, torch.isfinite(got)) or not finite.any():
            return False
        error, eagers = ((item - true)[finite].abs().max().item() for item in (got, wanted))
        return error <= _TIMES_EAGERS_ERROR * eagers


def _call(case: _Case, function: Callable[..., Any], *, seed: int) -> _Result:
    """Call a function on fresh inputs, and differentiate what it returns."""
    inputs = case.inputs()
    tensors = [value for value in tree_flatten(inputs)[0] if isinstance(value, torch.Tensor)]
    torch.manual_seed(seed)
    with torch.set_grad_enabled(case.gradients):
        result = function(*inputs)
    values, _ = tree_flatten(result)
    found: list[Any] = []
    leaves = [tensor for tensor in dict.fromkeys(tensors) if tensor.requires_grad and tensor.is_leaf]
    if case.gradients and leaves:
        try:
            found = _gradients(case.process(result), leaves)
        except Exception as error:
            raise _BackwardError from error
    return _Result(
        values=[value.detach() if isinstance(value, torch.Tensor) else value for value in values],
        inputs=[tensor.detach() for tensor in tensors],
        gradients=found,
        requires_grad=[value.requires_grad for value in values if isinstance(value, torch.Tensor)],
        aliases=_aliases(tensors, values),
    )


def _gradients(result: Any, leaves: Sequence[torch.Tensor]) -> list[Any]:
    """Gradients of the leaves for fixed gradients of all results that have a history."""
    outputs = [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor) and v.requires_grad]
    if not outputs:
        return []
    generator = torch.Generator().manual_seed(1)
    given = [
        # In another dtype the generator would draw others, and double precision is asked for the same gradients.
        torch.randn(
            output.shape, dtype=torch.complex64 if output.is_complex() else torch.float32, generator=generator
        ).to(output.device, output.dtype)
        for output in outputs
    ]
    given = [
        value.sparse_mask(output.detach().coalesce()) if output.layout is torch.sparse_coo else value
        for value, output in zip(given, outputs, strict=True)
    ]
    return list(torch.autograd.grad(outputs, leaves, given, allow_unused=True))


def _aliases(tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> list[list[int]]:
    memory = [_memory(tensor) for tensor in tensors]
    aliases: list[list[int]] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            own = _memory(value)
            aliases.append([number for number, other in enumerate(memory) if own and own == other])
            memory.append(own)
    return aliases


def _memory(tensor: torch.Tensor) -> int:
    """Address of a strided tensor's storage; 0 for others and for empty ones."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _strides(value: Any) -> tuple[int, ...] | None:
    """Strides of the dimensions that have more than one position."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return None
    return tuple(step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1)


def _message(actual: Any, expected: Any, *, values: bool) -> str:
    """First lines of how two leaves differ, or an empty string."""
    if not isinstance(expected, torch.Tensor):
        same = type(actual) is type(expected) and (not values or actual == expected or actual != actual)
        return "" if same else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"{actual!r} instead of a tensor"
    if (actual.shape, actual.dtype, actual.layout) != (expected.shape, expected.dtype, expected.layout):
        got, wanted = (f"{tuple(t.shape)} {t.dtype} {t.layout}" for t in (actual, expected))
        return f"{got} instead of {wanted}"
    if not values:
        return ""
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    """A tensor with memory, strides and `requires_grad` of its own; one that is given twice stays one."""
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in memo:
        own = value.detach()
        own = copy.deepcopy(own) if own.layout is torch.strided else own.clone()
        memo[id(value)] = own.requires_grad_(value.requires_grad)
    return memo[id(value)]


def _doubled(value: Any) -> Any:
    """A floating tensor or dtype in double precision; others as they are."""
    if isinstance(value, torch.dtype):
        return _DOUBLE.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _DOUBLE:
        return value.detach().to(_DOUBLE[value.dtype]).requires_grad_(value.requires_grad)
    return value


def _count(kind: type) -> int:
    return sum(1 for event in timeline.current().events() if isinstance(event, kind))


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
