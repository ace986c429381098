"""Property checks of attention: random programs under omni against the same programs in float64.

    python -m attention_checks --examples 10000 --seed 0 --jobs 2
    python -m attention_checks --program "Program(mask='tril', padding='left')"

The first form draws programs and prints how many were fused, by each field, and those that failed; the second checks
one program, as a failure prints it. Both end with exit code 1 if something failed.
"""

import argparse
import collections
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attention_spellings
import processes
import torch
from attention_modules import Built as Built
from attention_modules import build as build
from attention_programs import DTYPES
from attention_programs import Program as Program
from attention_sampling import random_program as random_program
from attention_sampling import sample as sample
from torch import Tensor, nn

import omnicomp
from omnicomp.backend import pipeline
from omnicomp.timeline import Retreat

OPTIONS: Final[Mapping[str, Any]] = {"lowerings": ["eager"], "summary": False}
"""Without generated code: what is checked is the rewriting of the graph, and a compiler would take most of the time."""

SLACK: Final = 4.0
"""How many times eager's own error a result may be off."""


class Mismatch(AssertionError):
    """A compiled program gave another result than eager."""


class Unsuited(Exception):
    """A program that eager cannot run either, or torch not capture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of a program that gave the right results.

    Attributes:
        fused: whether in each captured graph every attention became a fused one.
        graphs: how many graphs were captured.
        empty_rows: whether some query attends to no key.
        reasons: the codes of near misses.
        targets: what the fused ones became.
    """

    fused: bool
    graphs: int
    empty_rows: bool
    reasons: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


def check(program: Program, options: Mapping[str, Any] = OPTIONS) -> Outcome:
    """Compile a program and compare every output and gradient of each call with eager and with float64.

    Values may be off by `SLACK` times the error of eager, or a few roundings of the narrowest dtype in use where that
    is more. NaN and infinity have to be where they are in eager; dtypes, shapes and strides of outputs as in eager.
    Where a query attends to nothing, gradients only have to be finite where eager's are, unless the mask is added.

    Returns:
        what was fused. Compilations and events of before are forgotten.

    Raises:
        Mismatch: the results differ, weights that are returned did not keep their attention from being fused, or a
            pass raised an exception.
        Unsuited: eager raised an exception, or torch does not capture the program with a backend that runs it in
            eager either. The exception is the cause.
    """
    torch.compiler.reset()
    omnicomp.timeline.clear()
    exact = build(program, exact=True)
    try:
        expected = [_results(exact.module, exact.module, call) for call in exact.calls]
        eager = build(program)
        own = [_results(eager.module, eager.module, call) for call in eager.calls]
    except Exception as error:
        raise Unsuited(repr(program)) from error
    compiled, built = _compiled(program, backend="omni", options=dict(options))
    precise = expected
    if program.changed != "none":
        expected = own  # what is left of a score beside a huge number depends on the precision
    narrow = program.region == "autocast" or program.dtype in ("bfloat16", "float16") or program.changed == "in half"
    rounded = program.region == "autocast" or program.changed == "in half"
    eps = torch.finfo(torch.bfloat16 if rounded else DTYPES[program.dtype]).eps
    roundings = (8 if narrow else 64 if eps > 1e-10 else 1e5) * eps
    empty_rows = any(exact.module.has_empty_rows(**call) for call in exact.calls)
    # A query that attends to nothing sees what is left of its scores beside the fill, which depends on the precision.
    vague = empty_rows and program.fill in ("-1e9", "-1e4")
    if vague and eps < 1e-10:
        # In double precision eager is its own reference, but rounds each score beside the fill to half of eps * |fill|.
        # The weights follow by twice that, and the kernels, which leave the fill out, do not.
        roundings = max(roundings, 8 * eps * abs(attention_spellings.fill_value(program.fill, torch.float64)))
    for number, call in enumerate(built.calls):
        try:
            found = _results(compiled, built.module, call)
        except Exception as error:
            if _is_captured(program):
                raise
            raise Unsuited(repr(program)) from error
        for name, value in own[number].items():
            where = f"{name} of call {number} of {program!r}"
            if name not in found:
                raise Mismatch(f"there is no {where}")
            lost = vague and program.changed == "in half"  # beside -1e4, eager rounds scores to multiples of 64
            if lost or (empty_rows and name.startswith("gradient") and not _passes_gradients(program)):
                _compare_finite(where, found[name], value)
            else:
                exact_value = expected[number][name]
                got = found[name]
                if program.held == "large" and got.dtype == value.dtype and value.isnan().any():
                    # Products with keys that are hidden overflow in eager, in another order of sums elsewhere;
                    # FlexAttention drops them.
                    overflowed = (value.isnan() | got.isnan()) & exact_value.isfinite()
                    got, value = got.masked_fill(overflowed, 0.0), value.masked_fill(overflowed, 0.0)
                    exact_value = exact_value.masked_fill(overflowed, 0.0)
                try:
                    _compare(where, got, value, exact_value, roundings, vague)
                except Mismatch:
                    if program.changed == "none":
                        raise
                    # A kernel that does not round the scores is as near to double precision as that allows.
                    _compare(where, got, value, precise[number][name], roundings, vague)
    for event in omnicomp.timeline.events():
        # The graph goes on without the passes then, which gives the right results. Where a certificate is refuted, as
        # for rows that hide everything, the program counts as one that is not fused.
        if isinstance(event, Retreat) and event.source_lowering == "passes" and event.reason.code != "not_certified":
            raise Mismatch(f"{event.reason.sentence}: {program!r}")
    outcome = _outcome(program, empty_rows)
    if program.after == "weights" and outcome.targets:
        raise Mismatch(f"fused although the weights are returned: {program!r}")
    return outcome


def _passes_gradients(program: Program) -> bool:
    """Whether queries that attend to nothing have eager's gradients: one finite minimum is added to their scores."""
    added = program.masking.startswith("add") and program.fill == "min" and program.sinks == "none"
    once = program.combine != "sequence" and not program.joined and program.after == "none"
    return added and once and program.dtype != "float16" and program.softmax != "clamped" and program.bias == "none"


def _compiled(program: Program, **options: Any) -> tuple[Any, Built]:
    """A program built anew, so that nothing that eager did to its tensors is seen, and compiled."""
    built = build(program)
    dynamic = True if program.dynamic == "dynamic" else None
    compiled = torch.compile(built.module, dynamic=dynamic, fullgraph=True, **options)
    if program.dynamic == "mark":
        _mark(built.calls)
    return compiled, built


def _is_captured(program: Program) -> bool:
    """Whether Dynamo captures a program at all."""
    torch.compiler.reset()
    compiled, built = _compiled(program, backend="eager")
    try:
        for call in built.calls:
            compiled(**call)
    except Exception:  # any of Dynamo's, which the caller has a like of
        return False
    return True


def _results(function: Any, module: nn.Module, call: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    outputs = function(**call)
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    leaves = {**dict(module.named_parameters()), **call}
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    if not any(out.requires_grad for out in outputs):
        return found
    # Weights that differ from place to place, so that no two errors cancel.
    loss = sum((out * torch.arange(out.numel()).cos().view(out.shape).to(out.dtype)).sum() for out in outputs)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    return {**found, **{f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}}


def _mark(calls: tuple[dict[str, Tensor], ...]) -> None:
    """Mark every dimension that differs between the calls; a size of one is compiled apart in any case."""
    for name, first in calls[0].items():
        for dimension, (here, there) in enumerate(zip(first.shape, calls[1][name].shape, strict=True)):
            if here != there and here > 1:
                torch._dynamo.mark_dynamic(first, dimension)


def _dtype(x: Tensor) -> Any:
    return x.dtype


def _shape(x: Tensor) -> Any:
    return x.shape


def _strides(x: Tensor) -> Any:
    """The strides that matter: that of a dimension of one is arbitrary."""
    return [(d, stride) for d, stride in enumerate(x.stride()) if x.size(d) != 1]


def _compare_finite(where: str, found: Tensor, own: Tensor) -> None:
    """Gradients through queries that attend to nothing have no meaning, but must not spoil what eager keeps finite."""
    spoiled = own.isfinite() & ~found.isfinite()
    if found.dtype != own.dtype or found.shape != own.shape or bool(spoiled.any()):
        raise Mismatch(f"not finite, or of another dtype or shape, at {int(spoiled.sum())} places: {where}")


def _compare(where: str, found: Tensor, own: Tensor, exact: Tensor, roundings: float, vague: bool) -> None:
    for what, read in (("dtype", _dtype), ("shape", _shape), *((("strides", _strides),) * where.startswith("output"))):
        if read(found) != read(own):
            raise Mismatch(f"{what} {read(found)}, in eager {read(own)}: {where}")
    if own.numel() == 0:
        return
    found, own = found.double(), own.double()
    for what, test in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        if not torch.equal(test(found), test(own)):
            differing = int((test(found) != test(own)).sum())
            raise Mismatch(f"{what} elsewhere than in eager at {differing} of {own.numel()} places: {where}")
    finite = own.isfinite() & exact.isfinite()
    zero = torch.zeros((), dtype=torch.float64)
    error, own_error = (torch.where(finite, (x - exact).abs(), zero) for x in (found, own))
    # Row by row, so that eager's error in one row excuses no other; but where rows are vague, a small one is luck.
    rows = own_error.max() if vague or not own.dim() else own_error.amax(-1, keepdim=True)
    floor = roundings * max(1.0, float(torch.where(finite, exact.abs(), zero).max()))
    bound = torch.clamp(SLACK * torch.maximum(rows, rows.median()), min=floor)
    if bool((error > bound).any()):
        worst = int((error / bound).argmax())
        raise Mismatch(
            f"off by {error.flatten()[worst]:.3g} at {worst}, where {bound.expand_as(error).flatten()[worst]:.3g} is "
            f"allowed (eager is off by {own_error.max():.3g}): {where}"
        )


def _outcome(program: Program, empty_rows: bool) -> Outcome:
    report = omnicomp.audit()
    rewrites = [[r for r in graph.rewrites if r.kind == "attention"] for graph in report.graphs]
    return Outcome(
        fused=bool(rewrites) and all(len(found) >= program.layers for found in rewrites),
        graphs=len(report.graphs),
        empty_rows=empty_rows,
        reasons=tuple(miss.reason.code for miss in report.sites.near_misses),
        targets=tuple(r.target for found in rewrites for r in found),
    )


class Tally:
    """Counts what was fused, by the value of each field of the programs."""

    def __init__(self) -> None:
        self.checked = collections.Counter[tuple[str, Any]]()
        self.fused = collections.Counter[tuple[str, Any]]()
        self.targets = collections.Counter[str]()
        self.reasons = collections.Counter[str]()
        self.empty_rows = 0
        self.unsuited: list[Program] = []
        self.failures: list[tuple[Program, str]] = []

    def add(self, program: Program, outcome: Outcome) -> None:
        """Count a program that was checked."""
        keys = [("", "all"), *((f.name, getattr(program, f.name)) for f in dataclasses.fields(program))]
        for key in keys:
            self.checked[key] += 1
            self.fused[key] += outcome.fused
        self.targets.update(outcome.targets)
        self.reasons.update(outcome.reasons)
        self.empty_rows += outcome.empty_rows

    def share(self, field: str = "", value: Any = "all") -> float:
        """Share of the checked programs that were fused, of all or of those with a value of a field."""
        return self.fused[field, value] / max(1, self.checked[field, value])

    @property
    def count(self) -> int:
        """Number of programs that gave the right results."""
        return self.checked["", "all"]

    def report(self) -> str:
        """Plain text: the counts, the shares by field, and the failures, each with its program."""
        lines = [
            f"{self.count} right, {len(self.failures)} failed, {len(self.unsuited)} unsuited; "
            f"fused {self.share():.1%}; {self.empty_rows} with queries that attend to nothing"
        ]
        skipped = ("seed", "batch", "heads", "kv_heads", "queries", "keys", "factor")
        for field in (f.name for f in dataclasses.fields(Program) if f.name not in skipped):
            values = sorted((value for name, value in self.checked if name == field), key=str)
            shares = (f"{value} {self.share(field, value):.0%} of {self.checked[field, value]}" for value in values)
            lines.append(f"  {field}: {', '.join(shares)}")
        lines += [f"  {what}: {', '.join(f'{n} {c}' for n, c in found.most_common())}" for what, found in self._named]
        lines += [f"FAILED {program!r}\n  {message}" for program, message in self.failures]
        lines += [f"unsuited {program!r}" for program in self.unsuited[:20]]
        return "\n".join(lines)

    @property
    def _named(self) -> tuple[tuple[str, collections.Counter[str]], ...]:
        return ("became", self.targets), ("near misses", self.reasons)


def _attempt(place: tuple[int, int]) -> tuple[Program, Outcome | None, str]:
    """Check the program with a seed and an index; an error's text instead of the error, which may not be picklable."""
    program = random_program(*place)
    torch.set_num_threads(1)
    try:
        return program, check(program), ""
    except Unsuited:
        return program, None, ""
    except Exception as error:  # the report shows it beside the program
        return program, None, f"{type(error).__name__}: {error}"


def prepare(direct: bool) -> None:
    """Make a worker ready; with `direct` the rewritten graph is run as it is, which takes a third of the time."""
    processes.import_torch()
    if direct:
        pipeline.compile_parts = lambda module, inputs, graph: module.forward


def _run(examples: int, seed: int, jobs: int, start: int, direct: bool) -> Tally:
    tally, began = Tally(), time.perf_counter()
    places = [(seed, index) for index in range(start, start + examples)]
    # Workers are replaced now and then, because compiled code is not freed as long as a process lives.
    with multiprocessing.get_context("spawn").Pool(jobs, prepare, (direct,), 20) as pool:
        results: Iterable[tuple[Program, Outcome | None, str]] = pool.imap(_attempt, places, chunksize=25)
        for number, (program, outcome, message) in enumerate(results, 1):
            if outcome is not None:
                tally.add(program, outcome)
            elif message:
                tally.failures.append((program, message))
                print(f"FAILED {program!r}\n  {message}", file=sys.stderr, flush=True)
            else:
                tally.unsuited.append(program)
            if number % 500 == 0:
                print(f"{number} in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return tally


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attention_checks")
    parser.add_argument("--examples", type=int, default=500, help="how many programs to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of programs")
    parser.add_argument("--start", type=int, default=0, help="index in the sequence to start at")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--direct", action="store_true", help="without AOTAutograd behind the passes")
    parser.add_argument("--program", help="check this one only, written as its repr")
    arguments = parser.parse_args()
    if arguments.program:
        print(check(eval(arguments.program, {"Program": Program})))
        return 0
    tally = _run(arguments.examples, arguments.seed, arguments.jobs, arguments.start, arguments.direct)
    print(tally.report())
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
