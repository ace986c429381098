"""Replays silent wrong results that were reported of torch.compile, and writes docs/known_bugs.md.

Each program runs in eager, under Inductor, under omni as it is, and under omni with `verify="always"` and
`verify="inductor"`. One that Inductor has right today is run again with its fault planted, where it has a plant.
Results go into a JSON Lines file, one for each version of torch; `--into` makes the page of all of them.

    python bench/known_bugs --json known-bugs-2.13.jsonl
    python bench/known_bugs --report known-bugs-2.11.jsonl known-bugs-2.13.jsonl --into docs/known_bugs.md
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from programs import BUGS, Bug
from report import page
from torch.utils._pytree import tree_leaves

import omnicomp  # noqa: F401 - registers the backend
from omnicomp.timeline import Certified, current

RIGHT = "right"
# What each column compiles by; no backend is eager.
COLUMNS: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "omni": {"backend": "omni", "options": {"verdicts": "off"}},
    "verify": {"backend": "omni", "options": {"verdicts": "off", "verify": "always"}},
    "passes": {"backend": "omni", "options": {"verdicts": "off", "verify": "inductor"}},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a caller saw.

    Attributes:
        leaves: what was returned, if nothing was raised.
        raised: the kind of error.
        told: whether omni said that something was wrong, or took another way.
    """

    leaves: tuple[Any, ...] = ()
    raised: str = ""
    told: str = ""


def run(known: Bug, how: dict[str, Any] | None) -> Outcome:
    """Run a program; None is eager."""
    torch.compiler.reset()
    torch.manual_seed(0)
    seen = len(current().events())

    def compile(function: Any) -> Any:
        return function if how is None else torch.compile(function, **how)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaves = tuple(
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) and not known.strides else leaf
                for leaf in tree_leaves(known.program(compile))
            )
    except Exception as error:
        return Outcome(raised=type(error).__name__)
    reasons = [getattr(event, "reason", None) for event in current().events()[seen:]]
    codes = [reason.code for reason in reasons if reason is not None]
    if any(isinstance(event, Certified) and event.verdict == "refuted" for event in current().events()[seen:]):
        codes.append("verification_failed")
    return Outcome(leaves=leaves, told=next((code for code in codes if code == "verification_failed"), ""))


def compare(known: Bug, found: Outcome, expected: Outcome) -> str:
    """`right`, or what differs."""
    if bool(found.raised) != bool(expected.raised):
        return f"raises {found.raised}" if found.raised else f"does not raise {expected.raised}"
    if len(found.leaves) != len(expected.leaves):
        return "other results"
    for mine, own in zip(found.leaves, expected.leaves, strict=True):
        if not isinstance(own, torch.Tensor) or not isinstance(mine, torch.Tensor):
            if mine != own:
                return "another value"
            continue
        if mine.dtype != own.dtype:
            return f"{_name(mine.dtype)} for {_name(own.dtype)}"
        if mine.shape != own.shape:
            return "another shape"
        if known.strides and mine.stride() != own.stride():
            return "other strides"
        if known.exact or not (own.is_floating_point() or own.is_complex()):
            if not torch.equal(mine, own):
                return "another rounding" if known.exact else "wrong"
            continue
        bound = 2e-2 if own.dtype in (torch.float16, torch.bfloat16) else 2e-5
        if not torch.allclose(mine, own, rtol=bound, atol=0.0 if own.abs().max() < 1e-30 else bound, equal_nan=True):
            return "wrong"
    return RIGHT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replay(known: Bug) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"issue": known.issue, "torch": torch.__version__.partition("+")[0]}
    expected = run(known, None)
    again = compare(known, run(known, None), expected)
    row["eager"] = again if again != RIGHT else expected.raised or RIGHT
    row |= _columns(known, expected, contextlib.nullcontext())
    row["planted"] = {}
    if known.plant is not None and row["inductor"] == RIGHT:
        row["planted"] = _columns(known, expected, known.plant())
    return row


def _columns(known: Bug, expected: Outcome, around: contextlib.AbstractContextManager[None]) -> dict[str, str]:
    row: dict[str, str] = {}
    with around:
        for column, how in COLUMNS.items():
            found = run(known, how)
            row[column] = compare(known, found, expected)
            if found.told:
                row[f"{column} said"] = found.told
    return row


@contextlib.contextmanager
def _lines(path: str | None) -> Iterator[Any]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "a", encoding="utf-8") as file:
        yield file


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of issues")
    parser.add_argument("--json", help="append the results to this file; issues that are in it are not run again")
    parser.add_argument("--most", type=int, help="how many to run")
    parser.add_argument("--report", nargs="+", help="make the page of these files")
    parser.add_argument("--into", help="where the page goes")
    arguments = parser.parse_args()
    if arguments.report:
        rows = [json.loads(line) for path in arguments.report for line in Path(path).read_text("utf-8").splitlines()]
        text = page(BUGS, rows)
        if arguments.into:
            Path(arguments.into).write_text(text, "utf-8")
        else:
            print(text)
        return
    done: set[int] = set()
    if arguments.json and Path(arguments.json).exists():
        done = {json.loads(line)["issue"] for line in Path(arguments.json).read_text("utf-8").splitlines()}
    chosen = [known for known in BUGS if known.issue not in done and known.issue in (arguments.only or [known.issue])]
    with _lines(arguments.json) as out:
        for known in chosen[: arguments.most]:
            start = time.perf_counter()
            row = replay(known)
            print(json.dumps(row), file=out, flush=True)
            print(f"{known.issue} {time.perf_counter() - start:.1f} s {row}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
