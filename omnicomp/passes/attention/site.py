"""One attention as it was read from a graph, and why reading one ended."""

import dataclasses
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp.analysis.nodes import op_name
from omnicomp.passes.attention.reader import At
from omnicomp.passes.attention.terms import Apply, Axis, Number, Position, Scores, Term, leaves
from omnicomp.passes.attention.trace import Op, Value

NO_MAXIMUM: Final = (
    "subtract no maximum from the scores, nor clamp them for it: a softmax subtracts the greatest of each row by itself"
)
"""What to do about a maximum of scores, which no fused kernel makes."""
FIXED_SIZES: Final = "compile with dynamic=False, or mark as dynamic only what changes"
"""What to do about a symbolic size that is not known well enough."""


class MatchEnded(Exception):
    """The match met something that it does not understand, or a rewrite that would not be equal or faster.

    Attributes:
        node: where the match ended.
        code: code of the `Reason`.
        observed: the observed form.
        needed: what would have been taken.
        lever: what the reader can change.
    """

    def __init__(
        self, node: Node, sentence: str, *, observed: str = "", needed: str, lever: str = "", code: str = "match_ended"
    ) -> None:
        super().__init__(sentence)
        self.node, self.code, self.needed = node, code, needed
        self.observed = observed or op_name(node)
        self.lever = lever or (
            "write softmax(q @ k.transpose(-2, -1) * scale + mask) @ v, or call scaled_dot_product_attention"
        )


@records.dataclass(frozen=True)
class Scale:
    """The scores are multiplied by `term`, which no feature, query or key changes; or divided by it."""

    term: Term
    divide: bool = False


@records.dataclass(frozen=True)
class Add:
    """`term` is added to the scores, or subtracted from them."""

    term: Term
    negative: bool = False


@records.dataclass(frozen=True)
class Fill:
    """The scores are replaced by `value` where the bool `condition` holds."""

    condition: Term
    value: Term


@records.dataclass(frozen=True)
class Emptied:
    """The weights of a row are zero if the bool `condition` holds for all of its keys."""

    condition: Term


@records.dataclass(frozen=True)
class Floor:
    """The scores are not lower than the number `value`."""

    value: float


@records.dataclass(frozen=True)
class Narrow:
    """The scores are cast to a dtype of a smaller range: those below a number become -inf."""

    least: float


@records.dataclass(frozen=True)
class Function:
    """A function of the scores that is none of the other steps, by its name in the terms' vocabulary."""

    op: str


Step = Scale | Add | Fill | Floor | Function


@records.dataclass(frozen=True)
class Operand:
    """Queries, keys or values: a tensor that the graph holds, and how the axes address it.

    Attributes:
        value: the tensor.
        node: the node that holds it where the attention's output is made.
        at: a position along each of its dimensions.
    """

    value: Value
    node: Node
    at: At


@records.dataclass(frozen=True, kw_only=True)
class Visited:
    """The blocks of keys that a call of FlexAttention is told to visit, where they are not proved to be its mask's.

    Attributes:
        partial: the nodes of `kv_num_blocks` and `kv_indices`.
        full: those of `full_kv_num_blocks` and `full_kv_indices`; None if there are none.
        sizes: of a block: queries and keys.
    """

    partial: tuple[Node, Node]
    full: tuple[Node, Node] | None
    sizes: tuple[int, int]


@records.dataclass(frozen=True, kw_only=True)
class Call:
    """The call of torch's own attention that a site was read from.

    Attributes:
        operands: the queries, keys and values that it is given.
        mask: the mask that it is given, and how the axes address it; None if there is none.
        arguments: the other arguments that differ from their defaults.
        default_scale: whether the scale is left to the call, because it depends on a symbolic size; `Site.scale` is 1.
        flex: whether it is a call of FlexAttention, which has a function for a mask.
        visited: the blocks that it visits, where these are not proved to be those of its mask.
    """

    operands: tuple[Node, Node, Node]
    mask: Operand | None
    arguments: dict[str, Any]
    default_scale: bool = False
    flex: bool = False
    visited: Visited | None = None


@dataclasses.dataclass(kw_only=True)
class Site:
    """One attention, read from the graph.

    Attributes:
        softmax: the operator that normalizes over keys.
        output: the node that the rewrite replaces: the product of weights and values.
        output_at: the position along each dimension of `output`.
        query: queries; addressed by `batch`, `queries` and `features` axes.
        key: keys; by `batch` (some), `keys` and `features`.
        value: values; by `batch` (some), `keys` and `value_features`.
        batch: the axes of batches and heads, outermost first.
        queries: the axes of the query index, most significant first.
        keys: the axes of the key index.
        features: the axes over which queries and keys are multiplied.
        value_features: the axes of the values' features.
        scale: product of all constant factors on queries and keys before their product.
        factors: other factors on them, which depend on the batch axes only.
        score: what the softmax reads, as a function of `Scores`.
        steps: the same as a chain of steps, innermost first; None if it is no chain.
        sinks: logits that take part in the softmax and have no value.
        gated: whether the sink scales the output instead, so that a row that is -inf for every key is NaN.
        dropout: probability of an active dropout on the weights, or 0.
        weights: factors on the weights after the softmax.
        undefined: what the weights are in rows that are -inf for every key: NaN, unless the program replaces that.
        repaired: whether the program makes every weight zero that is NaN, whatever it comes from.
        dtype: dtype of the output, in which the attention will run.
        chain: the nodes of the graph that the rewrite makes superfluous.
        product: the node of the product of queries and keys.
        call: the call that it was read from; None for one that is written out.
    """

    softmax: Op
    output: Node
    output_at: At
    query: Operand
    key: Operand
    value: Operand
    batch: tuple[Axis, ...]
    queries: tuple[Axis, ...]
    keys: tuple[Axis, ...]
    features: tuple[Axis, ...]
    value_features: tuple[Axis, ...]
    score: Term
    dtype: torch.dtype
    product: Node
    scale: float = 1.0
    factors: list[Scale] = dataclasses.field(default_factory=list[Scale])
    steps: list[Step | Narrow] | None = None
    sinks: list[Term] = dataclasses.field(default_factory=list[Term])
    gated: bool = False
    dropout: float = 0.0
    weights: list[Step | Emptied] = dataclasses.field(default_factory=list[Step | Emptied])
    undefined: float = float("nan")
    repaired: bool = False
    chain: set[Node] = dataclasses.field(default_factory=set[Node])
    call: Call | None = None

    def fake(self) -> torch.Tensor:
        """The fake tensor of the output."""
        value: Any = self.output.meta["example_value"]
        return value


def _has_scores(term: Term) -> bool:
    return any(isinstance(leaf, Scores) for leaf in leaves(term))


def uncast(term: Term) -> Term:
    """A term without the casts around it."""
    while isinstance(term, Apply) and term.op == "cast":
        term = term.args[0]
    return term


def number_in(term: Term) -> Any:
    """The number that a term is behind its casts, or None."""
    inner = uncast(term)
    return inner.value if isinstance(inner, Number) else None


def axes_in(term: Term) -> set[Axis]:
    """The axes that an element of the term depends on."""
    found: set[Axis] = set()
    for leaf in leaves(term):
        for position in tree_leaves(getattr(leaf, "at", None) or getattr(leaf, "position", None)):
            if isinstance(position, Position):
                found.update(position.flat())
    return found


def steps_of(score: Term) -> list[Step | Narrow] | None:
    """The steps from the product to `score`, innermost first, or None if the scores are used twice on the way."""
    steps: list[Step | Narrow] = []
    while not isinstance(score, Scores):
        if not isinstance(score, Apply):
            return None
        carriers = [n for n, argument in enumerate(score.args) if _has_scores(argument)]
        if len(carriers) != 1:
            return None
        inner = score.args[carriers[0]]
        if score.op != "cast":
            step = step_of(score, carriers[0])
            if step is None:
                return None
            steps.append(step)
        elif torch.finfo(score.dtype).min > torch.finfo(inner.dtype).min:
            steps.append(Narrow(_least_kept(inner.dtype, score.dtype)))
        score = inner
    return steps[::-1]


def _least_kept(source: torch.dtype, dtype: torch.dtype) -> float:
    """The least number that is still finite after it was rounded to one dtype, and then to another."""
    least = torch.finfo(dtype).min
    rounded = torch.tensor(least, dtype=source).item()
    # bfloat16 has no -65504, the least of float16: what is nearer to -65536 than to -65280 becomes that, and then -inf.
    return rounded * (1 - torch.finfo(source).eps / 4) if rounded < least else least


def step_of(term: Apply, carrier: int) -> Step | None:
    """The step that an operation takes from its operand number `carrier`, or None if it is no step."""
    others = [a for n, a in enumerate(term.args) if n != carrier]
    if term.op == "mul" or (term.op == "div" and carrier == 0):
        return Scale(others[0], term.op == "div")
    if term.op == "add" or (term.op == "sub" and carrier == 0):
        return Add(others[0], term.op == "sub")
    if term.op == "where" and carrier:
        condition, value = others
        kept_if = carrier == 1
        return Fill(Apply(dtype=torch.bool, op="not", args=(condition,)) if kept_if else condition, value)
    if term.op == "maximum" and isinstance(number_in(others[0]), int | float):
        return Floor(float(number_in(others[0])))
    if term.op == "neg":
        return Scale(Number(dtype=term.dtype, value=-1))
    return Function(term.op) if not others else None
