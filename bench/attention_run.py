"""What both parts of `bench_attention.py` share: candidates are warmed up, checked against a reference, and timed."""

import dataclasses
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from harness import interleave, peak_memory, relative_error, wait_for_turn
from torch import Tensor

import omnicomp
from omnicomp.audit.views.rows import recording_line
from omnicomp.timeline import CudaGraph, Rewrite

OURS = "omni"

# Calls before a timing. Whether replays of CUDA graphs are faster was decided while other benches warmed up beside, and
# is asked again behind eight times as many calls.
_SETTLED = 200

Call = Callable[[], Sequence[Tensor]]

# Nothing runs in a CUDA context after these.
_FATAL = ("illegal memory access", "device-side assert", "misaligned address")


class DeviceLost(RuntimeError):
    """A candidate left the process without a working device; the message names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: of weights and inputs.
        rounds: turns of each candidate.
        seconds: length of a turn.
        candidates: shell patterns of the candidates to measure.
        cudagraphs: compile with `mode="reduce-overhead"`.
        task: `measure`, or `check`, which compares without compiling.
    """

    device: str
    dtype: torch.dtype
    rounds: int
    seconds: float
    candidates: tuple[str, ...] = ("*",)
    cudagraphs: bool = False
    task: str = "measure"

    def compiled(self, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
        """`torch.compile` as these settings want it."""
        if self.task == "check":
            return function
        return torch.compile(function, backend=backend, mode="reduce-overhead" if self.cudagraphs else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The candidates of one row.

    Attributes:
        calls: makes each candidate's call, which returns what is compared with the reference.
        reference: computes the same in a higher precision.
        clock: of `harness.interleave`.
        whole: whether errors are taken over all results as one vector, or over each result, of which the worst counts.
        picked: names of the candidates that are not timed if their error exceeds what is allowed, since then they
            compute something else: twice the eager program's error.
    """

    calls: Mapping[str, Callable[[], Call]]
    reference: Callable[[], Sequence[Tensor]]
    clock: str = "wall"
    whole: bool = True
    picked: frozenset[str] = frozenset()


def compare(plan: Plan, settings: Settings) -> dict[str, Any]:
    """Measure one row: what is returned is the record's part that depends on no kind of row."""
    names = [name for name in plan.calls if any(fnmatch(name, pattern) for pattern in settings.candidates)]
    record: dict[str, Any] = {"clock": plan.clock, "rounds": {}, "gib": {}, "failures": {}, "warm_s": {}}
    # The worst relative error of a candidate, and the worst ratio of one to what is allowed.
    record |= {"errors": {}, "excess": {}}
    allowed: list[float] = []
    reference: Sequence[Tensor] = ()
    try:
        reference = [tensor.detach() for tensor in plan.reference()]
    except (RuntimeError, NotImplementedError) as error:  # an operator that has no kernel for its dtype
        record["failures"]["reference"] = f"{type(error).__name__}: {_brief(str(error))}"
    release(settings.device)
    ready: dict[str, Call] = {}
    for name in names:
        if name == OURS:
            omnicomp.timeline.clear()
        start = time.perf_counter()
        try:
            call = plan.calls[name]()
            call()
            if reference:
                errors = _errors([t.detach() for t in call()], reference, whole=plan.whole)
                record["errors"][name] = max(errors)
                if name == "eager":
                    allowed = [2 * error + 1e-4 for error in errors]
                if allowed:
                    record["excess"][name] = max(e / limit for e, limit in zip(errors, allowed, strict=True))
            if settings.task == "measure":
                # CUDA graphs have been recorded then, or have been given up.
                for _ in range(96 if settings.device == "cuda" else 2):
                    call()
                record["gib"][name] = peak_memory(call, settings.device)
        except Exception as error:  # goes to the record, which the report prints
            if isinstance(error, torch.AcceleratorError) or any(sign in str(error) for sign in _FATAL):
                raise DeviceLost(f"{name}: {_brief(str(error))}") from error
            record["failures"][name] = f"{type(error).__name__}: {_brief(str(error))}"
            release(settings.device)
            continue
        record["warm_s"][name] = round(time.perf_counter() - start, 2)
        if name == OURS and settings.task != "check":
            report = omnicomp.audit()
            sites = report.sites
            runs = [run for graph in report.graphs for run in graph.passes if run.name == "attention_fusion"]
            record["pass_s"] = round(sum(run.seconds for run in runs), 3)
            record["sites"] = {
                "fused": len(sites.fused),
                "called": len(sites.called),
                "targets": sorted({_target(site) for site in sites.fused}),
                "timed": list({str(site.timed): site.timed for site in (*sites.fused, *sites.called)}.values()),
                "missed": [_brief(f"{miss.source}: {miss.reason.sentence}") for miss in sites.near_misses],
            }
        ready[name] = call
    del reference
    for name in plan.picked & set(ready):
        excess = record["excess"].get(name, 0.0)
        if not excess <= 1:  # nor is it if it is no number
            record["failures"][name] = f"its error, {record['errors'][name]:.1e}, is {excess:.1f} times what is allowed"
            del ready[name]
    release(settings.device)
    if settings.task == "measure":
        wait_for_turn(settings.device)
        for _ in range(_SETTLED if settings.device == "cuda" and OURS in ready else 0):
            ready[OURS]()
        times = interleave(
            ready,
            rounds=settings.rounds,
            seconds=settings.seconds,
            device=settings.device,
            clock="device" if plan.clock == "device" else "wall",
        )
        record["rounds"] = {name: list(timing.rounds) for name, timing in times.items()}
        told = [event for event in omnicomp.timeline.events() if isinstance(event, CudaGraph)]
        record["recordings"] = [f"{event.part}: {recording_line(event)}" for event in told]
    return record


def _target(site: Rewrite) -> str:
    """What a site became, and which kernel that takes if it is one of torch's."""
    kernel = re.search(r"kernel _scaled_dot_product_(\w+?)_attention", site.detail)
    return f"{site.target} ({kernel[1]})" if kernel else site.target


def release(device: str) -> None:
    """Let go of the memory of what is not needed any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _errors(values: Sequence[Tensor], references: Sequence[Tensor], *, whole: bool) -> list[float]:
    if whole:
        return [relative_error(values, references)]
    return [relative_error([value], [reference]) for value, reference in zip(values, references, strict=True)]


def _brief(text: str) -> str:
    """The beginning of a message on one line, without the folders of the machine that it comes from."""
    words = " ".join(text.split()) or "no message"
    return re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+/[\w.+-]+)", r"\1", words)[:240]
