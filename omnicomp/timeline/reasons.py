"""Why something did not happen: a `Reason` has a stable code, what was seen and wanted, and a lever; values as text."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from omnicomp import records
from omnicomp.safety.escapes import shown

RECOMPILE_LIMIT: Final = "recompile_limit"

CODES: Final[dict[str, str]] = {
    # placement
    "no_override": "no override is registered for the operator",
    "override_refused": "an override matched, but its checker refused the arguments",
    "lowering_excluded": "the lowering is not in the policy, or the device does not have it",
    "unsupported_op": "the lowering can't take the operator",
    "engine_missing": "the library of an engine is not installed, or too old",
    "cluster_refused": "an engine takes the operators, but not the subgraph that they make",
    "not_exact": "the lowering's code is not known to give eager's bits, which the option `numerics` asks for",
    "not_batch_invariant": "the operator may compute other values for a row beside other rows, which the option "
    "`numerics` forbids",
    "unsafe_in_eager": "the operator would give other values outside the compiled graph",
    # capture
    "graph_break": "Dynamo ended the graph before the function was over: the rest is a graph of its own",
    RECOMPILE_LIMIT: "Dynamo compiled the function as often as it may: calls that need another graph run eager",
    # building
    "build_failed": "the lowering raised while it built the subgraph",
    "cut_out": "the node was cut out because building it failed",
    "budget_spent": "building took longer than allowed; no longer recorded",
    "capture_failed": "autograd or a pre-autograd pass of the compiler raised on the whole graph",
    # calling
    "call_failed": "the executable raised in a call",
    "inputs_differ": "the inputs of a first call were not what the code was built for",
    "forward_mode": "a call asked for a forward-mode derivative, which compiled code does not compute",
    "eager_autograd": "a gradient was asked for that a compiled backward can't give, or the option `autograd` asks for "
    "eager's",
    "not_repeatable": "a failed call can't be repeated on another lowering without changing what the program computes",
    "shared_memory": "inputs that a graph writes to share memory otherwise than when it was compiled",
    "weights_changed": "a weight that was built into an executable has changed since",
    "engine_crashed": "the process that tried an engine on the subgraph died; no longer recorded",
    "not_recorded": "the calls of a subgraph are not recorded as CUDA graphs",
    "slower": "another candidate was measured to be faster",
    "left_whole": "regions that repeat could not be built once, or it would not pay",
    "verification_failed": "a result was farther from a higher precision than eager's own",
    # passes
    "match_ended": "a candidate for a rewrite was followed up to a node that the pass does not understand",
    "not_profitable": "the rewrite is right, but would not be faster on this device",
    "not_equal": "the rewrite would change values beyond the dtype's tolerance",
    "error_bound": "in low precision the outputs would be, or could be, farther off than the option dtype_error allows",
    "pass_left_out": "a pass from outside failed, and the graph goes on without what it rewrote",
    "not_certified": "what a pass made of a graph computes something else, and the graph goes on without it",
    "dtype_refused": "an operator needs a dtype that the device lacks, and takes no other",
    # speculation
    "not_checkable": "an assumption can't be checked cheaply from the inputs of the graph",
    "assumption_failed": "what a variant was compiled for was not so in the calls that were seen",
    "check_failed": "the check of an assumption raised",
    # builds in the background
    "not_in_background": "the graph can't be built by another process, and the program waits for it",
    # ranks
    "ranks_differ": "the ranks of a job compiled a graph with collectives in different ways",
    "rank_missing": "a rank did not come to a graph with collectives, or ended before it",
    # options and caches
    "option_ineffective": "an option was requested, but has no effect",
    "verdict_unusable": "what earlier processes found to fail can't be read or kept",
    "key_record_unusable": "what earlier compilations were made of can't be read or kept",
    "artefacts_differ": "a file of artefacts was made for another version, device or machine",
}


@records.dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a node, a subgraph or a rewrite was not taken.

    Attributes:
        code: a key of `CODES`.
        sentence: one plain sentence for a person.
        observed: the value that was seen, for example `dtype=torch.bfloat16`; empty if there is none.
        needed: what would have been accepted; empty if nothing would.
        node: name of the FX node, and its operator, for example `softmax (torch.nn.functional.softmax)`.
        source: `file:line` of the user's code, or empty if the compiler did not record it.
        cause: name of the node that caused it, where that is another one.
        lever: what the reader can change, as an imperative sentence.
        by: the lowering, pass or override that gives the reason.
    """

    code: str
    sentence: str
    by: str = ""
    observed: str = ""
    needed: str = ""
    node: str = ""
    source: str = ""
    cause: str = ""
    lever: str = ""

    def __post_init__(self) -> None:
        """Refuse a code that is not in `CODES`: readers of the JSON form rely on the list."""
        if self.code not in CODES:
            raise ValueError(f"unknown reason code {self.code!r}; add it to omnicomp.timeline.reasons.CODES")

    def __str__(self) -> str:
        """One line: the sentence, what was seen and needed, where, and the lever."""
        parts = [self.sentence]
        if self.observed or self.needed:
            seen = f"observed {self.observed}" if self.observed else ""
            need = f"needed {self.needed}" if self.needed else ""
            parts.append(f"({'; '.join(p for p in (seen, need) if p)})")
        if self.node or self.source:
            parts.append(f"at {' '.join(p for p in (self.node, self.source) if p)}")
        text = " ".join(parts)
        return f"{text}. To change this: {self.lever}" if self.lever else text

    def to_dict(self) -> dict[str, str]:
        """The JSON form: every field that is not empty."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Reason":
        """The inverse of `to_dict`; fields of newer versions are dropped, an unknown code is kept as written."""
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {key: str(value) for key, value in data.items() if key in known}
        reason = object.__new__(cls)
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else field.default
            object.__setattr__(reason, field.name, kept.get(field.name, default))
        return reason


_DEEPEST: Final = 8
_SHOWN: Final = 8


def common_path(paths: Iterable[str]) -> str:
    """The module path that all of the paths begin with: `layers.3` of `layers.3.attn` and `layers.3.mlp`; or empty."""
    shared: list[str] | None = None
    for path in paths:
        names = path.split(".")
        if shared is None:
            shared = names
        elif shared != names[: len(shared)]:
            same = (index for index, (one, other) in enumerate(zip(shared, names, strict=False)) if one != other)
            shared = shared[: next(same, min(len(shared), len(names)))]
    return ".".join(shared or ())


def distinct(values: Iterable[str]) -> tuple[str, ...]:
    """The first eight distinct, non-empty values, in order."""
    return tuple(dict.fromkeys(value for value in values if value))[:_SHOWN]


def text_of(value: Any, depth: int = 0) -> str:
    """A value as a person would write it: lists without brackets, functions and classes by their names."""
    if depth > _DEEPEST:
        return "…"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(item, depth + 1)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(text_of(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return ", ".join(sorted(text_of(item, depth + 1) for item in value))
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else shown(value)
