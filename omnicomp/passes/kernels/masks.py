"""A kernel that reads a mask once, and leaves the numbers that its class follows from; each program has some rows.

Each program leaves numbers of its own: nothing has to be cleared before, and the host joins what it reads.
"""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "queries", "rows"])
def statistics(
    keep, added, out,
    heads, queries, keys, rows, hides,
    kb, kh, kq, kk, ab, ah, aq, ak,
    KEEP: tl.constexpr, ADDED: tl.constexpr, SEEN: tl.constexpr, FAR: tl.constexpr,
    BLOCK: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The numbers of `mask_classes.statistics`, of every so many blocks of rows."""
    fewest = tl.full((BQ,), FAR, tl.int32)
    shortest, right, left = fewest, fewest, fewest
    sees_first = tl.full((BQ,), 1, tl.int32)
    one_run, only_hides = sees_first, sees_first
    ends = tl.zeros((BQ,), tl.int64)
    starts, visited = ends, tl.zeros((1,), tl.int64)
    for block in range(tl.program_id(0), tl.cdiv(rows, BQ), tl.num_programs(0)):
        row = block * BQ + tl.arange(0, BQ)
        there = row < rows
        query = row % queries
        batch, head, q = (
            (row // queries // heads).to(tl.int64),
            (row // queries % heads).to(tl.int64),
            query.to(tl.int64),
        )
        at_keep = batch * kb + head * kh + q * kq
        at_added = batch * ab + head * ah + q * aq
        count = tl.zeros((BQ,), tl.int32)
        start = tl.full((BQ,), FAR, tl.int32)
        last = tl.full((BQ,), -1, tl.int32)
        more = tl.zeros((BQ,), tl.int32)
        for begin in range(0, keys, BK):
            key = begin + tl.arange(0, BK)
            k = key.to(tl.int64)
            inside = there[:, None] & (key < keys)[None, :]
            seen = inside
            if KEEP:
                seen = seen & (tl.load(keep + at_keep[:, None] + k[None, :] * kk, mask=inside, other=0) != 0)
            if ADDED:
                number = tl.load(added + at_added[:, None] + k[None, :] * ak, mask=inside, other=0).to(tl.float32)
                seen = seen & (number > SEEN)
                changes = (number != 0.0) & ((number <= hides) == 0)  # NaN does
                more = tl.maximum(more, tl.max((inside & changes).to(tl.int32), 1))
            count += tl.sum(seen.to(tl.int32), 1)
            start = tl.minimum(start, tl.min(tl.where(seen, key[None, :], FAR), 1))
            last = tl.maximum(last, tl.max(tl.where(seen, key[None, :], -1), 1))
        start = tl.where(count > 0, start, 0)
        end = start + count - 1
        fewest = tl.minimum(fewest, tl.where(there, count, FAR))
        sees_first = tl.minimum(sees_first, ((there == 0) | ((count > 0) & (start == 0))).to(tl.int32))
        one_run = tl.minimum(one_run, ((there == 0) | ((count > 0) & (last == end))).to(tl.int32))
        only_hides = tl.minimum(only_hides, 1 - more)
        shortest = tl.minimum(shortest, tl.where(there, end, FAR))
        right = tl.minimum(right, tl.where(there & (end < keys - 1), end - query, FAR))
        left = tl.minimum(left, tl.where(there & (start > 0), query - start, FAR))
        ends += tl.where(there, end, 0)
        starts += tl.where(there, start, 0)
        begin, finish = tl.min(tl.where(there, start, FAR), 0), tl.max(tl.where(there, end, -1), 0)
        visited += (finish + BLOCK) // BLOCK - (begin + BLOCK) // BLOCK + 1
    out += tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(out, tl.min(fewest, 0))
    tl.store(out + step, tl.min(sees_first, 0))
    tl.store(out + 2 * step, tl.min(one_run, 0))
    tl.store(out + 3 * step, tl.min(only_hides, 0))
    tl.store(out + 4 * step, tl.min(shortest, 0))
    tl.store(out + 5 * step, tl.min(right, 0))
    tl.store(out + 6 * step, tl.min(left, 0))
    tl.store(out + 7 * step, keys)
    tl.store(out + 8 * step, queries)
    tl.store(out + 9 * step, rows)
    tl.store(out + 10 * step, tl.sum(ends, 0))
    tl.store(out + 11 * step, tl.sum(starts, 0))
    tl.store(out + 12 * step, tl.sum(visited, 0))
