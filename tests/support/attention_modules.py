"""From a program of attention to a module that runs it, in the program's own dtype or in float64.

`build` returns the module with its inputs. A module has parameters and buffers where models have them, and its forward
goes through the program's spellings one after another.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attention_spellings
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from attention_programs import LONGEST, Numbers, Program, first_position, inputs
from attention_spellings import Sizes
from torch import Tensor, nn


class Built(NamedTuple):
    """A program made real.

    Attributes:
        module: called with the tensors of one call as keyword arguments; it returns a tuple of tensors.
        calls: the tensors of each call, by name: one call, or two with different sizes.
    """

    module: "Attention"
    calls: tuple[dict[str, Tensor], ...]


class Mask(NamedTuple):
    """A mask: true where attended, or numbers to add."""

    values: Tensor
    additive: bool = False


def build(program: Program, *, exact: bool = False) -> Built:
    """Make a program's module and inputs.

    Args:
        program: what to make.
        exact: whether to make it in float64, autocast off, with the numbers that the program's own dtype holds.
    """
    make = Numbers(program, exact=exact)
    module = Attention(program, make, exact=exact)
    sizes = (program.sizes,) if program.dynamic == "static" else (program.sizes, program.second_sizes)
    return Built(module, tuple(inputs(program, s, make) for s in sizes))


class Attention(nn.Module):
    """A program as a module: projections, products, and what lies between them, in the program's spellings."""

    head_scale: Tensor
    tau: Tensor
    sink: Tensor
    table: Tensor
    swin_table: Tensor
    positions_table: Tensor
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    slopes: Tensor
    swin_index: Tensor
    mask: Tensor
    factor: Tensor

    def __init__(self, program: Program, make: Numbers, *, exact: bool) -> None:
        super().__init__()
        p = self.program = program
        self.autocast = p.region == "autocast" and not exact
        self.product = attention_spellings.PRODUCTS[p.product]
        order = "bhsd" if p.rank != 4 else self.product.order
        values = attention_spellings.VALUES[p.form, order]
        self.order, (self.value, self.out_order) = order, values[p.value or next(iter(values))]
        self.transpose = attention_spellings.TRANSPOSES.get(p.key, lambda k: k)
        self.fit = attention_spellings.FITS[p.form]
        learned = {
            "head_scale": (p.scale == "head", (p.heads, 1, 1)),
            "tau": (p.scale == "tau", (p.heads, 1, 1)),
            "sink": (p.sinks not in ("none", "zero"), (p.heads,)),
            "table": (p.bias == "t5", (8, p.heads)),
            "swin_table": (p.bias == "swin", (p.queries + p.keys - 1, p.heads)),
            "positions_table": (p.bias in ("query", "shaw"), (LONGEST, p.size)),
            "q_weight": (p.source == "projected", (p.heads * p.size, 12)),
            "k_weight": (p.source == "projected", (p.kv_heads * p.size, 12)),
            "v_weight": (p.source == "projected", (p.kv_heads * p.value_size, 12)),
            "o_weight": (p.merge == "projected", (6, p.heads * p.value_size)),
        }
        for name, (needed, shape) in learned.items():
            if needed:
                wide = name.endswith("weight")
                numbers = make.normal(*shape).detach() / (4.0 if wide else 1.0)
                self.register_parameter(name, nn.Parameter(numbers, requires_grad=p.training))
        if p.bias.startswith("alibi"):
            self.register_buffer("slopes", make.constant(2.0 ** -(torch.arange(p.heads) + 1.0)))
        if p.bias == "swin":
            offsets = torch.arange(p.queries)[:, None] - torch.arange(p.keys)[None, :] + p.keys - 1
            self.register_buffer("swin_index", offsets)
        if p.mask_from == "buffer":
            square = p.sizes._replace(queries=LONGEST, keys=LONGEST)
            self.register_buffer("mask", attention_spellings.MASKS[p.mask](square, 0).view(1, 1, LONGEST, LONGEST))
        if p.scale in ("buffer", "tensor_div"):
            self.register_buffer("factor", make.constant(torch.tensor(p.factor)))
        self.dropout = nn.Dropout(0.1).eval()

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Attend; the tensors are those of `Built.calls`, the results the output and, if asked for, the weights."""
        p = self.program
        region = contextlib.nullcontext() if p.region != "no_grad" else torch.no_grad()
        with region, torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            q, k, v = self._split(inputs)
            s = self._sizes(q, k)
            masks, bias = self._masks(inputs, s, q.dtype), self._bias(inputs, q, s)
            if p.joined and bias is not None:
                bias, masks = bias + masks[0].values, masks[1:]
            attend = functools.partial(self._attend, inputs=inputs, masks=masks, bias=bias, s=s)
            out, weights = self._run(attend, q, k, v)
            for _ in range(p.layers - 1):
                out = out + self._run(attend, q + 0.125, k, v)[0]
            return (out, weights) if p.after == "weights" else (out,)

    def has_empty_rows(self, **inputs: Tensor) -> bool:
        """Whether the masks leave some query without a key."""
        q, k, _ = self._split(inputs)
        s = self._sizes(q, k)
        seen = torch.ones(s.batch, 1, s.queries, s.keys, dtype=torch.bool)
        for mask in self._masks(inputs, s, q.dtype) if self.program.mask != "shifted" else ():
            seen = seen & (mask.values == 0 if mask.additive else mask.values > 0)
        return not bool(seen.any(-1).all())

    def _run(self, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.program.region == "checkpoint":
            return torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
        return attend(q, k, v)

    def _split(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values, in the order that the product takes; keys may come transposed."""
        p = self.program
        h, g, d, e = p.heads, p.kv_heads, p.size, p.value_size
        if p.rank != 4:
            return x["q"], x["k"], x["v"]
        if p.source == "cached":
            k, v = torch.cat([x["past_k"], x["k"]], dim=2), torch.cat((x["past_v"], x["v"]), -2)
            return self._ordered(x["q"], k, v, "bhsd")
        if p.source == "permuted":
            qkv = x["qkv"]
            qkv = qkv.reshape(qkv.size(0), qkv.size(1), 3, h, d).permute(2, 0, 3, 1, 4)
            return self._ordered(qkv[0], qkv[1], qkv[2], "bhsd")
        if p.source == "unbind":
            q, k, v = x["qkv"].unbind(2)
            return self._ordered(q, k, v, "bshd")
        if p.source == "interleaved":
            qkv = x["qkv"].view(x["qkv"].size(0), x["qkv"].size(1), h, 3, d)
            return self._ordered(qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :], "bshd")
        if p.source == "packed":
            qkv = x["qkv"]
            parts = qkv.chunk(3, dim=-1) if h == g else qkv.split([h * d, g * d, g * d], dim=-1)
            q, k, v = (y.unflatten(-1, (-1, d)) for y in parts)
            return self._ordered(q, k, v, "bshd")
        if p.source == "projected":
            hidden, context = x["hidden"], x.get("context", x["hidden"])
            q = F.linear(hidden, self.q_weight).view(hidden.size(0), -1, h, d)
            k = F.linear(context, self.k_weight).view(context.size(0), -1, g, d)
            v = F.linear(context, self.v_weight).view(context.size(0), -1, g, e)
            return self._ordered(q, k, v, "bshd")
        q, k, v = x["q"], x["k"], x["v"]
        if p.source == "seq_first":
            split = [y.view(y.size(0), y.size(1), n, -1).permute(1, 2, 0, 3) for y, n in ((q, h), (k, g), (v, g))]
            return self._ordered(split[0], split[1], split[2], "bhsd")
        if p.source == "channels":
            split = [y.view(y.size(0), n, -1, y.size(-1)).transpose(2, 3) for y, n in ((q, h), (k, g), (v, g))]
            return self._ordered(split[0], split[1], split[2], "bhsd")
        if p.key == "permuted_once":
            swap = attention_spellings.SWAPS[p.swap]
            return swap(q), k.permute(0, 2, 3, 1), swap(v)
        return (q, k, v) if p.key == "stored" else self._ordered(q, k, v, p.source)

    def _ordered(self, q: Tensor, k: Tensor, v: Tensor, order: str) -> tuple[Tensor, Tensor, Tensor]:
        if order == self.order:
            return q, k, v
        swap = attention_spellings.SWAPS[self.program.swap]
        return swap(q), swap(k), swap(v)

    def _sizes(self, q: Tensor, k: Tensor) -> Sizes:
        p = self.program
        if p.rank != 4:
            return Sizes(q.size(0) if p.rank != 2 else 1, p.heads, p.kv_heads, q.size(-2), k.size(-2))
        at = self.order.index("s")
        keys = k.size(-1) if p.key in ("stored", "permuted_once") else k.size(at)
        return Sizes(q.size(0), p.heads, p.kv_heads, q.size(at), keys)

    def _masks(self, x: dict[str, Tensor], s: Sizes, dtype: torch.dtype) -> list[Mask]:
        """The masks to apply one after another."""
        p = self.program
        found: list[Mask] = []
        diagonal = first_position(p, s)
        if p.mask == "positions":
            found.append(Mask(torch.arange(s.keys)[None, :] <= x["positions"][:, None]))
        elif "mask" in x:
            found.append(Mask(x["mask"], additive=x["mask"].is_floating_point()))
        elif p.mask_from == "buffer":
            found.append(Mask(self.mask[:, :, diagonal : diagonal + s.queries, : s.keys]))
        elif p.mask_from == "triu":
            fill = attention_spellings.fill_value(p.fill, dtype)
            numbers = torch.full((s.queries, s.keys), fill, dtype=dtype).triu(diagonal + 1)
            found.append(Mask(numbers, additive=True))
        elif p.mask != "none":
            allowed = attention_spellings.MASKS[p.mask](s, diagonal)
            additive = p.mask_from == "additive"
            found.append(
                Mask(attention_spellings.additive(allowed, dtype, p.fill) if additive else allowed, additive=additive)
            )
        if p.documents:
            ids = x["documents"]
            found.append(Mask(ids[:, None, s.keys - s.queries :, None] == ids[:, None, None, :]))
        if p.padding != "none":
            kept = x["padding"][:, None, None, :]
            if p.combine == "filled":
                return [self._filled(found[0].values, kept, s)]
            numbers_do = p.combine == "sequence" and p.masking in ("add_product", "blend", "masked_fill_eq")
            if not numbers_do and p.padding_dtype != "bool":
                kept = kept > 0.5 if p.padding_dtype == "float" else kept.bool()
            found.append(Mask(kept))
        if p.combine == "and" and len(found) > 1:
            return [Mask(functools.reduce(torch.logical_and, (mask.values for mask in found)))]
        return found

    def _filled(self, additive: Tensor, kept: Tensor, s: Sizes) -> Mask:
        """Padding written into a copy of an additive mask, where it is zero so far."""
        additive = additive[None, None].expand(s.batch, 1, -1, -1).clone()
        padded = additive[:, :, :, : s.keys] + kept == 0
        fill = attention_spellings.fill_value(self.program.fill, additive.dtype)
        additive[:, :, :, : s.keys] = additive[:, :, :, : s.keys].masked_fill(padded, fill)
        return Mask(additive, additive=True)

    def _bias(self, x: dict[str, Tensor], q: Tensor, s: Sizes) -> Tensor | None:
        p = self.program
        if p.bias == "none":
            return None
        offsets = torch.arange(s.keys)[None, :] - (torch.arange(s.queries)[:, None] + (s.keys - s.queries))
        q = q if self.order == "bhsd" else q.transpose(1, 2)
        if p.bias == "alibi":
            return self.slopes[:, None, None] * -offsets.abs()
        if p.bias == "alibi_keys":
            return self.slopes.view(-1, 1, 1) * torch.arange(s.keys).view(1, 1, -1)
        if p.bias == "alibi_padding":
            kept = x["padding"]
            return (self.slopes[..., None] * ((kept.cumsum(-1) - 1) * kept)[:, None, :])[:, :, None, :]
        if p.bias == "t5":
            return F.embedding(attention_spellings.relative_buckets(offsets), self.table).permute(2, 0, 1).unsqueeze(0)
        if p.bias == "swin":
            bias = self.swin_table[self.swin_index.view(-1)].view(s.queries, s.keys, -1)
            return bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if p.bias == "query":
            return torch.matmul(q, self.positions_table[: s.keys].transpose(0, 1))
        if p.bias == "shaw":
            return torch.einsum("bhqd,qkd->bhqk", q, F.embedding(offsets.clamp(-3, 3) + 3, self.positions_table))
        if p.bias == "gated":
            return torch.sigmoid(q.sum(-1, keepdim=True)) * x["bias"]
        return x["bias"]

    def _grouped(self, x: Tensor) -> Tensor:
        """Keys or values once for each head of the queries, however that is spelled."""
        p, at = self.program, self.order.index("h")
        times = p.heads // p.kv_heads
        if p.grouping == "repeat_interleave":
            return torch.repeat_interleave(x, times, dim=at)
        if p.grouping == "expand":
            shape = (*x.shape[: at + 1], times, *x.shape[at + 1 :])
            return x.unsqueeze(at + 1).expand(shape).reshape(*x.shape[:at], p.heads, *x.shape[at + 1 :])
        if p.grouping == "repeat":
            return x.repeat(*(times if i == at else 1 for i in range(4)))
        return x

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        inputs: dict[str, Tensor],
        masks: Sequence[Mask],
        bias: Tensor | None,
        s: Sizes,
    ) -> tuple[Tensor, Tensor]:
        p = self.program
        q, k, v = (
            attention_spellings.NORMS[p.norm](q),
            attention_spellings.NORMS[p.norm](self._grouped(k)),
            self._grouped(v),
        )
        if p.held != "none":
            k = self._holding(k, inputs["padding"])
        scores, bias = self._scores(q, k, bias, s)
        scores = self._scaled(scores, s)
        if bias is not None and not p.bias_last:
            scores = self._plus(scores, self.fit(bias, s))
        scores = self._masked(attention_spellings.SOFTCAPS[p.softcap](scores), masks, s)
        if bias is not None and p.bias_last:
            scores = self._plus(scores, self.fit(bias, s))
        if p.scale == "after_mask":
            scores = scores * p.factor
        if p.changed != "none":
            scores = attention_spellings.CHANGES[p.changed](scores, self.fit(self._hidden(masks), s))
        weights = self._after(self._probabilities(scores, s).to(v.dtype), inputs, masks, s)
        return self._merged(self.value(weights, v, s)), weights

    @staticmethod
    def _hidden(masks: Sequence[Mask]) -> Tensor:
        """Where a query does not attend to a key."""
        found = [mask.values < 0 if mask.additive else mask.values == 0 for mask in masks]
        return functools.reduce(torch.logical_or, found)

    def _holding(self, k: Tensor, padding: Tensor) -> Tensor:
        """Keys that hold anything where there is no token."""
        number = {"nan": math.nan, "inf": math.inf, "large": 3e38}[self.program.held]
        return k.masked_fill(padding[:, None, :, None] == 0, number)

    def _scores(self, q: Tensor, k: Tensor, bias: Tensor | None, s: Sizes) -> tuple[Tensor, Tensor | None]:
        """Scores, and the bias if it is still to be added."""
        p, c = self.program, self.program.factor
        q = q * c if p.scale == "q_mul" else q / (1 / c) if p.scale == "q_div" else q
        k = k * c if p.scale == "k_mul" else k
        if p.scale == "both":
            q, k = q * math.sqrt(c), k * math.sqrt(c)
        if not p.product.startswith("baddbmm"):
            return self.product.scores(q, k, self.transpose, s), bias
        taken = self.fit_flat(bias, s) if p.product == "baddbmm_bias" and bias is not None else None
        alpha = c if p.scale == "none" else 1.0
        scores = self.product.scores(q, k, self.transpose, s, scale=alpha, bias=taken)
        return scores, bias if taken is None else None

    @staticmethod
    def fit_flat(bias: Tensor, s: Sizes) -> Tensor:
        """A bias as `baddbmm` takes it."""
        return attention_spellings.FITS["flat"](bias, s)

    def _scaled(self, x: Tensor, s: Sizes) -> Tensor:
        p, c = self.program, self.program.factor
        if p.scale == "mul":
            return x.mul_(c) if p.inplace else x * c
        if p.scale == "div":
            return x.div_(1 / c) if p.inplace else x / (1 / c)
        if p.scale == "buffer":
            return x * self.factor
        if p.scale == "tensor_div":
            return x / self.factor.reciprocal()
        if p.scale == "head":
            return x * self.fit(self.head_scale, s)
        if p.scale == "tau":
            return x * self.fit(torch.clamp(self.tau, max=math.log(100.0)).exp(), s)
        return x

    def _plus(self, x: Tensor, y: Tensor) -> Tensor:
        if self.program.inplace:
            x += y
            return x
        return x + y

    def _masked(self, x: Tensor, masks: Sequence[Mask], s: Sizes) -> Tensor:
        p = self.program
        for mask in masks:
            if p.mask == "shifted" and mask.additive:
                windows = x.view(s.batch // 2, 2, s.heads, s.queries, s.keys)
                windows = windows + mask.values.unsqueeze(1).unsqueeze(0)
                x = windows.view(-1, s.heads, s.queries, s.keys)
            elif mask.additive:
                x = self._plus(x, self.fit(mask.values, s))
            else:
                x = attention_spellings.MASKINGS[p.masking](x, self.fit(mask.values, s), p.fill)
        return x

    def _probabilities(self, x: Tensor, s: Sizes) -> Tensor:
        p = self.program
        softmax = attention_spellings.SOFTMAXES[p.softmax]
        if p.form == "bhkq":
            return softmax(x, -2)
        sink = None
        if p.sinks not in ("none", "zero"):
            sink = self.fit(self.sink.to(x.dtype).view(1, -1, 1, 1), s)
        return attention_spellings.SINKS[p.sinks](x, sink, softmax)

    def _after(self, weights: Tensor, x: dict[str, Tensor], masks: Sequence[Mask], s: Sizes) -> Tensor:
        p = self.program
        if p.after == "dropout0":
            return F.dropout(weights, p=0.0, training=True)
        if p.after == "dropout_eval":
            return self.dropout(weights)
        if p.after == "nan_to_num":
            return torch.nan_to_num(weights, nan=0.0)
        if p.after in ("head_mask", "row_mask"):
            return weights * self.fit(x[p.after], s)
        if p.after == "masked_zero" and masks and masks[-1].values.dtype == torch.bool:
            return weights.masked_fill(~self.fit(masks[-1].values, s), 0.0)
        return weights

    def _merged(self, out: Tensor) -> Tensor:
        p = self.program
        if p.merge == "none" or p.rank != 4:
            return out
        if self.out_order == "bhsd":
            out = out.transpose(1, 2)
        if p.merge == "reshaped":
            return out.reshape(out.size(0), out.size(1), -1)
        if p.merge == "contiguous":
            return out.contiguous().view(out.size(0), out.size(1), -1)
        if p.merge == "flattened":
            return out.flatten(-2)
        return F.linear(out.flatten(2), self.o_weight) if p.merge == "projected" else out
