"""Calls of the operators of PyTorch's database, and how their results differ.

Conformance checks compare a device with the CPU by them; omnicomp's own tests compare compiled code with eager.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from omnicomp._torch import opinfo


@dataclasses.dataclass
class Case:
    """A call: fresh inputs at each `inputs()`, and what is differentiated of the result."""

    function: Callable[..., Any]
    values: tuple[Any, Any, Any]
    process: Callable[[Any], Any]
    gradients: bool

    def inputs(self) -> tuple[Any, Any, Any]:
        """The arguments: the tensors, which a call may write to, are copies."""
        memo: dict[int, Any] = {}
        return tree_map(lambda value: _copy(value, memo), self.values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a call left behind; tensors are detached, but `requires_grad` is noted."""

    values: list[Any]  # leaves of what it returned; how they hang together is Dynamo's to rebuild, not a backend's
    inputs: list[torch.Tensor]  # its tensor inputs after the call
    gradients: list[Any]  # of the inputs that require grad; None where there is none
    requires_grad: list[bool]  # of each value
    aliases: list[list[int]]  # for each value, the numbers of the inputs and values before it whose memory it shares


class BackwardError(Exception):
    """The forward ran, and its backward raised."""


def case_of(entry: Any, sample: Any, form: str, *, gradients: bool) -> Case | None:
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
            expected = function(*Case(function, values, _same, False).inputs())
        except Exception as error:  # noqa: BLE001 - the form `function` reports it
            del error
            return None
        values[2]["out"] = tree_map(lambda v: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v, expected)
    return Case(function, values, sample.output_process_fn_grad or _same, gradients)


def _same(value: Any) -> Any:
    return value


def call(case: Case, function: Callable[..., Any], *, seed: int) -> Result:
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
            raise BackwardError from error
    return Result(
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


def difference(actual: Any, expected: Any, *, values: bool) -> str:
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


def draws(case: Case, expected: Result) -> bool:
    """Whether the results of a call depend on the seed."""
    other = call(case, case.function, seed=1)
    return any(difference(a, b, values=True) for a, b in zip(other.values, expected.values, strict=True))


def kept(tensor: torch.Tensor, device: str | torch.device | None = None, *, whole: bool = False) -> torch.Tensor:
    """A detached copy with the same sizes and strides, also where elements overlap.

    Args:
        tensor: of any layout; a sparse one is copied by torch.
        device: where to; None is where it is.
        whole: whether the whole storage is copied, which a view of a view may look into, or what the tensor spans.
    """
    source = tensor.detach()
    target = source.device if device is None else torch.device(device)
    if source.layout is not torch.strided or type(source) is not torch.Tensor:
        return source.to(target) if source.device != target else source.clone()
    if source.is_conj() or source.is_neg():
        plain = kept(source._conj() if source.is_conj() else source._neg_view(), target, whole=whole)
        return plain._conj() if source.is_conj() else plain._neg_view()
    sizes, strides, offset = source.size(), source.stride(), source.storage_offset()
    if source.numel() == 0:
        return torch.empty_strided(sizes, strides, dtype=source.dtype, device=target)
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    first, count = offset, span
    if whole:
        first, count = 0, source.untyped_storage().nbytes() // source.element_size()
    flat = source.as_strided((count,), (1,), first)
    flat = flat.to(target) if source.device != target else flat.clone()
    return flat.as_strided(sizes, strides, offset - first)


def host(value: Any) -> Any:
    """The same structure with every tensor on the CPU, detached."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)


class Transfer:
    """Copies structures to a device: a tensor that occurs twice is copied once, and device arguments change."""

    def __init__(self, device: str, *, source: str = "cpu", whole: bool = False) -> None:
        """Bring to a device.

        Args:
            device: where to, for example `cuda:0`.
            source: the device type that is replaced where a device is named.
            whole: as of `kept`.
        """
        self._device, self._source, self._whole = device, source, whole
        self._memo: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def __call__(self, value: Any) -> Any:
        """The structure on the device; `requires_grad` is kept."""
        return tree_map(self._one, value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._memo:
                copy = kept(value, self._device, whole=self._whole)
                self._memo[id(value)] = copy.requires_grad_(value.requires_grad)
                self._alive.append(value)  # an id is only unique among what lives
            return self._memo[id(value)]
        if isinstance(value, torch.device) and value.type == self._source:
            return torch.device(self._device)
        if isinstance(value, str) and value == self._source:
            return self._device
        return value
