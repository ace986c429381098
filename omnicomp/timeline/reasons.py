"""Why something did not happen: a `Reason` has a stable code, what was observed, what was needed, and a lever.

Codes are part of the JSON form: they are never renamed, only added. Sentences may be reworded.
"""

import dataclasses
from typing import Any, Final

__all__ = ["CODES", "Reason"]

CODES: Final[dict[str, str]] = {
    # placement
    "no_override": "no override is registered for the operator",
    "override_refused": "an override matched, but its checker refused the arguments",
    "lowering_excluded": "the lowering is not in the policy, or the device does not have it",
    "unsupported_op": "the lowering can't take the operator",
    "engine_missing": "the library of an engine is not installed, or too old",
    "cluster_refused": "an engine takes the operators, but not the subgraph that they make",
    "unsafe_in_eager": "the operator would give other values outside the compiled graph",
    # capture
    "graph_break": "Dynamo ended the graph before the function was over: the rest is a graph of its own",
    # building
    "build_failed": "the lowering raised while it built the subgraph",
    "cut_out": "the node was cut out because building it failed",
    "budget_spent": "building took longer than allowed; no longer recorded",
    "capture_failed": "autograd or a pre-autograd pass of the compiler raised on the whole graph",
    # calling
    "call_failed": "the executable raised in a call",
    "forward_mode": "a call asked for a forward-mode derivative, which compiled code does not compute",
    "eager_autograd": "a gradient was asked for that a compiled backward can't give, or the option `autograd` asks for "
    "eager's",
    "not_repeatable": "a failed call can't be repeated on another lowering without changing what the program computes",
    "shared_memory": "inputs that a graph writes to share memory otherwise than when it was compiled",
    "weights_changed": "a weight that was built into an executable has changed since",
    "engine_crashed": "the process that tried an engine on the subgraph died; no longer recorded",
    "slower": "another candidate was measured to be faster",
    "verification_failed": "a result was farther from a higher precision than eager's own",
    # passes
    "match_ended": "a candidate for a rewrite was followed up to a node that the pass does not understand",
    "not_profitable": "the rewrite is right, but would not be faster on this device",
    "not_equal": "the rewrite would change values beyond the dtype's tolerance",
    "error_bound": "in low precision the outputs would be, or could be, farther off than the option dtype_error allows",
    "dtype_refused": "an operator needs a dtype that the device lacks, and takes no other",
    # speculation
    "not_checkable": "an assumption can't be checked cheaply from the inputs of the graph",
    "assumption_failed": "what a variant was compiled for was not so in the calls that were seen",
    "check_failed": "the check of an assumption raised",
    # options and caches
    "option_ineffective": "an option was requested, but has no effect",
    "verdict_unusable": "what earlier processes found to fail can't be read or kept",
    "key_record_unusable": "what earlier compilations were made of can't be read or kept",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
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
