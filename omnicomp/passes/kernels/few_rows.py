"""Kernels of linear layers that share one input of few rows; each program computes some outputs of one layer.

Weights are read where they are, each once. Sums are in float32. Up to three layers are one launch. Of one row, the
kernel takes in what is around the layers: the RMSNorm of the input, a gate, and a tensor that is added. Nothing is
rounded between them.
"""

# pyright: basic, reportMissingImports=false, reportUnknownParameterType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _loaded(pointer, at, K: tl.constexpr, BK: tl.constexpr):
    if K % BK == 0:
        return tl.load(pointer + at).to(tl.float32)
    return tl.load(pointer + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == 1:  # SiLU
        return x * tl.sigmoid(x)
    elif ACT == 2:  # GELU
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # GELU's approximation, where (1 + tanh(z)) / 2 = sigmoid(2 z)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _sums_of_two(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums_of_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _row(
    x, gain, w, v, bias, second, addend, o, n,
    K: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    EPS: tl.constexpr, ADD: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BK)
    total = tl.zeros((BK,), tl.float32)
    other = tl.zeros((BK,), tl.float32)  # the product with v, behind a gate
    squares = tl.zeros((BK,), tl.float32)
    row = n.to(tl.int64) * K
    for start in range(0, K, BK):
        a = _loaded(x, start + k, K, BK)
        if NORM:
            squares += a * a
            factors = _loaded(gain, start + k, K, BK)
            if OFFSET != 0.0:
                factors += OFFSET
            a *= factors
        total += a * _loaded(w + row, start + k, K, BK)
        if ACT:
            other += a * _loaded(v + row, start + k, K, BK)
    # Sums of one program are made together: each waits for all of its threads.
    if NORM and ACT:
        made, factor, square = tl.reduce((total, other, squares), 0, _sums_of_three)
    elif NORM:
        made, square = tl.reduce((total, squares), 0, _sums_of_two)
    elif ACT:
        made, factor = tl.reduce((total, other), 0, _sums_of_two)
    else:
        made = tl.sum(total, 0)
    if NORM:
        scale = tl.rsqrt(square / K + EPS)
        made *= scale
    if BIAS:
        made += tl.load(bias + n).to(tl.float32)
    if ACT:
        if NORM:
            factor *= scale
        if BIAS:
            factor += tl.load(second + n).to(tl.float32)
        made = _activated(made, ACT) * factor
    if ADD:
        made += tl.load(addend + n).to(tl.float32)
    tl.store(o + n, made.to(o.dtype.element_ty))


@triton.jit
def one_row(
    x, gain, addend, w0, w1, w2, b0, b1, b2, o0, o1, o2, N0, N1,
    K: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LAYERS: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """One output of one layer, or of two layers of one size where one is the gate of the other."""
    n = tl.program_id(0)
    if ACT:
        _row(x, gain, w0, w1, b0, b1, addend, o0, n, K, BK, BIAS, NORM, OFFSET, EPS, ADD, ACT)
    elif LAYERS == 1 or n < N0:
        _row(x, gain, w0, w0, b0, b0, addend, o0, n, K, BK, BIAS, NORM, OFFSET, EPS, ADD, ACT)
    elif LAYERS == 2 or n < N0 + N1:
        _row(x, gain, w1, w1, b1, b1, addend, o1, n - N0, K, BK, BIAS, NORM, OFFSET, EPS, ADD, ACT)
    else:
        _row(x, gain, w2, w2, b2, b2, addend, o2, n - N0 - N1, K, BK, BIAS, NORM, OFFSET, EPS, ADD, ACT)


@triton.jit
def _rows(
    x, w, bias, o, block, M, N,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, 16)
    n = block * BN + tl.arange(0, BN)
    total = tl.zeros((16, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        at = w + n.to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            b = tl.load(at, eviction_policy="evict_first")
        else:
            b = tl.load(at, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
        total += tl.dot(a, b.T)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(o + m[:, None] * N + n[None, :], total.to(o.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def few_rows(
    x, w0, w1, w2, b0, b1, b2, o0, o1, o2,
    N0, N1, N2, M,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LAYERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """All rows of some outputs of one layer, at most 16."""
    at = tl.program_id(0)
    first, second = tl.cdiv(N0, BN), tl.cdiv(N1, BN)
    if LAYERS == 1 or at < first:
        _rows(x, w0, b0, o0, at, M, N0, K, BN, BK, BIAS, EVEN)
    elif LAYERS == 2 or at < first + second:
        _rows(x, w1, b1, o1, at - first, M, N1, K, BN, BK, BIAS, EVEN)
    else:
        _rows(x, w2, b2, o2, at - first - second, M, N2, K, BN, BK, BIAS, EVEN)
