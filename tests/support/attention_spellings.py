"""The ways in which people write the parts of attention: products, scales, softmaxes, masks, biases, by name.

Each entry is one spelling that occurs in published models, as a function that Dynamo can trace. Shapes are named by
letters: batch B, heads H, key/value heads G, queries Q, keys K, head size D. Whatever the order of dimensions of the
scores, a mask or bias is made in the order (B, H, Q, K), and `FITS` brings it into the order at hand.
"""

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]


class Sizes(NamedTuple):
    """The sizes of one call, taken from its tensors, so that they may be symbolic while the call is traced."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int


class Product(NamedTuple):
    """A product of queries and keys.

    Attributes:
        scores: a function of queries, keys, the transposition of the keys, and the sizes.
        form: the order of dimensions of the scores, a key of `FITS`.
        order: the order in which queries and keys are taken: `bhsd` or `bshd`.
    """

    scores: Function
    form: str = "bhqk"
    order: str = "bhsd"


def wider(x: Tensor) -> torch.dtype:
    """The dtype that an upcast takes: float32, or that of `x` where it is wider, as in a float64 reference."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _upcast(x: Tensor) -> Tensor:
    return x.double() if x.dtype == torch.float64 else x.float()


def _flat(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B·H, S, D), which is what `bmm` takes."""
    return x.reshape(-1, x.size(-2), x.size(-1))


def _four(x: Tensor) -> Tensor:
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x


# (B, S, H, D) to (B, H, S, D) and back
SWAPS: Final[dict[str, Function]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "swapaxes": lambda x: torch.swapaxes(x, 1, 2),
    "movedim": lambda x: x.movedim(2, 1),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
}

# of the last two dimensions of the keys
TRANSPOSES: Final[dict[str, Function]] = {
    "transpose": lambda k: k.transpose(-2, -1),
    "mT": lambda k: k.mT,
    "swapaxes": lambda k: k.swapaxes(-1, -2),
    "permute": lambda k: k.permute(*range(k.dim() - 2), -1, -2),
    "numbered": lambda k: k.transpose(k.dim() - 2, k.dim() - 1),
    "contiguous": lambda k: k.transpose(-1, -2).contiguous(),
}


def _bmm(q: Tensor, k: Tensor, t: Function, s: Sizes) -> Tensor:
    return torch.bmm(_flat(q), t(_flat(k)))


def _bmm_view(q: Tensor, k: Tensor, t: Function, s: Sizes) -> Tensor:
    return torch.bmm(_flat(q), t(_flat(k))).view(s.batch, s.heads, s.queries, s.keys)


def _einsum_grouped(q: Tensor, k: Tensor, t: Function, s: Sizes) -> Tensor:
    return torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (s.kv_heads, -1)), k)


def _grouped_matmul(q: Tensor, k: Tensor, t: Function, s: Sizes) -> Tensor:
    grouped = q.view(s.batch, s.kv_heads, s.heads // s.kv_heads, s.queries, q.size(-1))
    return torch.matmul(grouped, t(k).unsqueeze(2))


def _folded(q: Tensor, k: Tensor, t: Function, s: Sizes) -> Tensor:
    """The heads of a group side by side with the queries, as in multi-query models."""
    folded = q.reshape(s.batch, s.kv_heads, -1, q.size(-1))
    return torch.matmul(folded, t(k)).view(s.batch, s.kv_heads, s.heads // s.kv_heads, s.queries, s.keys)


# `baddbmm` also takes the scale and, in one spelling, the bias; they come as the keywords `scale` and `bias`.
def _baddbmm_empty(q: Tensor, k: Tensor, t: Function, s: Sizes, *, scale: float, bias: Tensor | None) -> Tensor:
    empty = torch.empty(s.batch * s.heads, s.queries, s.keys, dtype=q.dtype, device=q.device)
    return torch.baddbmm(empty, _flat(q), t(_flat(k)), beta=0, alpha=scale)


def _baddbmm_bias(q: Tensor, k: Tensor, t: Function, s: Sizes, *, scale: float, bias: Tensor | None) -> Tensor:
    if bias is None:
        bias = torch.zeros(s.batch * s.heads, s.queries, s.keys, dtype=q.dtype, device=q.device)
    return torch.baddbmm(bias, _flat(q), t(_flat(k)), beta=1.0, alpha=scale).view(s.batch, s.heads, s.queries, s.keys)


PRODUCTS: Final[dict[str, Product]] = {
    "matmul": Product(lambda q, k, t, s: torch.matmul(q, t(k))),
    "at": Product(lambda q, k, t, s: q @ t(k)),
    "method": Product(lambda q, k, t, s: q.matmul(t(k))),
    "einsum_bhqd": Product(lambda q, k, t, s: torch.einsum("bhqd,bhkd->bhqk", q, k)),
    "einsum_bhdk": Product(lambda q, k, t, s: torch.einsum("bhqd,bhdk->bhqk", q, t(k))),
    "einsum_dots": Product(lambda q, k, t, s: torch.einsum("...qd,...kd->...qk", q, k)),
    "einsum_bqhd": Product(lambda q, k, t, s: torch.einsum("bqhd,bkhd->bhqk", q, k), order="bshd"),
    "einsum_swapped": Product(lambda q, k, t, s: torch.einsum("bkhd,bqhd->bhqk", k, q), order="bshd"),
    "einsum_bqhk": Product(lambda q, k, t, s: torch.einsum("bqhd,bkhd->bqhk", q, k), form="bqhk", order="bshd"),
    "key_first": Product(lambda q, k, t, s: torch.matmul(k, t(q)), form="bhkq"),
    "bmm": Product(_bmm, form="flat"),
    "bmm_view": Product(_bmm_view),
    "baddbmm_empty": Product(_baddbmm_empty, form="flat"),
    "baddbmm_bias": Product(_baddbmm_bias),
    "einsum_grouped": Product(_einsum_grouped, form="grouped", order="bshd"),
    "grouped_matmul": Product(_grouped_matmul, form="grouped"),
    "folded": Product(_folded, form="grouped"),
}

# where queries have not four dimensions: one head without and with a batch, and windows (B, W, H, S, D)
RANKS: Final[dict[int, str]] = {2: "qk", 3: "bqk", 5: "windows"}


def _fit_flat(x: Tensor, s: Sizes) -> Tensor:
    if x.dim() == 2:
        return x
    return _four(x).expand(s.batch, s.heads, -1, -1).reshape(s.batch * s.heads, x.size(-2), x.size(-1))


def _fit_grouped(x: Tensor, s: Sizes) -> Tensor:
    if x.dim() == 2:
        return x
    x = _four(x)
    return x.unsqueeze(1) if x.size(1) == 1 else x.unflatten(1, (s.kv_heads, -1))


FITS: Final[dict[str, Function]] = {
    "bhqk": lambda x, s: x,
    "bqhk": lambda x, s: x.unsqueeze(1) if x.dim() == 2 else _four(x).transpose(1, 2),
    "bhkq": lambda x, s: x.transpose(-1, -2),
    "flat": _fit_flat,
    "grouped": _fit_grouped,
    "windows": lambda x, s: x if x.dim() == 2 else _four(x).unsqueeze(1),
    "bqk": lambda x, s: x if x.dim() == 2 else _four(x)[:, 0],
    "qk": lambda x, s: x if x.dim() == 2 else _four(x)[0, 0],
}


def _value_bmm(p: Tensor, v: Tensor, s: Sizes) -> Tensor:
    out = torch.bmm(p.reshape(-1, s.queries, s.keys), v.reshape(-1, s.keys, v.size(-1)))
    return out.view(s.batch, s.heads, s.queries, v.size(-1))


def _value_grouped(p: Tensor, v: Tensor, s: Sizes) -> Tensor:
    return torch.matmul(p, v.unsqueeze(2)).reshape(s.batch, s.heads, s.queries, v.size(-1))


def _value_folded(p: Tensor, v: Tensor, s: Sizes) -> Tensor:
    out = torch.matmul(p.reshape(s.batch, s.kv_heads, -1, s.keys), v)
    return out.view(s.batch, s.heads, s.queries, v.size(-1))


# Products with the values, by form of the scores and order of the values: the function, and the order of its result.
VALUES: Final[dict[tuple[str, str], dict[str, tuple[Function, str]]]] = {
    ("bhqk", "bhsd"): {
        "matmul": (lambda p, v, s: torch.matmul(p, v), "bhsd"),
        "at": (lambda p, v, s: p @ v, "bhsd"),
        "einsum": (lambda p, v, s: torch.einsum("bhqk,bhkd->bhqd", p, v), "bhsd"),
        "einsum_bqhd": (lambda p, v, s: torch.einsum("bhqk,bhkd->bqhd", p, v), "bshd"),
        "bmm": (_value_bmm, "bhsd"),
    },
    ("bhqk", "bshd"): {
        "einsum": (lambda p, v, s: torch.einsum("bhqk,bkhd->bqhd", p, v), "bshd"),
        "einsum_swapped": (lambda p, v, s: torch.einsum("bkhd,bhqk->bqhd", v, p), "bshd"),
        "matmul": (lambda p, v, s: p @ v.transpose(1, 2), "bhsd"),
    },
    ("bqhk", "bshd"): {"einsum": (lambda p, v, s: torch.einsum("bqhk,bkhd->bqhd", p, v), "bshd")},
    ("bhkq", "bhsd"): {
        "transposed": (lambda p, v, s: p.transpose(-1, -2) @ v, "bhsd"),
        "value_first": (lambda p, v, s: torch.matmul(v.mT, p).mT, "bhsd"),
        "einsum": (lambda p, v, s: torch.einsum("bhkq,bhkd->bhqd", p, v), "bhsd"),
    },
    ("flat", "bhsd"): {"bmm": (_value_bmm, "bhsd")},
    ("grouped", "bshd"): {
        "einsum": (lambda p, v, s: torch.einsum("bhgqk,bkhd->bqhgd", p, v).flatten(2, 3), "bshd"),
    },
    ("grouped", "bhsd"): {"matmul": (_value_grouped, "bhsd"), "folded": (_value_folded, "bhsd")},
    ("windows", "bhsd"): {
        "matmul": (lambda p, v, s: torch.matmul(p, v), "bhsd"),
        "einsum": (lambda p, v, s: torch.einsum("...qk,...kd->...qd", p, v), "bhsd"),
    },
    ("bqk", "bhsd"): {
        "matmul": (lambda p, v, s: torch.matmul(p, v), "bhsd"),
        "bmm": (lambda p, v, s: torch.bmm(p, v), "bhsd"),
        "einsum": (lambda p, v, s: torch.einsum("bqk,bkd->bqd", p, v), "bhsd"),
    },
    ("qk", "bhsd"): {
        "matmul": (lambda p, v, s: torch.matmul(p, v), "bhsd"),
        "mm": (lambda p, v, s: torch.mm(p, v), "bhsd"),
    },
}

NORMS: Final[dict[str, Function]] = {
    "none": lambda x: x,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
}

SOFTCAPS: Final[dict[str, Function]] = {
    "none": lambda x: x,
    "functions": lambda x: torch.tanh(x / 5.0) * 5.0,
    "scale_first": lambda x: 5.0 * torch.tanh(0.2 * x),
    "method": lambda x: x.div(5.0).tanh().mul(5.0),
}


def _handmade(x: Tensor, d: int) -> Tensor:
    e = torch.exp(x - torch.amax(x, dim=d, keepdim=True))
    return e / e.sum(dim=d, keepdim=True)


def _handmade_detached(x: Tensor, d: int) -> Tensor:
    e = (x - x.max(dim=d, keepdim=True).values.detach()).exp()
    return e / torch.sum(e, d, keepdim=True)


def _handmade_inplace(x: Tensor, d: int) -> Tensor:
    x = x - x.detach().amax(d, True)
    e = x.exp_()
    return e.div(e.sum(d, keepdim=True))


def _epsilon(x: Tensor, d: int) -> Tensor:
    """With a number in the denominator that no sum of this dtype sees."""
    e = torch.exp(x - torch.amax(x, dim=d, keepdim=True))
    return e / (e.sum(dim=d, keepdim=True) + 1e-9)


def _quiet(x: Tensor, d: int) -> Tensor:
    """exp(x) / (1 + Σ exp(x)), with the largest logit subtracted from all, the implied zero included."""
    largest = x.amax(d, keepdim=True).clamp(min=0)
    e = torch.exp(x - largest)
    return e / (torch.exp(-largest) + e.sum(d, keepdim=True))


def _clamped(x: Tensor, d: int) -> Tensor:
    return F.softmax(torch.max(x, torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype)), dim=d)


SOFTMAXES: Final[dict[str, Function]] = {
    "functional": lambda x, d: F.softmax(x, dim=d),
    "torch": lambda x, d: torch.softmax(x, d),
    "method": lambda x, d: x.softmax(dim=d),
    "module": lambda x, d: torch.nn.Softmax(dim=d)(x),
    "dtype": lambda x, d: F.softmax(x, dim=d, dtype=wider(x)).to(x.dtype),
    "upcast": lambda x, d: torch.softmax(_upcast(x), dim=d).type_as(x),
    "subtracted": lambda x, d: F.softmax(x - x.max(dim=d, keepdim=True).values, dim=d),
    "clamped": _clamped,
    "log": lambda x, d: F.log_softmax(x, dim=d).exp(),
    "logsumexp": lambda x, d: torch.exp(x - torch.logsumexp(x, dim=d, keepdim=True)),
    "aten": lambda x, d: torch.ops.aten._softmax.default(x, d, False),
    "handmade": _handmade,
    "handmade_detached": _handmade_detached,
    "handmade_inplace": _handmade_inplace,
    "epsilon": _epsilon,
    "quiet": _quiet,
}


def _sink_cat(x: Tensor, sink: Tensor, softmax: Function) -> Tensor:
    return softmax(torch.cat([x, sink.expand(*x.shape[:-1], 1)], dim=-1), -1)[..., :-1]


def _sink_cat_max(x: Tensor, sink: Tensor, softmax: Function) -> Tensor:
    combined = torch.cat([x, sink.expand(*x.shape[:-1], 1)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return softmax(combined, -1)[..., :-1]


def _sink_first(x: Tensor, sink: Tensor, softmax: Function) -> Tensor:
    return softmax(torch.cat([sink.expand(*x.shape[:-1], 1), x], dim=-1), -1).narrow(-1, 1, x.size(-1))


# one more column, whose probability is thrown away; `sink` has the rank of the scores and a last dimension of 1
SINKS: Final[dict[str, Function]] = {
    "none": lambda x, sink, softmax: softmax(x, -1),
    "cat": _sink_cat,
    "cat_max": _sink_cat_max,
    "first": _sink_first,
    "zero": lambda x, sink, softmax: softmax(F.pad(x, (1, 0)), -1)[..., 1:],
}

FILLS: Final = ("min", "-inf", "-1e9", "-1e4", "min/2")


def fill_value(name: str, dtype: torch.dtype) -> float:
    """The number that stands for "not attended" in scores of a dtype."""
    if name == "min":
        return torch.finfo(dtype).min
    if name == "min/2":
        return torch.finfo(dtype).min / 2
    return {"-inf": -math.inf, "-1e9": -1e9, "-1e4": -1e4}[name]


def _offsets(s: Sizes, diagonal: int) -> Tensor:
    """Key position less query position, (Q, K), for queries that start at position `diagonal`."""
    return torch.arange(s.keys)[None, :] - (torch.arange(s.queries) + diagonal)[:, None]


def _arange(s: Sizes, d: int) -> Tensor:
    rows = torch.arange(s.queries).view(-1, 1) + d
    return torch.le(torch.arange(s.keys).view(1, -1), rows)


def _triu_full(s: Sizes, d: int) -> Tensor:
    blocked = torch.full((s.queries, s.keys), 1.0)
    return torch.triu(blocked, diagonal=d + 1) == 0


# True where attended, (Q, K), by the sizes and the position of the first query
CAUSAL: Final[dict[str, Function]] = {
    "tril": lambda s, d: torch.ones(s.queries, s.keys, dtype=torch.bool).tril(d),
    "tril_float": lambda s, d: torch.tril(torch.ones(s.queries, s.keys), diagonal=d).bool(),
    "triu": lambda s, d: ~torch.triu(torch.ones(s.queries, s.keys, dtype=torch.bool), diagonal=d + 1),
    "triu_full": _triu_full,
    "arange": _arange,
    "arange_ge": lambda s, d: (torch.arange(s.queries) + d)[:, None] >= torch.arange(s.keys)[None, :],
    "offsets": lambda s, d: _offsets(s, d) <= 0,
}


def _chunked(s: Sizes, d: int) -> Tensor:
    rows = torch.arange(s.queries)[:, None] + d
    columns = torch.arange(s.keys)[None, :]
    return (columns <= rows) & (columns // 4 == rows // 4)


MASKS: Final[dict[str, Function]] = {
    **CAUSAL,
    "window": lambda s, d: (_offsets(s, d) <= 0) & (_offsets(s, d) > -3),
    "window_tril": lambda s, d: (
        torch.ones(s.queries, s.keys, dtype=torch.bool).tril(d)
        & torch.ones(s.queries, s.keys, dtype=torch.bool).triu(d - 2)
    ),
    "band": lambda s, d: _offsets(s, d).abs() <= 2,
    "prefix": lambda s, d: (_offsets(s, d) <= 0) | (torch.arange(s.keys) < 2),
    "chunked": _chunked,
    "blocks": lambda s, d: (torch.arange(s.keys)[None, :] // 3) == ((torch.arange(s.queries)[:, None] + d) // 3),
}


def additive(allowed: Tensor, dtype: torch.dtype, fill: str) -> Tensor:
    """Zero where attended, and the number that stands for the contrary elsewhere."""
    return torch.where(allowed, torch.zeros((), dtype=dtype), torch.full((), fill_value(fill, dtype), dtype=dtype))


def _additive_full(allowed: Tensor, x: Tensor, name: str) -> Tensor:
    return torch.full(allowed.shape, fill_value(name, x.dtype), dtype=x.dtype).masked_fill(allowed, 0.0)


def _additive_in_place(allowed: Tensor, x: Tensor, name: str) -> Tensor:
    return torch.zeros_like(allowed, dtype=x.dtype).masked_fill_(~allowed, fill_value(name, x.dtype))


def _additive_product(allowed: Tensor, x: Tensor, name: str) -> Tensor:
    return (1.0 - allowed.to(x.dtype)) * fill_value(name, x.dtype)


def _add_float32(x: Tensor, allowed: Tensor, name: str) -> Tensor:
    """As a model does whose mask was made in float32 and whose scores are narrower: the sum is in float32."""
    zero = torch.zeros((), dtype=wider(x))
    return x + torch.where(allowed, zero, torch.finfo(torch.float32).min)


def _blend(x: Tensor, allowed: Tensor, name: str) -> Tensor:
    kept = allowed.to(x.dtype)
    return x * kept + fill_value(name, x.dtype) * (1 - kept)


def _where_tensor(x: Tensor, allowed: Tensor, name: str) -> Tensor:
    return torch.where(allowed, x, torch.full([], fill_value(name, x.dtype), dtype=x.dtype))


# scores with a mask that is True where attended; 0 · -inf is NaN, so products take finite fills only
MASKINGS: Final[dict[str, Function]] = {
    "add_where": lambda x, m, f: x + additive(m, x.dtype, f),
    "add_full": lambda x, m, f: x + _additive_full(m, x, f),
    "add_filled": lambda x, m, f: x + _additive_in_place(m, x, f),
    "add_product": lambda x, m, f: x + _additive_product(m, x, f),
    "iadd": lambda x, m, f: x.add_(additive(m, x.dtype, f)),
    "add_float32": _add_float32,
    "masked_fill": lambda x, m, f: x.masked_fill(~m, fill_value(f, x.dtype)),
    "masked_fill_eq": lambda x, m, f: x.masked_fill(m == 0, fill_value(f, x.dtype)),
    "masked_fill_": lambda x, m, f: x.masked_fill_(torch.logical_not(m), fill_value(f, x.dtype)),
    "where": lambda x, m, f: torch.where(m, x, fill_value(f, x.dtype)),
    "where_tensor": _where_tensor,
    "blend": _blend,
}


CHANGES: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "none": lambda x, hidden: x,
    "negated": lambda x, hidden: x * -0.25,
    "scaled down": lambda x, hidden: x * 1e-9,
    "cooled": lambda x, hidden: x / 1e8,
    "lifted": lambda x, hidden: x + torch.where(hidden, 2.5e8, 0.0).to(x.dtype),
    "clamped": lambda x, hidden: x.clamp(min=-30),
    "capped": lambda x, hidden: torch.tanh(x / 20) * 20,
    "in half": lambda x, hidden: x.to(torch.bfloat16).to(x.dtype),
}
"""What a program does to masked scores, given where something is hidden, that may bring back what a mask hides."""


def relative_buckets(offsets: Tensor, buckets: int = 8, furthest: int = 16) -> Tensor:
    """T5's bidirectional buckets: half for each sign, exact up to a quarter, logarithmic beyond (arXiv:1910.10683)."""
    half = buckets // 2
    sign = (offsets > 0).to(torch.long) * half
    distance = offsets.abs()
    exact = half // 2
    far = exact + (torch.log(distance.float().clamp(min=1) / exact) / math.log(furthest / exact) * (half - exact)).to(
        torch.long
    )
    far = torch.min(far, torch.full_like(far, half - 1))
    return sign + torch.where(distance < exact, distance, far)
