"""Kernels of attention with few queries, whose keys are read up to a number that is on the device.

The keys of a head are shared out among programs in turns, so that all have work however many keys are read. Each leaves
its largest score, its sum and its part of the output; a second kernel joins them. Nothing waits for the host.
"""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def parts(
    query, key, value, mask, last, out, sums,
    heads, queries, rows,
    qb, qh, qq, kb, kh, kk, vb, vh, vk,
    mb, mh, mq, mk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HIDES: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """The part of one program, of all queries that share a head of keys: `rows`, at most 16."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # what strides are multiplied with has 64 bits
    batch, head = at // heads, at % heads
    row = tl.arange(0, 16).to(tl.int64)
    there = row < rows
    own, which = head * (rows // queries) + row // queries, row % queries
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    q = tl.load(
        query + batch * qb + own[:, None] * qh + which[:, None] * qq + d[None, :], mask=there[:, None], other=0.0
    )
    top = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    made = tl.zeros((16, DV), tl.float32)
    end = tl.load(last).to(tl.int32)
    for start in range(part * BLOCK, end, BLOCK * PARTS):
        j = (start + tl.arange(0, BLOCK)).to(tl.int64)
        read = j < end
        k = tl.load(key + batch * kb + head * kh + j[:, None] * kk + d[None, :], mask=read[:, None], other=0.0)
        v = tl.load(value + batch * vb + head * vh + j[:, None] * vk + dv[None, :], mask=read[:, None], other=0.0)
        m = tl.load(
            mask + batch * mb + own[:, None] * mh + which[:, None] * mq + j[None, :] * mk,
            mask=there[:, None] & read[None, :],
            other=0,
        )
        score = tl.dot(q, k.T) * SCALE
        if HIDES:
            score = tl.where(m != 0, score, float("-inf"))
        else:
            score += m.to(tl.float32)
        score = tl.where(read[None, :], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp(score - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weight, 1)
        made = made * kept[:, None] + tl.dot(weight.to(v.dtype), v)
        top = above
    place = (at * PARTS + part) * 16 + row
    tl.store(sums + place * 2, top)
    tl.store(sums + place * 2 + 1, total)
    tl.store(out + place[:, None] * DV + dv[None, :], made)


@triton.jit
def joined(out, sums, result, rows, DV: tl.constexpr, PARTS: tl.constexpr):
    """One row of the output; zero where no key is seen, as sdpa has it."""
    at = tl.program_id(0).to(tl.int64)
    head, row = at // rows, at % rows
    part, dv = tl.arange(0, PARTS), tl.arange(0, DV)
    place = (head * PARTS + part) * 16 + row
    top, total = tl.load(sums + place * 2), tl.load(sums + place * 2 + 1)
    above = tl.max(top, 0)
    weight = tl.exp(top - tl.where(above == float("-inf"), 0.0, above))
    each = tl.load(out + place[:, None] * DV + dv[None, :])
    whole = tl.sum(total * weight, 0)
    made = tl.sum(each * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(result + at * DV + dv, made.to(result.dtype.element_ty))
