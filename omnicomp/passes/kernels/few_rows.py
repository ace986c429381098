"""Kernels of linear layers that share one input of few rows; each program computes some outputs of one layer.

Weights are read where they are, each once. Sums are in float32. Up to three layers are one launch.
"""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def _row(x, w, bias, o, n, K: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr):
    k = tl.arange(0, BK)
    total = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        if K % BK == 0:
            a = tl.load(x + start + k)
            b = tl.load(w + n.to(tl.int64) * K + start + k)
        else:
            a = tl.load(x + start + k, mask=start + k < K, other=0.0)
            b = tl.load(w + n.to(tl.int64) * K + start + k, mask=start + k < K, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)
    made = tl.sum(total, 0)
    if BIAS:
        made += tl.load(bias + n).to(tl.float32)
    tl.store(o + n, made.to(o.dtype.element_ty))


@triton.jit
def one_row(
    x, w0, w1, w2, b0, b1, b2, o0, o1, o2, N0, N1,
    K: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """One output of one layer."""
    n = tl.program_id(0)
    if LAYERS == 1 or n < N0:
        _row(x, w0, b0, o0, n, K, BK, BIAS)
    elif LAYERS == 2 or n < N0 + N1:
        _row(x, w1, b1, o1, n - N0, K, BK, BIAS)
    else:
        _row(x, w2, b2, o2, n - N0 - N1, K, BK, BIAS)


@triton.jit
def _rows(
    x, w, bias, o, block, M, N,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, 16)
    n = block * BN + tl.arange(0, BN)
    total = tl.zeros((16, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)
        total += tl.dot(a, b.T)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(o + m[:, None] * N + n[None, :], total.to(o.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def few_rows(
    x, w0, w1, w2, b0, b1, b2, o0, o1, o2,
    N0, N1, N2, M,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """All rows of some outputs of one layer, at most 16."""
    at = tl.program_id(0)
    first, second = tl.cdiv(N0, BN), tl.cdiv(N1, BN)
    if LAYERS == 1 or at < first:
        _rows(x, w0, b0, o0, at, M, N0, K, BN, BK, BIAS)
    elif LAYERS == 2 or at < first + second:
        _rows(x, w1, b1, o1, at - first, M, N1, K, BN, BK, BIAS)
    else:
        _rows(x, w2, b2, o2, at - first - second, M, N2, K, BN, BK, BIAS)
