"""One hand-written attention as it was read from the graph, and why reading another one ended."""

import dataclasses

import torch
from torch.fx import Node

__all__ = ["Factor", "MaskStep", "MatchEnded", "Repeat", "Site"]


class MatchEnded(Exception):
    """The match met a node that it does not understand, or a rewrite that would not be equal or faster.

    Attributes:
        node: where the match ended.
        code: code of the `Reason`.
        observed: what was seen there.
        needed: what would have been taken.
        lever: what the reader can change.
    """

    def __init__(
        self, node: Node, sentence: str, *, observed: str, needed: str, lever: str, code: str = "match_ended"
    ) -> None:
        super().__init__(sentence)
        self.node, self.code, self.observed, self.needed, self.lever = node, code, observed, needed, lever


@dataclasses.dataclass(frozen=True)
class MaskStep:
    """One step of arithmetic that masks the scores: `scores + sign * node`, or `fill` where the bool `node` is set.

    Attributes:
        node: the mask or bias.
        negative: subtract instead of add; for a fill, fill where the node is not set.
        fill: the value to fill with, or None for an addition.
    """

    node: Node
    negative: bool = False
    fill: float | None = None


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor on the scores that is no constant of the graph: it scales the queries instead.

    Attributes:
        node: a symbolic number, or a tensor with one value for all queries and keys of a head.
        divide: divide by it.
    """

    node: Node
    divide: bool = False


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Heads repeated by copying.

    Attributes:
        heads: what was repeated.
        copies: how many consecutive query heads share one of them.
        read: the nodes that repeat it.
    """

    heads: Node
    copies: int
    read: tuple[Node, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Site:
    """One attention, read from the graph.

    Attributes:
        softmax: the softmax over keys.
        scores: the product of queries and keys.
        output: the product with values, which the rewrite replaces.
        query: queries (…, queries, features).
        key: keys, (…, keys, features), or (…, features, keys) if `key_is_transposed`.
        key_is_transposed: whether the keys must be transposed once more.
        value: values (…, keys, features).
        key_repeat: how the keys' heads are repeated, or None.
        value_repeat: how the values' heads are repeated, or None.
        scale: product of all constant factors on the scores, the queries and the keys.
        factors: the other factors.
        masks: steps that mask the scores, in order.
        dropout: probability of an active dropout, or 0.
        dtype: the dtype of the output, in which the attention will run.
        chain: the nodes that the rewrite makes superfluous, in the order of the match.
        read: the nodes passed over on the way to `query`, `key` and `value`; they may have other users.
    """

    softmax: Node
    scores: Node
    output: Node
    query: Node
    key: Node
    value: Node
    dtype: torch.dtype
    key_is_transposed: bool = True
    key_repeat: Repeat | None = None
    value_repeat: Repeat | None = None
    scale: float = 1.0
    factors: list[Factor] = dataclasses.field(default_factory=list[Factor])
    masks: list[MaskStep] = dataclasses.field(default_factory=list[MaskStep])
    dropout: float = 0.0
    chain: list[Node] = dataclasses.field(default_factory=list[Node])
    read: list[Node] = dataclasses.field(default_factory=list[Node])
