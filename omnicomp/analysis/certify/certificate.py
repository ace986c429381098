"""What a check of a rewrite found: the certificate, its verdict, and what it rests on."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

FINITE_INPUTS: Final = "finite_inputs"
NO_OVERFLOW: Final = "no_overflow"
FINITE_RESULTS: Final = "finite_results"
NO_EMPTY_ROW: Final = "no_empty_row"
FILL_HIDES: Final = "fill_hides"
MASK_CLASS: Final = "mask_class"
SIZES: Final = "sizes"
ROUNDING: Final = "rounding"
SIGNED_ZERO: Final = "signed_zero"
STRIDES: Final = "strides"
DTYPES: Final = "dtypes"
DRAWS: Final = "draws"
BLOCKS: Final = "blocks"
NO_GRADIENTS: Final = "no_gradients"

KINDS: Final[Mapping[str, str]] = {
    FINITE_INPUTS: "no input holds an infinity or NaN, but for -inf in masks, and no operator makes one of numbers",
    NO_OVERFLOW: "no intermediate value overflows its dtype",
    FINITE_RESULTS: "what is finite for inputs of some hundreds may overflow; `no_overflow` says so as well",
    NO_EMPTY_ROW: "each row of a softmax keeps at least one element",
    FILL_HIDES: "an element filled with a number at or below `detail` (default -10000) has the weight zero",
    MASK_CLASS: "the input `subject` has the values of the class `detail`",
    SIZES: "the sizes are those that the check was asked about",
    ROUNDING: "results may differ by rounding, within the bound `detail` where there is one",
    SIGNED_ZERO: "zeros may have the other sign",
    STRIDES: "results may have other strides",
    DTYPES: "results may have other dtypes, of floating-point, complex or whole numbers as before",
    DRAWS: "random numbers may be drawn otherwise, with the same distribution",
    BLOCKS: "the block mask lists every block in which its predicate holds, and calls no other one full",
    NO_GRADIENTS: "nobody asks for gradients",
}
"""The kinds of assumptions, and what each says."""

MASK_CLASSES: Final = (
    "full", "hidden", "causal", "causal_bottom_right", "padding", "band", "prefix", "first", "rows",
)  # fmt: skip
"""What an assumption of the kind `mask_class` may say; `padding` hides the last keys of each row alike.

In `first` each row sees its first key, in `rows` any one; nothing else is known of these.

Numbers follow some: `band LEFT RIGHT`, where a query q sees the keys from q - LEFT to q + RIGHT, and `prefix RIGHT
LENGTH`, where it sees those up to q + RIGHT and the first LENGTH; `-` is no bound.
"""
ONES: Final = "ones"
"""Behind a class: a mask of floating-point numbers has ones and zeros, in place of zeros and minus infinities."""


PROVED: Final = "proved"
PROVED_FOR_SIZES: Final = "proved_for_sizes"
TESTED: Final = "tested"
ASSUMED: Final = "assumed"
REFUTED: Final = "refuted"
VERDICTS: Final = (PROVED, PROVED_FOR_SIZES, TESTED, ASSUMED, REFUTED)
"""What may be known of a rewrite, from the most to the least."""


@dataclasses.dataclass(frozen=True)
class Assumption:
    """What a claim rests on.

    Attributes:
        kind: one of `KINDS`.
        subject: the name of a placeholder, or empty for all.
        detail: a class of masks, a number, or free text; see `KINDS`.
    """

    kind: str
    subject: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no assumption is of the kind {self.kind!r}; there are {', '.join(KINDS)}")
        if self.kind == MASK_CLASS and self.detail.partition(" ")[0] not in MASK_CLASSES:
            raise ValueError(f"no class of masks is named {self.detail!r}; there are {', '.join(MASK_CLASSES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way in which the graphs were compared.

    Attributes:
        name: `structure`, `algebra`, `masks`, `numbers`, `gradients`, `rounding`, `effects` or `domain`.
        holds: whether the graphs agree by it; None where it does not apply.
        detail: what was compared, or why it does not apply.
    """

    name: str
    holds: bool | None
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Where reals agree and the programs do not.

    Attributes:
        kind: the kind of the assumption that would cover it.
        detail: what was seen.
        covered: whether an assumption of the claim covers it.
    """

    kind: str
    detail: str
    covered: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Witness:
    """Inputs for which the graphs differ.

    Attributes:
        method: the method that found them.
        sizes: the shape of each placeholder, by name.
        seed: draws the inputs again.
        output: the index of the output, or the name of the input that is written to.
        detail: the difference, for people.
        index: the element that differs most.
        before: its value before the rewrite.
        after: its value after it.
    """

    method: str
    sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    seed: int = 0
    output: int | str = ""
    detail: str = ""
    index: tuple[int, ...] = ()
    before: float | None = None
    after: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of a check.

    Attributes:
        verdict: one of `VERDICTS`.
        methods: each method that was tried, in order.
        assumptions: what the verdict rests on: those of the claim, and what the checker had to add.
        differences: what infinities, NaN, overflow, empty rows, strides and the like change.
        probability: base-2 logarithm of a bound on the probability that the algebra accepts graphs that differ; None
            where the verdict does not come from it.
        sizes: how many assignments of sizes were tried.
        witness: for `refuted`, inputs that show it.
        reason: one sentence for the audit.
        seconds: how long the check took.
    """

    verdict: str
    methods: tuple[Method, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    differences: tuple[Difference, ...] = ()
    probability: float | None = None
    sizes: int = 0
    witness: Witness | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the rewrite may be made: nothing refutes it."""
        return self.verdict != REFUTED

    @property
    def open(self) -> tuple[Difference, ...]:
        """The differences that no assumption covers."""
        return tuple(each for each in self.differences if not each.covered)

    def to_json(self) -> dict[str, Any]:
        """The certificate as values that `json.dumps` takes."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Certificate":
        """The certificate that `to_json` wrote."""
        fields: dict[str, Any] = dict(data)
        witness = fields.get("witness")
        if witness is not None:
            sizes = tuple((name, tuple(shape)) for name, shape in witness["sizes"])
            fields["witness"] = Witness(**dict(witness, sizes=sizes, index=tuple(witness["index"])))
        for name, kind in (("methods", Method), ("assumptions", Assumption), ("differences", Difference)):
            fields[name] = tuple(kind(**each) for each in fields.get(name, ()))
        return cls(**fields)
