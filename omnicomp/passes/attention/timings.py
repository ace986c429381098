"""Which form an attention gets on CUDA, by timing: each kernel of torch, and the products and the softmax unfused.

An attention is timed once for all layers, processes and ranks: what was found is kept in the process, and in a file
beside Inductor's caches under the model of the device, the versions of the libraries, and all that the time depends on.
The first process that stores a result decides for the others, so that ranks that share the folder compile the same, and
a later process what an earlier one compiled. That there was no time left is a result, too.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from omnicomp._torch.autograd.attention import flash_implementation, hint_of, is_static
from omnicomp._torch.devices.timer import measurable, versions
from omnicomp._torch.inductor.store import JsonStore
from omnicomp.analysis.random_state import generator_states
from omnicomp.errors import first_line
from omnicomp.safety.forks import new_lock

if TYPE_CHECKING:
    from omnicomp._torch.autograd.sdpa_bench import Layout, Problem

UNFUSED: Final = "unfused"
"""The name of the candidate that is no fused kernel."""

# Eager's operators take at most so many times as long as generated code (an H200, 25 attentions: 0.75 to 1.7).
_GENERATED: Final = 2.0
# Compiling unfused code took 0.5 to 1.4 s on an H200, and 0.9 to 2.5 s with the backward.
_COMPILE_SECONDS: Final = (0.5, 1.0)
# A candidate must be so much faster than one that comes before it.
_TIE: Final = 0.03
_TIE_MS: Final = 0.001
_lock = new_lock()
_known: Final[dict[str, "Timed"]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """What was found for one attention."""

    best: str  # the name of the fastest candidate; empty if nothing could be timed, so that rules decide
    times: dict[str, float]  # milliseconds by candidate
    failed: dict[str, str] = dataclasses.field(default_factory=dict[str, str])  # why the others could not be timed
    seconds: float = 0.0  # that timing might take where nothing was timed

    def __str__(self) -> str:
        """One phrase with the times, the fastest first."""
        return ", ".join(f"{name} {ms:.4g} ms" for name, ms in sorted(self.times.items(), key=lambda item: item[1]))


class Budget:
    """The time that may go into measuring while one graph is compiled.

    Attributes:
        given: the seconds that there were in the beginning.
        enabled: whether there were any; without them, nothing that was measured before counts either.
        seconds: that are left.
    """

    def __init__(self, seconds: float) -> None:
        self.given, self.enabled, self.seconds = seconds, seconds > 0, seconds

    def spend(self, seconds: float) -> None:
        """Take some off."""
        self.seconds -= seconds


class Timer(Protocol):
    """What times the candidates for one attention."""

    first: float
    """Seconds that the first call of the last candidate took."""

    spared: float
    """Seconds of what has to be done once in each process, and which the program is spared later."""

    def __enter__(self) -> "Timer": ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def has_room_for_scores(self) -> bool:
        """Whether the scores fit into the device's memory."""
        ...

    def kernel(self, name: str) -> float:
        """Seconds of one of sdpa's kernels."""
        ...

    def unfused(self) -> float:
        """Seconds of the operators one by one."""
        ...

    def generated(self) -> float:
        """Seconds of Inductor's code for the operators."""
        ...


def problem_of(
    operands: Iterable[torch.Tensor],
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    is_causal: bool,
    grouped: bool,
    dropout: float,
    training: bool,
    tf32: bool = False,
    unfused: str = "operators",
) -> "Problem | None":
    """The attention of some fake tensors, or None where it can't be timed now.

    A symbolic size counts as the next power of two of the one that was seen.

    Args:
        operands: queries, keys and values.
        mask: the mask, or None.
        dtype: that they will have.
        is_causal: as in `Problem`.
        grouped: as in `Problem`.
        dropout: as in `Problem`.
        training: as in `Problem`.
        tf32: as in `Problem`.
        unfused: as in `Problem`.
    """
    query, key, value = operands
    if not measurable(query.device):
        return None
    from omnicomp._torch.autograd.sdpa_bench import Problem

    query_layout, key_layout, value_layout = map(_layout, (query, key, value))
    return Problem(
        device=query.device,
        dtype=dtype,
        query=query_layout,
        key=key_layout,
        value=value_layout,
        mask=None if mask is None else _layout(mask),
        is_causal=is_causal,
        grouped=grouped,
        dropout=dropout,
        training=training,
        mask_grad=mask is not None and mask.requires_grad,
        tf32=tf32 and dtype is torch.float32,
        unfused=unfused,
    )


def decide(
    problem: "Problem", kernels: Sequence[str], budget: Budget, make: "Callable[[Problem], Timer] | None" = None
) -> Timed | None:
    """The fastest candidate for an attention, measured now or before; None if it can't be, or there is no time left.

    Args:
        problem: the attention.
        kernels: those that take it, in the order that rules would try them in; one that is not faster by more than
            the spread of times does not displace an earlier one. Without any there is nothing to choose from.
        budget: what measuring may take; nothing is taken for what is known.
        make: makes what times it; None for the device itself.
    """
    if not kernels:
        return None
    from omnicomp._torch.autograd.sdpa_bench import Bench

    def measure(seconds: float) -> tuple[Timed | None, float]:
        with (make or Bench)(problem) as timer:
            return _measure(problem, kernels, timer, seconds)

    return known_or_measured(_key(problem, kernels), problem.device, budget, measure)


def known_or_measured(
    key: str, device: torch.device, budget: Budget, measure: Callable[[float], tuple[Timed | None, float]]
) -> Timed | None:
    """What was found under a key by this process or another one, else what is measured; None if rules have to decide.

    Where there is no time or no room, that is kept, too, until the budget is a larger one: a later process that
    measured would compile anew what this one compiles.

    Args:
        key: all that the times depend on.
        device: what is timed; its generator is left as it is.
        budget: what measuring may take; nothing is taken for what is known.
        measure: called with the seconds that are left; returns what it found, or None, and the seconds of it that the
            program is spared. A RuntimeError means that there is no room.
    """
    with _lock:
        found = _known.get(key) or STORE.read(key)[0]
        more = found is not None and not found.best and found.seconds < budget.given
        if found is None or more:
            measured = _measured(device, budget, measure) if budget.seconds > 0 else None
            found = measured or Timed(best="", times={}, seconds=budget.given)
            if more:
                STORE.write(key, found)
            found = STORE.settle(key, found)[0]
        elif key not in _known:
            found = STORE.settle(key, found)[0]  # what this machine knows, another rank's may know otherwise
        _known[key] = found
        return found if found.best else None


def _measured(
    device: torch.device, budget: Budget, measure: Callable[[float], tuple[Timed | None, float]]
) -> Timed | None:
    start = time.perf_counter()
    states = generator_states([device])
    try:
        measured, useful = measure(budget.seconds)
        start += useful
    except RuntimeError:  # there is no room
        return None
    finally:
        states.restore()
        budget.spend(time.perf_counter() - start)
    return measured


def forget() -> None:
    """Forget what this process measured; the files stay."""
    with _lock:
        _known.clear()


def _measure(problem: "Problem", kernels: Sequence[str], timer: Timer, seconds: float) -> tuple[Timed | None, float]:
    """The times, or None if time ran out; and the seconds of them that the program is spared later."""
    start = time.perf_counter()
    times: dict[str, float] = {}
    failed: dict[str, str] = {}
    first: dict[str, float] = {}

    def left() -> float:
        spared = first.get(fastest(times), 0.0) if times else 0.0
        return seconds - (time.perf_counter() - start - spared - timer.spared)

    def timed(name: str, run: Callable[[], float]) -> float | None:
        try:
            times[name] = round(run(), 5)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            failed[name] = first_line(error)
            return None
        first[name] = 0.0 if name == UNFUSED else timer.first
        return times[name]

    for name in kernels:
        if left() <= 0:
            return None, 0.0
        timed(name, lambda name=name: timer.kernel(name))
    if problem.unfused and timer.has_room_for_scores:
        fused = min(times.values(), default=float("inf"))
        plain = timed(UNFUSED, timer.unfused)
        near = plain is not None and plain < _GENERATED * fused
        # Eager's operators are an upper bound where a dropout's random numbers would have to be generated.
        if near and not problem.dropout and left() > _COMPILE_SECONDS[problem.training]:
            timed(UNFUSED, timer.generated)
    if not times:
        return None, timer.spared
    best = fastest(times)
    return Timed(best=best, times=times, failed=failed), first[best] + timer.spared


def fastest(times: Mapping[str, float]) -> str:
    """The candidate that takes the fewest milliseconds; of those that are as fast, the first."""
    least = min(times.values())
    return next(name for name, ms in times.items() if ms <= max(least * (1 + _TIE), least + _TIE_MS))


def _layout(tensor: torch.Tensor) -> "Layout":
    shape = tuple(size if is_static(size) else _bucket(hint_of(size)) for size in tensor.shape)
    strides = tuple(map(hint_of, tensor.stride()))
    if all(map(is_static, tensor.shape)):
        return shape, strides
    # As dense, in the same order; what is broadcast stays so.
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    dense, step = [0] * len(shape), 1
    for dim in order:
        if strides[dim]:
            dense[dim] = step
            step *= shape[dim]
    return shape, tuple(dense)


def _bucket(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _key(problem: "Problem", kernels: Sequence[str]) -> str:
    parts = (versions(problem.device), flash_implementation(), problem.text, tuple(kernels))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _load(data: Any) -> Timed:
    found = Timed(**data)
    known = found.best in found.times if found.times else not found.best and found.seconds > 0
    if not known or not all(ms > 0 for ms in found.times.values()):
        raise ValueError("no candidate, or a time that is not positive")
    return found


STORE: Final = JsonStore[Timed]("attention", dataclasses.asdict, _load)
