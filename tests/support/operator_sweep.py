"""One operator of PyTorch's database under `torch.compile`, against eager: values, gradients, layout and aliasing.

The operators' own sample inputs are used. Where a result is not eager's to the tolerance of its dtype, both are
compared with the operator in double precision, as a compiler may round in another order than eager.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch.utils._pytree import tree_map

from omnicomp import timeline
from omnicomp._torch import opinfo
from omnicomp.errors import first_line
from omnicomp.testing.operators import BackwardError, Case, Result, call, case_of, difference, draws
from omnicomp.timeline import Capture, Retreat

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
            case = case_of(entry, sample, form, gradients=differentiable)
            if case is None:
                continue
            verdict = _Check(entry, case, backend, options, own_random).run()
            outcomes.append(
                Outcome(operator=name, form=form, sample=number, seconds=time.perf_counter() - start, **verdict)
            )
    return outcomes


class _Check:
    """Runs a case in eager and compiled, and says how they differ."""

    def __init__(
        self,
        entry: Any,
        case: Case,
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
                expected = call(self._case, self._case.function, seed=0)
            except Exception as error:
                return {"verdict": "eager_fails", "detail": first_line(error)}
            torch.compiler.reset()
            timeline.clear()
            try:
                options: dict[str, Any] = {"options": self._options} if self._options else {}
                compiled: Any = torch.compile(self._case.function, backend=self._backend, **options)
                actual = call(self._case, compiled, seed=0)
                wrong = self._difference(actual, expected)
            except Exception as error:
                stage = "backward: " if isinstance(error, BackwardError) else ""
                wrong = ("raised", stage + first_line(error.__cause__ or error if stage else error))
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

    def _difference(self, actual: Result, expected: Result) -> tuple[str, str] | None:
        """The failing verdict and its detail, or None."""
        if len(actual.values) != len(expected.values):
            return "wrong_value", f"returns {len(actual.values)} values instead of {len(expected.values)}"
        if actual.requires_grad != expected.requires_grad:
            return "wrong_gradient", f"requires_grad {actual.requires_grad} instead of {expected.requires_grad}"
        valued = self._defined and not (self._own_random and draws(self._case, expected))
        for kind, pairs in (
            ("value", list(zip(actual.values, expected.values, strict=True))),
            ("input after the call", list(zip(actual.inputs, expected.inputs, strict=True))),
            ("gradient", list(zip(actual.gradients, expected.gradients, strict=True))),
        ):
            for number, (got, wanted) in enumerate(pairs):
                message = difference(got, wanted, values=valued)
                if message and not (valued and self._as_good(kind, number, actual, expected)):
                    return "wrong_gradient" if kind == "gradient" else "wrong_value", f"{kind} {number}: {message}"
        for number, (got, wanted) in enumerate(zip(actual.values, expected.values, strict=True)):
            if _strides(got) != _strides(wanted):
                return "wrong_layout", f"value {number}: strides {_strides(got)} instead of {_strides(wanted)}"
        if actual.aliases != expected.aliases:
            return "wrong_layout", f"shares memory with {actual.aliases} instead of {expected.aliases}"
        return None

    def _as_good(self, kind: str, number: int, actual: Result, expected: Result) -> bool:
        """Whether a result that is not eager's is at most a few times as far from the exact one as eager's is."""
        if draws(self._case, expected):
            return False  # double precision draws other numbers
        try:
            exact = call(_in_double(self._case), self._case.function, seed=0)
        except Exception as error:
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


def _in_double(case: Case) -> Case:
    return dataclasses.replace(case, values=tree_map(_doubled, case.values))


def _strides(value: Any) -> tuple[int, ...] | None:
    """Strides of the dimensions that have more than one position."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.numel() == 0:
        return None
    return tuple(step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1)


def _doubled(value: Any) -> Any:
    """A floating tensor or dtype in double precision; others as they are."""
    if isinstance(value, torch.dtype):
        return _DOUBLE.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _DOUBLE:
        return value.detach().to(_DOUBLE[value.dtype]).requires_grad_(value.requires_grad)
    return value


def _count(kind: type) -> int:
    return sum(1 for event in timeline.current().events() if isinstance(event, kind))
