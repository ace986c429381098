"""One attention layer in the forms that models have, spelt by hand: what `bench_attention.py` compiles.

Queries, keys and values come as a projection leaves them, (batch, length, heads, width), and the result is (batch,
length, heads * width), so that transposes and copies around the kernel count for every candidate.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

IndexFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

CAP: Final = 10.0  # the scores' standard deviation is 3, so that the cap is felt
BUCKETS: Final = 32  # T5's relative positions: number of buckets, and the distance from which on all share the last
FARTHEST: Final = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What to measure: a form, its sizes, and whether with the backward."""

    form: str
    heads: int
    kv_heads: int
    batch: int
    length: int
    width: int
    training: bool

    @property
    def key(self) -> str:
        """Name of the row: form/heads:kv_heads/length/width/mode."""
        mode = "training" if self.training else "forward"
        return f"{self.form}/{self.heads}:{self.kv_heads}/{self.length}/{self.width}/{mode}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a form reads the scores; all that the naive program and the kernels picked by hand have to know.

    Attributes:
        scale: factor on the product of queries and keys.
        mask: makes the mask, true where a key is seen, (1 or batch, 1, length, length), as a model spells it.
        predicate: the same as a function of indices.
        per_sequence: whether the mask depends on a tensor of the batch.
        causal: whether the mask is exactly the causal one.
        window: keys seen by a query, its own included, if the mask is a causal window.
        documents: whether the mask is the causal one within documents.
        change: the scores before the mask, as a model spells it.
        score_mod: the same as a function of a score and its indices; made anew in each call.
        bias: makes what `change` adds, (1, heads, length, length), where it only adds.
        learned: tensors that get gradients besides queries, keys and values.
        sinks: (heads,), one more column of the softmax, which takes weight and gives nothing.
    """

    scale: float
    mask: Callable[[], Tensor] | None = None
    predicate: IndexFunction | None = None
    per_sequence: bool = False
    causal: bool = False
    window: int | None = None
    documents: bool = False
    change: Callable[[Tensor], Tensor] | None = None
    score_mod: Callable[[], ScoreFunction] | None = None
    bias: Callable[[], Tensor] | None = None
    learned: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None


def make_tensors(layer: Layer, device: str, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of a layer; those with gradients require them if it is measured with the backward."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, by: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator, device=device) * by).to(dtype).requires_grad_(layer.training)

    batch, length, heads = layer.batch, layer.length, layer.heads
    # T5 has no scale, and a cap is to be felt: the rest have scores of standard deviation 1.
    by = {"t5": layer.width**-0.5, "softcap": 3.0}.get(layer.form, 1.0)
    tensors = {
        "query": normal(batch, length, heads, layer.width, by=by),
        "key": normal(batch, length, layer.kv_heads, layer.width),
        "value": normal(batch, length, layer.kv_heads, layer.width),
        "upstream": normal(batch, length, heads * layer.width).detach(),
    }
    if layer.form == "padded":
        # Lengths of 3/4, 1, 7/8, 1/2 in turn, padded on the right, so that no row is without any key.
        eighths = torch.tensor([6, 8, 7, 4], device=device)[torch.arange(batch, device=device) % 4]
        tensors["padding"] = torch.arange(length, device=device) < (eighths * length // 8)[:, None]
    if layer.form == "ones":
        tensors["padding"] = torch.ones(batch, length, dtype=torch.bool, device=device)
    if layer.form == "document":
        # Eight documents of unequal lengths in each sequence, numbered through the batch.
        starts = torch.tensor([0, 2, 7, 10, 16, 17, 24, 29], device=device) * length // 32
        first = torch.searchsorted(starts, torch.arange(length, device=device), right=True)
        tensors["document"] = torch.stack([first + 8 * i for i in range(batch)])
    if layer.form == "t5":
        tensors["table"] = normal(BUCKETS, heads)
    if layer.form == "sinks":
        tensors["sinks"] = normal(heads)
    if layer.form == "alibi":
        exponents = torch.arange(1, heads + 1, device=device) * (-8.0 / heads)
        tensors["slopes"] = torch.exp2(exponents).to(dtype)
    return tensors


def upcast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same values in a higher precision, as leaves of their own."""
    return {
        name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def naive(tensors: dict[str, Tensor], form: Form) -> Tensor:
    """The program as models spell it: product, scale, change, mask, softmax in float32, product."""
    query, key, value = (tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = _repeat(key, groups), _repeat(value, groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * form.scale
    if form.change is not None:
        scores = form.change(scores)
    if form.mask is not None:
        scores = scores.masked_fill(~form.mask(), torch.finfo(scores.dtype).min)
    if form.sinks is not None:
        column = form.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if form.sinks is not None:
        probabilities = probabilities[..., :-1]
    return torch.matmul(probabilities.to(value.dtype), value).transpose(1, 2).flatten(2)


def _repeat(tensor: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = tensor.shape
    return tensor[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, -1, length, width)


def work(layer: Layer, form: Form) -> float:
    """Floating-point operations of both products over the keys that are seen; the backward counts 2.5 forwards."""
    seen = 1.0 if form.mask is None else float(form.mask().float().mean(dtype=torch.float64))
    both = 4.0 * layer.batch * layer.heads * layer.length**2 * layer.width * seen
    return both * (3.5 if layer.training else 1.0)


def _causal(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    def mask() -> Tensor:
        position = torch.arange(layer.length, device=tensors["query"].device)
        return (position[None, :] <= position[:, None])[None, None]

    return Form(scale=layer.width**-0.5, mask=mask, predicate=_before, causal=True)


def _before(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def _padded(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    causal, padding = _causal(layer, tensors), tensors["padding"]

    def mask() -> Tensor:
        assert causal.mask is not None
        return causal.mask() & padding[:, None, None, :]

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & padding[b, k]

    return dataclasses.replace(causal, mask=mask, predicate=predicate, per_sequence=True, causal=False)


def _ones(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    """The naive program is given a padding mask; whoever picks a kernel knows that nothing is padded."""
    return dataclasses.replace(_padded(layer, tensors), predicate=_before, per_sequence=False, causal=True)


def _softcap(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    def change(scores: Tensor) -> Tensor:
        return torch.tanh(scores / CAP) * CAP

    def score_mod() -> ScoreFunction:
        return lambda score, b, h, q, k: torch.tanh(score / CAP) * CAP

    return dataclasses.replace(_causal(layer, tensors), change=change, score_mod=score_mod)


def _alibi(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    """A slope of each head times the distance: https://arxiv.org/abs/2108.12409, equation 3."""
    slopes = tensors["slopes"]

    def bias() -> Tensor:
        position = torch.arange(layer.length, device=slopes.device)
        return slopes[None, :, None, None] * (position[None, :] - position[:, None])

    def score_mod() -> ScoreFunction:
        return lambda score, b, h, q, k: score + slopes[h] * (k - q)

    return dataclasses.replace(
        _causal(layer, tensors), change=lambda scores: scores + bias(), bias=bias, score_mod=score_mod
    )


def _bucket(distance: Tensor) -> Tensor:
    """T5's bucket of key minus query, both directions: https://arxiv.org/abs/1910.10683, section 2.1.

    Half of the buckets are for keys after the query; half of those hold one distance each, and the rest grow with the
    logarithm up to `FARTHEST`.
    """
    half, exact = BUCKETS // 2, BUCKETS // 4
    away = distance.abs()
    growth = torch.log(away.float().clamp(min=1) / exact) / math.log(FARTHEST / exact) * (half - exact)
    far = (exact + growth.to(torch.long)).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + (distance > 0) * half


def _t5(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    table, length = tensors["table"], layer.length

    def bias() -> Tensor:
        position = torch.arange(length, device=table.device)
        return F.embedding(_bucket(position[None, :] - position[:, None]), table).permute(2, 0, 1)[None]

    def score_mod() -> ScoreFunction:
        by_distance = F.embedding(_bucket(torch.arange(1 - length, length, device=table.device)), table)
        return lambda score, b, h, q, k: score + by_distance[k - q + length - 1, h]

    return Form(
        scale=1.0, change=lambda scores: scores + bias(), bias=bias, score_mod=score_mod, learned=(tensors["table"],)
    )


def _window(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    window = min(1024, layer.length // 4)

    def mask() -> Tensor:
        position = torch.arange(layer.length, device=tensors["query"].device)
        distance = position[:, None] - position[None, :]
        return ((distance >= 0) & (distance < window))[None, None]

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k < window)

    return Form(scale=layer.width**-0.5, mask=mask, predicate=predicate, window=window)


def _sinks(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    return dataclasses.replace(_causal(layer, tensors), sinks=tensors["sinks"], learned=(tensors["sinks"],))


def _document(layer: Layer, tensors: dict[str, Tensor]) -> Form:
    causal, document = _causal(layer, tensors), tensors["document"]

    def mask() -> Tensor:
        assert causal.mask is not None
        return causal.mask() & (document[:, None, :, None] == document[:, None, None, :])

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (document[b, q] == document[b, k])

    return dataclasses.replace(causal, mask=mask, predicate=predicate, per_sequence=True, causal=False, documents=True)


FORMS: Final[dict[str, Callable[[Layer, dict[str, Tensor]], Form]]] = {
    "causal": _causal,
    "padded": _padded,
    "ones": _ones,
    "softcap": _softcap,
    "alibi": _alibi,
    "t5": _t5,
    "window": _window,
    "sinks": _sinks,
    "document": _document,
}

TOKENS: Final = 8192  # of a batch, whatever its length


def _layer(form: str, grouped: bool, length: int, width: int, training: bool) -> Layer:
    batch, kv_heads = max(1, TOKENS // length), 8 if grouped else 32
    return Layer(form=form, heads=32, kv_heads=kv_heads, batch=batch, length=length, width=width, training=training)


# Each form with the shapes in which models have it, such that each length, width and grouping occurs in both modes;
# first what says most, as a run may be out of time before the end.
_COVERING: Final = (
    ("causal", True, 2048, 128, False),
    ("causal", True, 2048, 128, True),
    ("ones", True, 2048, 128, False),
    ("padded", True, 2048, 128, False),
    ("padded", True, 2048, 128, True),
    ("softcap", True, 8192, 256, False),
    ("softcap", True, 2048, 128, True),
    ("alibi", False, 2048, 128, False),
    ("alibi", False, 2048, 64, True),
    ("t5", False, 512, 64, False),
    ("t5", False, 512, 64, True),
    ("window", True, 8192, 128, False),
    ("window", True, 8192, 128, True),
    ("sinks", True, 2048, 64, False),
    ("sinks", True, 2048, 64, True),
    ("document", True, 8192, 128, False),
    ("document", True, 8192, 128, True),
    ("causal", False, 512, 64, False),
    ("causal", False, 8192, 64, True),
    ("padded", False, 512, 64, False),
    ("t5", False, 2048, 64, False),
    ("softcap", False, 2048, 128, False),
    ("sinks", True, 8192, 64, False),
    ("document", False, 2048, 64, False),
    ("window", False, 2048, 64, False),
    ("alibi", True, 8192, 64, False),
    ("causal", False, 2048, 256, False),
    ("causal", True, 2048, 256, True),
)


def covering() -> list[Layer]:
    """The layers measured by default."""
    return [_layer(*choice) for choice in _COVERING]


def cross_product() -> list[Layer]:
    """Every form, grouped and not, at every length and width, in both modes: 324 layers."""
    return [
        _layer(form, grouped, length, width, training)
        for form in FORMS
        for grouped in (True, False)
        for length in (512, 2048, 8192)
        for width in (64, 128, 256)
        for training in (False, True)
    ]
