"""Property checks of masks that come in: random programs under omni against the same programs in float64.

    python -m incoming_masks --examples 10000 --seed 0 --jobs 2
    python -m incoming_masks --program "Program(spelling='call', arrival='buffer')"

A program is an attention whose mask comes in somehow, and a sequence of masks that it is called with: swapped, written
in place, expanded, sliced. The first form draws programs and prints those that failed; the second checks one program,
as a failure prints it. Both end with exit code 1 if something failed.
"""

import argparse
import dataclasses
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from attention_checks import prepare
from torch import Tensor, nn

import omnicomp
from omnicomp.passes.attention import assume
from omnicomp.timeline import Retreat, Rewrite

OPTIONS: Final[dict[str, Any]] = {"lowerings": ["eager"], "summary": False}
BATCH, HEADS, SIZE = 2, 2, 8
SLACK: Final = 4.0
CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "spelling": ("add", "add", "fill", "where", "inverted", "call", "call added"),
    "arrival": ("input", "input", "input", "buffer", "parameter", "padding"),
    "layout": ("plain", "plain", "expanded", "sliced", "view", "transposed"),
    "masks": tuple(
        (first, second, third)
        for first in ("full", "causal", "window", "right", "left", "noise", "empty", "prefix", "documents")
        for second in ("causal", "full", "right", "left", "noise")
        for third in ("", "same", "causal")
    ),
    "change": ("swapped", "swapped", "written", "through a view"),
    "hidden": ("min", "-inf", "-1e9"),
    "dtype": ("float32", "float32", "bfloat16", "float16", "float64"),
    "static": ("none", "none", "causal"),
    "layers": (1, 1, 2),
    "training": (False, True),
    "dynamic": (False, False, True),
    "form": ("pairs", "pairs", "heads", "flat", "keys"),
    "held": ("same", "same", "wide", "integers"),
    "past": (0, 0, 3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """An attention, how its mask comes in, and the masks of its calls.

    Attributes:
        spelling: what is done with the mask.
        arrival: what it is to the program; `padding`: a mask of keys that is expanded inside.
        layout: how the tensor lies in the memory of a larger one.
        masks: kinds of masks, one a call; `same`: the one of the call before, unchanged.
        change: how one mask is followed by the next.
        hidden: the number that stands for a hidden key where numbers are added or filled in.
        dtype: of queries, keys, values, and of a mask that is added.
        static: a mask that the program makes itself besides.
        layers: how many attentions share it.
        training: whether gradients are compared.
        dynamic: whether sizes are symbolic; then they differ from call to call, unless the mask is written in place.
        form: the shape that the mask comes in: `pairs` for (B, 1, Q, K), `heads` for (B, H, Q, K), `flat` for (Q, K) of
            the first sequence, `keys` for (B, 1, 1, K) of the last query.
        held: the dtype that the mask comes in, and is cast from inside: `wide` for float64, `integers` for int64 where
            it is no number to add.
        past: how many keys there are more than queries, as in a cache.
    """

    spelling: str = "add"
    arrival: str = "input"
    layout: str = "plain"
    masks: tuple[str, ...] = ("causal", "full", "same")
    change: str = "swapped"
    hidden: str = "min"
    dtype: str = "float32"
    static: str = "none"
    layers: int = 1
    training: bool = False
    dynamic: bool = False
    form: str = "pairs"
    held: str = "same"
    past: int = 0

    @property
    def added(self) -> bool:
        """Whether the mask is a tensor of numbers."""
        return self.spelling in ("add", "call added")


class Failure(AssertionError):
    """A program gave another result than eager."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of a program that gave the right results.

    Attributes:
        fused: whether all its attentions were.
        settled: whether a variant was made in which the mask is left out.
        known: whether some call's mask is full or causal, so that one could be.
    """

    fused: bool
    settled: bool
    known: bool


def random_program(seed: int, index: int) -> Program:
    """The program of a number."""
    draw = random.Random(f"{seed} {index}")
    return Program(**{name: draw.choice(options) for name, options in CHOICES.items()})


class _Attention(nn.Module):
    def __init__(self, program: Program, mask: Tensor | None) -> None:
        super().__init__()
        self.program = program
        if program.arrival == "parameter" and mask is not None and mask.is_floating_point():
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        if self.program.held != "same":
            mask = mask.to(q.dtype) if self.program.added else mask != 0
        if self.program.arrival == "padding":
            mask = mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
        if self.program.layout == "sliced":
            mask = mask[..., : q.shape[2] if self.program.form != "keys" else 1, : k.shape[2]]
        for _ in range(self.program.layers):
            q = self._attend(q, k, v, mask)
        return q

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        program, scale = self.program, q.shape[-1] ** -0.5
        own = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(program.past)
        lowest = _number(program.hidden, q.dtype)
        causal = program.static == "causal"
        if program.spelling.startswith("call"):
            if causal:
                mask = mask & own if mask.dtype is torch.bool else mask.masked_fill(~own, lowest)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.mT * scale
        if causal:
            scores = scores.masked_fill(~own, lowest)
        if program.spelling == "add":
            scores = scores + mask
        elif program.spelling == "fill":
            scores = scores.masked_fill(~mask, lowest)
        elif program.spelling == "where":
            scores = torch.where(mask, scores, lowest)
        else:
            scores = scores + (1.0 - mask.to(q.dtype)) * torch.finfo(q.dtype).min
        return scores.softmax(-1) @ v


def _number(name: str, dtype: torch.dtype) -> float:
    if name == "-inf":
        return -math.inf
    return max(-1e9, torch.finfo(dtype).min) if name == "-1e9" else torch.finfo(dtype).min


def _visible(kind: str, size: int, draw: random.Random) -> Tensor:
    causal = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
    cut = draw.randrange(1, size)
    keys = torch.arange(size) < torch.tensor([size, cut])[:, None, None, None]
    if kind == "full":
        return torch.ones_like(causal)
    if kind == "window":
        return causal.triu(-cut)
    if kind == "prefix":
        return causal | (torch.arange(size) < cut)
    if kind in ("right", "left"):
        keys = keys if kind == "right" else keys.flip(-1)
        return keys & (causal if draw.random() < 0.5 else torch.ones_like(causal))
    if kind == "documents":
        marks = torch.tensor([sorted(draw.randrange(3) for _ in range(size))])
        return (marks[:, :, None] == marks[:, None])[:, None]
    if kind in ("noise", "empty"):
        noise = torch.tensor([[draw.random() < 0.6 for _ in range(size)] for _ in range(size)])
        return (noise if kind == "empty" else noise | torch.eye(size, dtype=torch.bool))[None, None]
    return causal


def _calls(program: Program) -> Iterator[tuple[Tensor, int]]:
    """For each call what the queries see, and how many there are."""
    draw = random.Random(repr(program))
    fixed = program.change != "swapped" or program.arrival in ("buffer", "parameter")
    visible, size = torch.empty(0), 6
    for number, kind in enumerate(program.masks):
        if not kind:
            continue
        if kind != "same":
            size = 6 + number * (program.dynamic and not fixed)
            keys = size + program.past
            visible = _visible(kind, keys, draw)[:, :, program.past :]
            if program.arrival == "padding":
                visible = visible[:, 0, -1:, :].expand(BATCH, 1, keys)[:, 0]
            elif program.form == "keys":
                visible = visible[:, :, -1:].expand(BATCH, 1, 1, keys)
            elif program.form == "flat":
                visible = visible[0, 0]
            elif program.form == "heads":
                visible = visible.expand(BATCH, HEADS, size, keys)
            elif fixed:
                visible = visible.expand(BATCH, 1, size, keys)
        yield visible, size


def _as_passed(visible: Tensor, program: Program, dtype: torch.dtype) -> Tensor:
    """The mask as a tensor of the program."""
    made = visible.clone()
    if program.added:
        lowest = _number(program.hidden, getattr(torch, program.dtype))
        held = torch.float64 if program.held == "wide" else dtype
        made = torch.zeros(visible.shape, dtype=held).masked_fill(~visible, lowest)
    elif program.held != "same":
        made = made.to(torch.int64 if program.held == "integers" else torch.float64)
    if program.arrival == "padding":
        return made
    if program.layout == "expanded":
        return made[:1].expand(BATCH, 1, -1, -1) if made.dim() == 4 and len(made) == 1 else made
    if program.layout == "sliced":
        return F.pad(made, (0, 2, 0, 2), value=0) if made.dtype is not torch.bool else F.pad(made, (0, 2, 0, 2))
    if program.layout == "view":
        return torch.cat([made, made])[len(made) :]
    return made.mT.contiguous().mT if program.layout == "transposed" else made


def _results(program: Program, dtype: torch.dtype, *, compiled: bool) -> list[list[Tensor]]:
    module: Any = None
    run: Any = None
    held: Tensor | None = None
    found: list[list[Tensor]] = []
    known: Tensor | None = None
    for number, (visible, size) in enumerate(_calls(program)):
        same = known is visible
        known = visible
        mask = held if same and held is not None else _as_passed(visible, program, dtype)
        own = program.arrival in ("buffer", "parameter")
        if held is not None and not same and (own or program.change != "swapped") and held.shape == mask.shape:
            if not _is_expanded(held):
                (held[:] if program.change == "through a view" else held).copy_(mask)
                mask = held
        if module is None or (own and mask is not held):
            module = _Attention(program, mask if own else None)
            if compiled:
                dynamic = True if program.dynamic else None
                run = torch.compile(module, backend="omni", options=OPTIONS, fullgraph=True, dynamic=dynamic)
            else:
                run = module
        held = mask
        generator = torch.Generator().manual_seed(number)
        q, k, v = (
            torch.randn(BATCH, HEADS, length, SIZE, generator=generator, dtype=torch.float64)
            .to(getattr(torch, program.dtype))
            .to(dtype)
            .requires_grad_(program.training)
            for length in (size, size + program.past, size + program.past)
        )
        with torch.set_grad_enabled(program.training):
            out = run(q, k, v, *(() if own else (mask,)))
        values = [out.detach()]
        if compiled and (out.stride() != q.stride() or out.dtype != dtype):
            raise Failure(f"another dtype or layout than eager's: {program!r}")
        if program.hidden == "-1e9":
            # What is left of a score beside this number depends on the precision, where it hides them all.
            rows = visible if program.arrival != "padding" else visible[:, None, None]
            values[0] = values[0].masked_fill(~(rows & _static(program, size)).any(-1, keepdim=True), 0.0)
        if program.training and bool(visible.any(-1).all()) and not _may_be_empty(program):
            weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
            values += torch.autograd.grad((out * weight).sum(), (q, k, v))
        found.append(values)
    return found


def _static(program: Program, size: int) -> Tensor:
    seen = torch.ones(size, size + program.past, dtype=torch.bool)
    return seen.tril(program.past) if program.static == "causal" else seen


def _is_expanded(mask: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _may_be_empty(program: Program) -> bool:
    """Whether a row may be empty although the mask that comes in leaves none so."""
    return program.static == "causal"


def check(program: Program) -> Outcome:
    """Compile a program and compare every output and gradient of each call with eager and with float64.

    Raises:
        Failure: they differ, or a pass raised an exception.
    """
    torch.compiler.reset()
    omnicomp.timeline.clear()
    worth, assume.worth = assume.worth, lambda *args, **kwargs: None  # small ones show what is done with large ones
    dtype = getattr(torch, program.dtype)
    try:
        eager = _results(program, dtype, compiled=False)
        exact = _results(program, torch.float64, compiled=False)
        found = _results(program, dtype, compiled=True)
    finally:
        assume.worth = worth
    eps = torch.finfo(dtype).eps * (64 if dtype in (torch.float32, torch.float64) else 8)
    for number, (got, own, true) in enumerate(zip(found, eager, exact, strict=True)):
        for name, a, b, c in zip(("output", "dq", "dk", "dv"), got, own, true, strict=False):
            _compare(f"{name} of call {number} of {program!r}", a, b, c.to(torch.float64), eps)
    events = omnicomp.timeline.events()
    for event in events:
        if isinstance(event, Retreat):
            raise Failure(f"{event.reason.sentence}: {program!r}")
    details = [event.detail for event in events if isinstance(event, Rewrite) and event.kind == "attention"]
    return Outcome(
        fused=bool(details) or program.spelling.startswith("call"),
        settled=any("mask" not in detail for detail in details),
        known=(
            program.masks[0] == "full" or (program.masks[0] == "causal" and program.form != "keys" and not program.past)
        )
        and program.arrival != "padding"
        and (program.static != "causal" or not program.past),
    )


def _compare(where: str, got: Tensor, own: Tensor, true: Tensor, eps: float) -> None:
    if not torch.equal(got.isnan(), own.isnan()):
        raise Failure(f"NaN where eager has none, or the other way round: {where}")
    error, mine = ((x.double() - true).nan_to_num().abs().max().item() for x in (got, own))
    if error > max(SLACK * mine, eps * max(1.0, true.nan_to_num().abs().max().item())):
        raise Failure(f"off by {error:.2g}, eager by {mine:.2g}: {where}")


def _checked(task: tuple[int, int]) -> str:
    torch.set_num_threads(1)
    program = random_program(*task)
    try:
        check(program)
    except Exception as error:
        return f"{task[1]}: {type(error).__name__}: {str(error)[:400]}\n    {program!r}"
    return ""


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--direct", action="store_true", help="without AOTAutograd behind the passes")
    parser.add_argument("--program", help="one program, as a failure prints it")
    arguments = parser.parse_args()
    if arguments.program:
        print(check(eval(arguments.program)))
        return 0
    start, failures = time.monotonic(), 0
    tasks = [(arguments.seed, index) for index in range(arguments.start, arguments.start + arguments.examples)]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, prepare, (arguments.direct,), 200) as pool:
        for text in pool.imap_unordered(_checked, tasks):
            if text:
                failures += 1
                print(text, flush=True)
    print(f"{failures} of {len(tasks)} failed, in {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(_main())
