"""Operators of PyTorch's database on a device against the CPU: values, gradients, results into given tensors.

Samples are made on the CPU and brought over with their strides and sharing, so that both compute from the same numbers.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from omnicomp._torch import opinfo
from omnicomp.errors import first_line
from omnicomp.testing import operators as sweep
from omnicomp.testing.conformance.base import Session
from omnicomp.testing.operators import Transfer, host

QUICK: Final = (
    "add", "mul", "div.no_rounding_mode", "sub", "neg", "exp", "log", "sqrt", "rsqrt", "sin", "tanh", "sigmoid",
    "nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "clamp", "maximum", "where", "eq", "masked_fill",
    "sum", "mean", "amax", "argmax", "var", "cumsum", "sort", "topk", "softmax", "log_softmax",
    "nn.functional.layer_norm", "nn.functional.batch_norm", "mm", "bmm", "addmm", "matmul", "nn.functional.linear",
    "nn.functional.conv2d", "nn.functional.max_pool2d", "nn.functional.embedding", "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention", "gather", "scatter_add", "index_put", "index_select", "cat", "stack",
    "split", "expand", "transpose", "reshape", "tril", "arange", "full_like", "new_empty",
)  # fmt: skip
"""Entries of the database that most models need."""

# As PyTorch's own suite compares a device with the CPU: kernels may add in another order.
_TOLERANCE: Final = 1e-3
_SAMPLES: Final = 2
_DTYPES: Final = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)
_UNINITIALISED: Final = (
    "the database calls its values undefined (uninitialised memory), so that only shapes and dtypes are compared"
)
_RANDOM: Final = "its values are random, and a device may draw its own, so that only shapes and dtypes are compared"

# Where torch itself stands in the way: the operator, what it raises, and why that is no fault of a device's.
_KNOWN: Final = {
    "mode": (
        "mode only supports CPU, CUDA and XPU device type",
        "torch's kernel for any device refuses all types but CPU, CUDA and XPU; a device may bring one of mode.values",
    ),
}
# Operators whose arguments other than the input stay on the CPU, on every device.
_ON_THE_HOST: Final = frozenset({"tensor_split"})


def operator_names(quick: bool, pattern: str = "") -> list[str]:
    """Names of entries of the database.

    Raises:
        OmnicompError: the database can't be imported.
    """
    if pattern:
        return opinfo.names(pattern)
    known = opinfo.names()
    return [name for name in QUICK if name in set(known)] if quick else known


@dataclasses.dataclass
class _Counts:
    """How many comparisons were made of each kind, and why some were left out."""

    values: int = 0
    gradients: int = 0
    out: int = 0
    notes: dict[str, None] = dataclasses.field(default_factory=dict[str, None])

    def text(self) -> str:
        made = ", ".join(f"{count} {name}" for name, count in (
            ("values", self.values), ("gradients", self.gradients), ("out", self.out)
        ) if count)  # fmt: skip
        return "; ".join([made or "nothing to compare", *self.notes])


def check_operator(session: Session, name: str, *, samples: int = _SAMPLES) -> dict[str, Any]:
    """Compare an operator with the CPU, in float32 or what it takes instead.

    Returns:
        `verdict`, `found` and `todo`, as of a check.
    """
    entry = opinfo.find(name)
    session = dataclasses.replace(session, check=f"operators.{name}")
    asked = session.device.expectations().dtypes or _DTYPES
    dtype = next((each for each in asked if opinfo.supports(entry, each, "cpu")), None)
    if dtype is None:
        return {"verdict": "skipped", "found": "it takes none of the dtypes on the CPU", "todo": ""}
    counts = _Counts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wrong in _differences(session, entry, dtype, counts, samples):
            return {
                "verdict": "failed",
                "found": wrong,
                "todo": f"compare torch's kernel for the CPU with the one that {session.type} has for {name}",
            }
    if dtype is not torch.float32:
        counts.notes[f"in {str(dtype).removeprefix('torch.')}"] = None
    if not counts.values:
        why = next(iter(counts.notes), "it has no samples")
        return {"verdict": "skipped", "found": why, "todo": ""}
    return {"verdict": "passed", "found": counts.text() + session.declared, "todo": ""}


def _differences(session: Session, entry: Any, dtype: torch.dtype, counts: _Counts, samples: int) -> Iterator[str]:
    """Sentences on what differs; made as they are asked for."""
    differentiable = opinfo.differentiable(entry, dtype, "cpu")
    given = opinfo.samples(entry, dtype, "cpu", first=0, count=samples, requires_grad=differentiable)
    for number, sample in enumerate(given):
        for form in ("function", "out", "out_resized"):
            case = sweep.case_of(
                entry, sample, "out" if form != "function" else form, gradients=differentiable and form == "function"
            )
            if case is None:
                continue
            if form == "out_resized":
                # A result of another size: torch lets it grow, with a warning. Sparse ones it can't make empty.
                function, arguments, named = case.values
                if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in tree_leaves(named)):
                    continue
                grown = {**named, "out": tree_map_only(torch.Tensor, lambda value: value.new_empty(0), named["out"])}
                case = dataclasses.replace(case, values=(function, arguments, grown))
            wrong = _compare(session, entry, case, form, counts)
            if wrong:
                yield f"sample {number}{'' if form == 'function' else f' ({form})'}: {wrong}"


def _compare(session: Session, entry: Any, case: sweep.Case, form: str, counts: _Counts) -> str:
    try:
        expected = sweep.call(case, case.function, seed=0)
    except Exception as error:  # noqa: BLE001 - the CPU refuses it as well
        counts.notes[f"the CPU refuses a sample ({first_line(error)})"[:200]] = None
        return ""
    try:
        moved = case if session.is_host else _moved(session, entry, case)
        actual = sweep.call(moved, moved.function, seed=0)
    except Exception as error:  # noqa: BLE001 - becomes the verdict
        cause = error.__cause__ if isinstance(error, sweep.BackwardError) and error.__cause__ else error
        if isinstance(cause, (NotImplementedError, RuntimeError)) and _is_sparse(case, expected):
            counts.notes[f"sparse tensors are asked of no device; it raises {first_line(cause)}"[:200]] = None
            return ""
        text, reason = _KNOWN.get(entry.name, ("", ""))
        if text and text in str(cause):
            counts.notes[reason] = None
            return ""
        return f"{'backward ' if cause is not error else ''}raises {first_line(cause)}"
    defined = opinfo.has_defined_values(entry)
    if not defined:
        counts.notes[_UNINITIALISED] = None
    elif sweep.draws(case, expected):
        counts.notes[_RANDOM] = None
        defined = False
    return _difference(session, actual, expected, form, counts, valued=defined)


def _moved(session: Session, entry: Any, case: sweep.Case) -> sweep.Case:
    """The case with its arguments on the device."""
    # As deep as the storage goes: `as_strided` of a view reads what the view does not span.
    transfer = Transfer(session.type, whole=True)
    input, args, kwargs = case.values
    values = (transfer(input), args, kwargs) if entry.name in _ON_THE_HOST else transfer(case.values)
    return dataclasses.replace(case, values=values)


def _difference(
    session: Session, actual: sweep.Result, expected: sweep.Result, form: str, counts: _Counts, *, valued: bool
) -> str:
    if len(actual.values) != len(expected.values):
        return f"returns {len(actual.values)} values instead of {len(expected.values)}"
    stray = {
        str(value.device)
        for value, wanted in zip(actual.values, expected.values, strict=True)
        if isinstance(value, torch.Tensor) and isinstance(wanted, torch.Tensor) and value.device.type != session.type
    }
    if stray:
        return f"its result is on {', '.join(sorted(stray))}"
    for kind in ("values", "inputs", "gradients"):
        pairs = zip(getattr(actual, kind), getattr(expected, kind), strict=True)
        for place, (got, wanted) in enumerate(pairs):
            message = _message(session, got, wanted, valued=valued)
            if message:
                what = {"values": "value", "inputs": "input after the call", "gradients": "gradient"}[kind]
                return f"{what} {place}: {message}"
    if form == "function":
        counts.values += 1
        counts.gradients += bool(expected.gradients)
    else:
        counts.out += 1
    return ""


def _message(session: Session, got: Any, wanted: Any, *, valued: bool) -> str:
    got, wanted = host(got), host(wanted)
    message = sweep.difference(got, wanted, values=valued)
    if not message or not isinstance(wanted, torch.Tensor) or not isinstance(got, torch.Tensor):
        return message
    if (got.shape, got.dtype, got.layout) != (wanted.shape, wanted.dtype, wanted.layout):
        return message
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        try:
            session.close(got, wanted, _TOLERANCE)
        except AssertionError as error:
            return " ".join(str(error).split())[:240]
        return ""
    return message


def _is_sparse(case: sweep.Case, expected: Any) -> bool:
    leaves = tree_leaves((case.values, expected.values, expected.gradients))
    return any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in leaves)
