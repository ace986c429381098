"""A drawn program in eager and compiled: values, gradients, what is written to, layout, who shares memory, errors.

Where a result is not eager's to the last bit, how far it may be off is measured: by eager in double precision, and by
eager with a rounding error added to the result of every operator, which shows what a program makes of such errors.
"""

import dataclasses
import itertools
import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fuzz_names
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from omnicomp.timeline import Retreat, current

BACKENDS = ("eager", "aot_eager", "inductor")  # each has more of the stack than the one before
SEEDS = (0, 1, 2)
_NOISY_RUNS = 4
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Failure:
    """What differs from eager: the kind is the same for a program and what it is reduced to."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclasses.dataclass
class Call:
    """What one call left."""

    values: list[Any] = dataclasses.field(default_factory=list)
    form: Any = None
    layout: list[Any] = dataclasses.field(default_factory=list)
    sharing: list[int] = dataclasses.field(default_factory=list)
    state: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)
    error: str = ""
    message: str = ""
    refusals: int = 0


def verify(source: str, *, backend: str = "omni", options: Mapping[str, Any] | None = None) -> None:
    """Raise if a program does something else than eager; for the tests that the fuzzer writes."""
    failure = check(source, backend=backend, options=options)
    assert failure is None, str(failure)


def check(source: str, *, backend: str = "omni", options: Mapping[str, Any] | None = None) -> Failure | None:
    """How a program fails under a backend, or None.

    Values have to differ for most of three sets of numbers: one may be at a jump, such as a comparison of equals.

    Args:
        source: text that defines `Program` (a module), `inputs(n)` (arguments and the leaves among them) and `SIZES`
            (n, for each call), and may define `BACKWARD`, `DYNAMIC` and `DRAWS`.
        backend: of `torch.compile`.
        options: of `torch.compile`.

    Raises:
        ValueError: the program is none.
    """
    failure = _check_once(source, backend, options, 0)
    if failure is None or failure.kind not in ("value", "gradient", "state"):
        return failure
    others = (_check_once(source, backend, options, seed) for seed in SEEDS[1:])
    return failure if any(other and other.kind == failure.kind for other in others) else None


def blame(source: str) -> dict[str, str]:
    """For each of torch's own backends, what it makes of the program."""
    found: dict[str, str] = {}
    for backend in BACKENDS:
        options = {"fallback_random": True} if backend == "inductor" and "DRAWS = True" in source else None
        found[backend] = str(check(source, backend=backend, options=options) or "right")
    return found


def _check_once(source: str, backend: str, options: Mapping[str, Any] | None, seed: int) -> Failure | None:
    names = load(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(names, seed=seed)
        torch.compiler.reset()
        known = len(list(current()))
        actual = run(names, seed=seed, compile=_compiler(names, backend, options))
        return _Comparison(source, seed, expected).difference(actual) or _pass_that_raised(known)


def _pass_that_raised(known: int) -> Failure | None:
    """A pass that gave up, which costs no values."""
    events = [event for event in list(current())[known:] if isinstance(event, Retreat)]
    said = next((str(event.reason) for event in events if event.source_lowering == "passes"), None)
    return None if said is None else Failure("pass", said)


def _compiler(names: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None) -> Callable[[Any], Any]:
    given: dict[str, Any] = {"options": dict(options)} if options else {}
    return lambda module: torch.compile(module, backend=backend, dynamic=names.get("DYNAMIC"), **given)


def load(source: str, *, wide: bool = False) -> dict[str, Any]:
    """The names that a program's text defines.

    Raises:
        ValueError: the text can't be run.
    """
    file = f"<fuzzed {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = fuzz_names.namespace(wide=wide)
    try:
        exec(compile(source, file, "exec"), names)
    except Exception as error:
        raise ValueError(f"no program: {error}") from error
    return names


def run(
    names: Mapping[str, Any],
    *,
    seed: int = 0,
    compile: Callable[[Any], Any] | None = None,
    wide: bool = False,
    around: Callable[[], Any] | None = None,
) -> list[Call]:
    """Make a program's module and inputs, and call it for each of its sizes; an error ends that."""
    torch.manual_seed(seed)
    module = names["Program"]()
    if wide:
        fuzz_names.widened(module)
    compiled = compile(module) if compile else module
    calls: list[Call] = []
    for size in names["SIZES"]:
        torch.manual_seed(seed + size)
        arguments, leaves = names["inputs"](size)
        call = Call()
        calls.append(call)
        held = [*module.parameters(), *module.buffers()]
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        known = given + held
        before = fuzz_names.refusals[0]
        try:
            with around() if around else warnings.catch_warnings():
                results = compiled(*arguments)
                _observe(call, results, known)
                if names.get("BACKWARD", True):
                    call.gradients = _gradients(results, given, [*leaves, *module.parameters()])
        except Exception as error:
            call.error, call.message = type(error).__name__, str(error).strip()[:300]
        call.refusals = fuzz_names.refusals[0] - before
        call.state = [t.detach().clone() for t in [*given, *module.parameters(), *module.buffers()]]
        if call.error:
            break
    return calls


def _observe(call: Call, results: Any, known: Sequence[Tensor]) -> None:
    values, call.form = tree_flatten(results)
    call.values = [v.detach().clone() if isinstance(v, Tensor) else v for v in values]
    call.layout = [_layout(v) for v in values]
    tensors = [t for t in [*known, *(v for v in values if isinstance(v, Tensor))] if t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    call.sharing = [places.index(place) for place in places]


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__
    strides = tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    return (
        type(value).__name__,
        value.dtype,
        tuple(value.shape),
        strides if value.numel() else None,
        f"requires_grad={value.requires_grad}",
        value.is_conj(),
        value.is_neg(),
    )


def _gradients(results: Any, given: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Any]:
    """Of a weighted sum of what was returned and of what was written to and now has a gradient."""
    total: Any = 0
    for value in [*tree_leaves(results), *(g for g in given if not g.is_leaf)]:
        if isinstance(value, Tensor) and value.requires_grad:
            parts = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            weights = torch.linspace(0.5, 1.5, max(parts.numel(), 1), dtype=torch.float64)[: parts.numel()]
            total = total + (parts.to(torch.float64) * weights.reshape(parts.shape)).sum()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not (isinstance(total, Tensor) and total.requires_grad and wanted):
        return []
    return [None if g is None else g.detach().clone() for g in torch.autograd.grad(total, wanted, allow_unused=True)]


class _Comparison:
    """Compares with eager's calls; bounds are measured when the first difference is met."""

    def __init__(self, source: str, seed: int, expected: Sequence[Call]) -> None:
        self._source = source
        self._seed = seed
        self._expected = expected
        self._others: list[list[Call]] | None = None

    def difference(self, actual: Sequence[Call]) -> Failure | None:
        for number, (got, wanted) in enumerate(zip(actual, self._expected, strict=False)):
            failure = self._call(number, got, wanted)
            if failure:
                return Failure(failure.kind, f"call {number}: {failure.detail}")
        return None if len(actual) == len(self._expected) else Failure("calls", f"{len(actual)} calls")

    def _call(self, number: int, got: Call, wanted: Call) -> Failure | None:
        if got.error != wanted.error:
            if not wanted.error:
                return Failure(f"raised {got.error}", got.message)
            found = f"{got.error}: {got.message}" if got.error else "nothing"
            return Failure("error", f"{found} instead of {wanted.error}: {wanted.message}")
        if got.refusals != wanted.refusals:
            return Failure("repeated", f"the operator that raises ran {got.refusals} times, {wanted.refusals} in eager")
        if not wanted.error:
            if got.form != wanted.form:
                return Failure("form", f"{got.form} instead of {wanted.form}")
            for index, (g, w) in enumerate(zip(got.layout, wanted.layout, strict=True)):
                if g != w:
                    return Failure("layout", f"value {index}: {g} instead of {w}")
            if got.sharing != wanted.sharing:
                return Failure("sharing", f"{got.sharing} instead of {wanted.sharing}")
        for kind, field in (("value", "values"), ("state", "state"), ("gradient", "gradients")):
            ours, eagers = getattr(got, field), getattr(wanted, field)
            if len(ours) != len(eagers):
                return Failure(kind, f"{len(ours)} instead of {len(eagers)}")
            for index, (g, w) in enumerate(zip(ours, eagers, strict=True)):
                message = self._value(g, w, number, field, index)
                if message:
                    return Failure(kind, f"{kind} {index}: {message}")
        return None

    def _value(self, got: Any, wanted: Any, number: int, field: str, index: int) -> str:
        if field == "gradients" and (got is None or wanted is None):
            return "" if got is wanted else f"{got} instead of {wanted}"
        if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
            if isinstance(wanted, float) and isinstance(got, float):
                got, wanted = torch.tensor(got), torch.tensor(wanted)
            else:
                return "" if type(got) is type(wanted) and got == wanted else f"{got!r} instead of {wanted!r}"
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{got.dtype} {tuple(got.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
        got, wanted = got.resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg()
        if got.dtype is torch.complex32:  # which `equal` does not take
            got, wanted = got.to(torch.complex64), wanted.to(torch.complex64)
        if torch.equal(got, wanted) or not got.numel():
            return ""
        others = [_at(calls, number, field, index) for calls in self._measured()]
        return _beyond(got, wanted, [o for o in others if isinstance(o, Tensor) and o.shape == wanted.shape])

    def _measured(self) -> list[list[Call]]:
        """Eager in double precision, where it draws the same numbers, and eager with added rounding errors."""
        if self._others is None:
            names = load(self._source)
            self._others = [
                run(names, seed=self._seed, around=lambda seed=seed: _Noise(seed)) for seed in range(_NOISY_RUNS)
            ]
            if not names.get("DRAWS"):
                self._others.append(run(load(self._source, wide=True), seed=self._seed, wide=True))
        return self._others


def _at(calls: Sequence[Call], number: int, field: str, index: int) -> Any:
    if number >= len(calls) or index >= len(getattr(calls[number], field)):
        return None
    return getattr(calls[number], field)[index]


def _beyond(got: Tensor, wanted: Tensor, others: Sequence[Tensor]) -> str:
    """What is farther from eager than eager is from itself, or nothing."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        unsettled = torch.zeros_like(wanted, dtype=torch.bool)
        for other in others:
            unsettled |= other.to(wanted.dtype) != wanted
        wrong = (got != wanted) & ~unsettled
        distance = wrong.double()
    else:
        epsilon = torch.finfo(wanted.dtype).eps
        double = torch.complex128 if wanted.is_complex() else torch.float64
        got, wanted, others = got.to(double), wanted.to(double), [o.to(double) for o in others]
        finite = wanted[wanted.isfinite()].abs()
        bound = 16 * epsilon * (wanted.abs().nan_to_num(0, 0, 0) + (finite.max() if finite.numel() else 0))
        unsettled = torch.zeros_like(wanted, dtype=torch.bool)
        for other in others:
            spread = (other - wanted).abs()
            unsettled |= other.isfinite() != wanted.isfinite()
            bound = torch.maximum(bound, 16 * spread.nan_to_num(0, 0, 0))
        distance = (got - wanted).abs()
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        wrong = ~same & ~(distance <= bound) & ~unsettled
    if not wrong.any():
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, at {place} {got[place].item()!r} instead of "
        f"{wanted[place].item()!r}"
    )


class _Noise(TorchDispatchMode):
    """Adds an error of one rounding to each number that an operator computes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        for result, returned in zip(results if isinstance(results, tuple) else (results,), returns, strict=False):
            alias = returned.alias_info
            if isinstance(result, Tensor) and (alias is None or alias.is_write) and _rounded(result):
                signs = torch.randint(0, 2, result.shape, generator=self._generator).to(torch.float64) * 2 - 1
                result.mul_((1 + signs * torch.finfo(result.dtype).eps).to(result.dtype))
        return results


def _rounded(result: Tensor) -> bool:
    if not (result.is_floating_point() or result.is_complex()) or not result.numel():
        return False
    return all(stride > 0 or size == 1 for size, stride in zip(result.shape, result.stride(), strict=True))
