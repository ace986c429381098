"""Attention programs: each is a choice of spellings and sizes, from which a module and its inputs are built.

This is the choice and the inputs; `attention_modules` has the module.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import attention_spellings
import torch
from attention_spellings import Sizes
from torch import Tensor

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
LONGEST: Final = 48  # positions that a buffer is made for, as a model's configuration would say


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Program:
    """One attention program. The defaults are the plainest choice; `repr` names the fields that differ from them.

    Attributes:
        rank: dimensions of the queries: 4, 2 (one head), 3 (one head, batch), 5 (windows).
        source: how the inputs come: `bhsd`, `bshd`, `packed`, `unbind`, `permuted`, `interleaved`, `projected`,
            `seq_first`, `channels`, or `cached` (keys and values of earlier positions apart).
        swap: how heads and positions are swapped, a key of `spellings.SWAPS`.
        key: how keys are transposed, a key of `spellings.TRANSPOSES`, or `stored`, or `permuted_once`.
        product: a key of `spellings.PRODUCTS`.
        value: a key of `spellings.VALUES`' entry for the product; empty for the first.
        merge: what happens to the output: `none`, `swapped`, `reshaped`, `contiguous`, `flattened`, `projected`.
        scale: `none`, `mul`, `div`, `buffer`, `tensor_div`, `q_mul`, `q_div`, `k_mul`, `both`, `head`, `tau`, or
            `after_mask`.
        factor: the number to scale by.
        norm: of queries and keys, a key of `spellings.NORMS`.
        softcap: a key of `spellings.SOFTCAPS`.
        bias: `none`; an input of shape `head`, `1hqk`, `b1qk`, `bhqk`, `qk`, `b11k`; `alibi`, `alibi_keys`,
            `alibi_padding`, `t5`, `swin`, `query`, `shaw`, `gated`.
        bias_last: whether the bias is added after the mask.
        mask: `none`, a key of `spellings.MASKS`, `random`, `positions` or `shifted`.
        mask_from: `graph` (boolean), `additive` or `triu` (numbers, made once), `buffer`, `input` (boolean) or
            `input_additive`.
        bottom_right: whether the last query is at the position of the last key; else the first at that of the first.
        padding: `none`, `right`, `left`, `full` (nothing padded) or `holes`.
        padding_dtype: `bool`, `int64` or `float`.
        documents: whether positions attend within their document only.
        combine: `and` for one mask from all, `sequence` for one after another, `filled` for padding that is written
            into an additive mask.
        joined: whether the bias is added to the additive mask first.
        masking: a key of `spellings.MASKINGS`.
        fill: an entry of `spellings.FILLS`.
        changed: what is done to the scores after all masks, a key of `spellings.CHANGES`.
        held: what keys hold that no query sees: `none`, `nan`, `inf` or `large` numbers.
        grouping: `none`, `repeat_interleave`, `expand`, `repeat`, `broadcast`; grouped products need `none`.
        softmax: a key of `spellings.SOFTMAXES`.
        sinks: a key of `spellings.SINKS`.
        after: `none`, `dropout0`, `dropout_eval`, `head_mask`, `row_mask`, `nan_to_num`, `masked_zero`, `weights`.
        inplace: whether scale, bias and mask are written in place.
        region: `plain`, `autocast`, `no_grad` or `checkpoint`.
        layers: how often the attention is applied, with one mask.
        dtype: of inputs and parameters.
        training: whether gradients of all inputs and parameters are compared too.
        dynamic: `static`, `mark`, `dynamic` (the option) or `automatic`; all but the first make a second call.
        grow: what is larger in the second call: `lengths`, `batch` or `both`.
        batch: sequences.
        heads: of the queries.
        kv_heads: of keys and values.
        queries: length of the queries.
        keys: length of keys and values.
        size: of a head.
        value_size: of a head of the values.
        seed: of inputs and parameters.
    """

    rank: int = 4
    source: str = "bhsd"
    swap: str = "transpose"
    key: str = "transpose"
    product: str = "matmul"
    value: str = ""
    merge: str = "none"
    scale: str = "mul"
    factor: float = 0.5
    norm: str = "none"
    softcap: str = "none"
    bias: str = "none"
    bias_last: bool = False
    mask: str = "none"
    mask_from: str = "graph"
    bottom_right: bool = True
    padding: str = "none"
    padding_dtype: str = "bool"
    documents: bool = False
    combine: str = "and"
    joined: bool = False
    masking: str = "add_where"
    fill: str = "min"
    changed: str = "none"
    held: str = "none"
    grouping: str = "none"
    softmax: str = "functional"
    sinks: str = "none"
    after: str = "none"
    inplace: bool = False
    region: str = "plain"
    layers: int = 1
    dtype: str = "float32"
    training: bool = False
    dynamic: str = "static"
    grow: str = "lengths"
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 5
    keys: int = 5
    size: int = 8
    value_size: int = 8
    seed: int = 0

    def __repr__(self) -> str:
        chosen = [
            (f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return f"Program({', '.join(f'{name}={value!r}' for name, value in chosen)})"

    @property
    def form(self) -> str:
        """The order of dimensions of the scores, a key of `spellings.FITS`."""
        return (
            attention_spellings.RANKS[self.rank] if self.rank != 4 else attention_spellings.PRODUCTS[self.product].form
        )

    @property
    def sizes(self) -> Sizes:
        """The sizes of the first call."""
        return Sizes(self.batch, self.heads, self.kv_heads, self.queries, self.keys)

    @property
    def second_sizes(self) -> Sizes:
        """The sizes of the second call, if there is one; a single query stays one, as in decoding."""
        batch = self.batch + 2 * (self.grow != "lengths")
        more = 3 * (self.grow != "batch")
        queries = self.queries if self.queries == 1 and self.keys > 1 else self.queries + more
        return self.sizes._replace(batch=batch, queries=queries, keys=self.keys + more)


class Numbers:
    """Random tensors that are the same in every dtype, apart from the rounding to the program's own."""

    def __init__(self, program: Program, *, exact: bool) -> None:
        self.generator = torch.Generator().manual_seed(program.seed)
        self.rounded = DTYPES[program.dtype]
        self.dtype = torch.float64 if exact else self.rounded
        self.training = program.training

    def normal(self, *shape: int, learned: bool = True) -> Tensor:
        """Standard normal numbers, which require a gradient if they are learned and the program trains."""
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return self.constant(numbers).requires_grad_(self.training and learned)

    def constant(self, numbers: Tensor) -> Tensor:
        """The given numbers, rounded to the program's dtype."""
        return numbers.to(self.rounded).to(self.dtype)

    def coins(self, *shape: int, chance: float = 0.5) -> Tensor:
        """Booleans, true with a chance."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64) < chance


def inputs(p: Program, s: Sizes, make: Numbers) -> dict[str, Tensor]:
    """The tensors of one call of a program, by name, for some sizes."""
    found = _tokens(p, s, make)
    shapes = {
        "head": (s.heads, s.queries, s.keys),
        "gated": (s.heads, s.queries, s.keys),
        "1hqk": (1, s.heads, s.queries, s.keys),
        "b1qk": (s.batch, 1, s.queries, s.keys),
        "bhqk": (s.batch, s.heads, s.queries, s.keys),
        "b11k": (s.batch, 1, 1, s.keys),
        "qk": (s.queries, s.keys),
    }
    if p.bias in shapes:
        found["bias"] = make.normal(*shapes[p.bias])
    if p.mask == "random":
        found["mask"] = make.coins(s.batch, 1, s.queries, s.keys, chance=0.6)
    elif p.mask == "positions":
        found["positions"] = torch.arange(s.queries) + first_position(p, s)
    elif p.mask == "shifted":
        found["mask"] = make.constant(make.coins(2, s.queries, s.keys) * -100.0)
    elif p.mask != "none" and p.mask_from in ("input", "input_additive"):
        allowed = attention_spellings.MASKS[p.mask](s, first_position(p, s))
        fill = make.constant(torch.tensor(attention_spellings.fill_value(p.fill, make.rounded), dtype=torch.float64))
        additive = torch.where(allowed, torch.zeros((), dtype=make.dtype), fill)
        found["mask"] = allowed if p.mask_from == "input" else additive
    if p.padding != "none":
        found["padding"] = _padding(p, s, make)
    if p.documents:
        found["documents"] = make.coins(s.batch, s.keys, chance=0.4).cumsum(-1)
    if p.after == "head_mask":
        found["head_mask"] = make.normal(1, s.heads, 1, 1, learned=False)
    if p.after == "row_mask":
        found["row_mask"] = make.constant(make.coins(s.batch, 1, s.queries, 1))
    return found


def _tokens(p: Program, s: Sizes, make: Numbers) -> dict[str, Tensor]:
    b, h, g, n, m = s
    d, e = p.size, p.value_size
    if p.rank != 4:
        lead = {2: (), 3: (b,), 5: (b, 2, h)}[p.rank]
        return {"q": make.normal(*lead, n, d), "k": make.normal(*lead, m, d), "v": make.normal(*lead, m, e)}
    fused = {
        "packed": (b, n, (h + 2 * g) * d),
        "unbind": (b, n, 3, h, d),
        "permuted": (b, n, 3 * h * d),
        "interleaved": (b, n, h * 3 * d),
    }
    if p.source in fused:
        return {"qkv": make.normal(*fused[p.source])}
    if p.source == "projected":
        own = {"hidden": make.normal(b, n, 12)}
        return own if n == m else {**own, "context": make.normal(b, m, 12)}
    if p.source == "cached":
        found = {"q": make.normal(b, h, n, d), "k": make.normal(b, g, n, d), "v": make.normal(b, g, n, e)}
        return {**found, "past_k": make.normal(b, g, m - n, d), "past_v": make.normal(b, g, m - n, e)}
    shapes: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
        "bhsd": lambda heads, length, size: (b, heads, length, size),
        "bshd": lambda heads, length, size: (b, length, heads, size),
        "seq_first": lambda heads, length, size: (length, b, heads * size),
        "channels": lambda heads, length, size: (b, heads * size, length),
    }
    shape = shapes[p.source]
    key = (b, g, d, m) if p.key == "stored" else shape(g, m, d)
    return {"q": make.normal(*shape(h, n, d)), "k": make.normal(*key), "v": make.normal(*shape(g, m, e))}


def _padding(p: Program, s: Sizes, make: Numbers) -> Tensor:
    """(B, K), true where there is a token: the first sequence is whole, others lose some on a side."""
    if p.padding == "holes":
        kept = make.coins(s.batch, s.keys, chance=0.7)
    else:
        lost = torch.arange(s.batch)[:, None] % 3 * (s.keys // 3) + (s.batch == 1) * (s.keys // 2)
        columns = torch.arange(s.keys)
        kept = {
            "full": columns >= torch.zeros_like(lost),
            "left": columns >= lost,
            "right": columns < s.keys - lost,
        }[p.padding]
    return make.constant(kept) if p.padding_dtype == "float" else kept.to(getattr(torch, p.padding_dtype))


def first_position(p: Program, s: Sizes) -> int:
    """The position of the first query."""
    return s.keys - s.queries if p.bottom_right else 0
