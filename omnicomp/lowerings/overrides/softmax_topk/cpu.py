"""The CPU kernel of `softmax_topk`: C++ on vector extensions, compiled at first use by Inductor's compiler driver."""

import functools
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from omnicomp._torch.inductor import cpp
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger

Kernel = Callable[[Tensor, int], tuple[Tensor, Tensor]]

_log = logger("omnicomp.overrides")
_lock = new_lock()

# Units of work (see `_threads`) below which a further thread costs more to wake than it saves: about 12 microseconds.
_UNITS_PER_THREAD: Final = 16384

# Fused multiply-adds make exp both faster and closer; by default Inductor turns them off. The other flags turn off what
# Inductor turns on if it is asked to (TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG), and what would change results.
_FLAGS: Final = ("-ffp-contract=fast", "-fno-unsafe-math-optimizations", "-fno-finite-math-only")

# A row is cut into chunks of W elements, and each lane keeps its own sorted list of the largest elements that it saw.
# Inserting a chunk is a handful of vector compares and blends for each list entry, and no branch depends on the data,
# so that a sorted row costs what a random one costs. The lists are then merged: k times the largest head is taken.
# Elements are compared as ordered integers, not as floats: the empty entry is then smaller than -inf (so rows of -inf
# still give distinct indices), and no floating-point flag of the compiler can change a comparison.
#
# The vector types are those that GCC and Clang share; on a machine with narrower registers they split them.
SOURCE: Final = r"""
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int MAX_K = 32;
constexpr int32_t INF_BITS = 0x7f800000;
constexpr int32_t EMPTY = INT32_MIN;

template <int W> struct V {
  typedef float F __attribute__((vector_size(W * 4)));
  typedef int32_t I __attribute__((vector_size(W * 4)));
  typedef int64_t L __attribute__((vector_size(W < 2 ? 8 : W * 4)));  // half as many lanes
};

template <int W> INLINE typename V<W>::I splat(int32_t x) { return x - typename V<W>::I{}; }

template <int W> INLINE typename V<W>::I iota() {
  typename V<W>::I v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

template <class To, class From> INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps the bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <int W> INLINE typename V<W>::I max(typename V<W>::I a, typename V<W>::I b) { return a > b ? a : b; }

// Horizontal reductions, by halves: both compilers turn these copies into register extracts.
template <int W> INLINE int32_t hmax(typename V<W>::I v) {
  if constexpr (W == 1) {
    return v[0];
  } else {
    typename V<W / 2>::I part[2];
    std::memcpy(part, &v, sizeof(v));
    if constexpr (W == 2) return part[0][0] > part[1][0] ? part[0][0] : part[1][0];
    else return hmax<W / 2>(part[0] > part[1] ? part[0] : part[1]);
  }
}

template <int LANES> INLINE int64_t hmax64(typename V<LANES * 2>::L v) {
  if constexpr (LANES == 2) {
    return v[0] > v[1] ? v[0] : v[1];
  } else {
    typename V<LANES>::L part[2];
    std::memcpy(part, &v, sizeof(v));
    return hmax64<LANES / 2>(part[0] > part[1] ? part[0] : part[1]);
  }
}

template <int W> INLINE float hsum(typename V<W>::F v) {
  if constexpr (W == 1) {
    return v[0];
  } else {
    typename V<W / 2>::F part[2];
    std::memcpy(part, &v, sizeof(v));
    return hsum<W / 2>(part[0] + part[1]);
  }
}

// Floats as integers of the same order; its own inverse. -0 becomes +0: they are equal, and equal elements are taken
// lowest index first.
template <int W> INLINE typename V<W>::I ordered(typename V<W>::I bits) {
  bits = bits == EMPTY ? typename V<W>::I{} : bits;
  return bits ^ ((bits >> 31) & INT32_MAX);
}
INLINE float unordered(int32_t o) { return cast<float>(o ^ ((o >> 31) & INT32_MAX)); }

// exp(x) for x <= 0, to about an ulp. The scale is applied in two steps, so that results below the normal range are
// rounded once instead of flushed to zero.
template <int W> INLINE typename V<W>::F exp_nonpositive(typename V<W>::F x) {
  typedef typename V<W>::F F;
  typedef typename V<W>::I I;
  x = x > -110.0f ? x : F{} - 110.0f;                       // exp(-110) is 0 in float; -inf lands here too
  const I exponent = __builtin_convertvector(x * 1.44269504f - 0.5f, I);  // rounds to nearest: it cuts towards zero
  const F n = __builtin_convertvector(exponent, F);
  F r = x - n * 0.693359375f;                               // few enough bits for an exact product
  r = r - n * -2.12194440e-4f;
  F p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);             // Taylor: the next term is below 6e-9 for |r| <= ln(2)/2
  p = p * r + (1.0f / 120.0f);
  p = p * r + (1.0f / 24.0f);
  p = p * r + (1.0f / 6.0f);
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  const I half = exponent >> 1;
  return p * cast<F>((half + 127) << 23) * cast<F>((exponent - half + 127) << 23);
}

// Puts the elements of a chunk into their lanes' lists. Masks are made from the old entries only: an entry above a
// smaller element stays, the one at the insertion point takes it, the ones below take their neighbour. Strictly larger,
// so of equal elements the earlier one stays in front.
template <int W> INLINE void insert(
    typename V<W>::I* keys, typename V<W>::I* places, int depth, typename V<W>::I key, typename V<W>::I place) {
  typedef typename V<W>::I I;
  I above = key > keys[depth - 1];
  for (int t = depth - 1; t > 0; t--) {
    const I next = key > keys[t - 1];
    keys[t] = above ? (next ? keys[t - 1] : key) : keys[t];
    places[t] = above ? (next ? places[t - 1] : place) : places[t];
    above = next;
  }
  keys[0] = above ? key : keys[0];
  places[0] = above ? place : places[0];
}

// Returns whether the order of the chosen probabilities is left to eager, whose topk has an order of its own for equal
// ones, and for a row of NaN. So close ones count as equal that they may be after eager's rounding.
// DEPTH: how many entries a lane's list has, or 0 if that is known only at run time.
template <int W, int DEPTH> bool one_row(const float* row, int n, int k, int depth_, float* values, int64_t* indices) {
  typedef typename V<W>::F F;
  typedef typename V<W>::I I;
  const int depth = DEPTH ? DEPTH : depth_;
  I keys[DEPTH ? DEPTH : MAX_K], places[DEPTH ? DEPTH : MAX_K];
  const I lanes = iota<W>();
  const int full = n / W * W;

  // The last, partial chunk is loaded so that it ends with the row; its elements that were seen are masked away. Only
  // a row shorter than a vector is copied.
  F last = F{};
  I last_place = splat<W>(INT32_MAX);
  if (full != n) {
    if (n >= W) {
      std::memcpy(&last, row + n - W, sizeof(last));
      last_place = lanes + (n - W);
      last_place = last_place >= full ? last_place : splat<W>(INT32_MAX);
    } else {
      for (int i = 0; i < n; i++) last[i] = row[i];
      last_place = lanes < n ? lanes : splat<W>(INT32_MAX);
    }
  }
  const I last_seen = last_place != INT32_MAX;

  for (int t = 0; t < depth; t++) {
    keys[t] = splat<W>(EMPTY);
    places[t] = splat<W>(INT32_MAX);
  }
  I magnitude = I{};
  int chunk = 0;
  for (int begin = 0; begin < full; begin += W, chunk++) {
    I bits;
    std::memcpy(&bits, row + begin, sizeof(bits));
    magnitude = max<W>(magnitude, bits & INT32_MAX);
    insert<W>(keys, places, DEPTH || chunk + 1 > depth ? depth : chunk + 1, ordered<W>(bits), lanes + begin);
  }
  if (full != n) {
    const I bits = cast<I>(last);
    magnitude = max<W>(magnitude, last_seen ? bits & INT32_MAX : I{});
    insert<W>(keys, places, depth, last_seen ? ordered<W>(bits) : splat<W>(EMPTY), last_place);
  }

  const int32_t largest = hmax<W>(keys[0]);
  if (hmax<W>(magnitude) > INF_BITS || largest == INF_BITS || unordered(largest) == -__builtin_inff()) {
    return true;  // a NaN or +inf in the row, or nothing but -inf: softmax gives NaN everywhere
  }
  const float maximum = unordered(largest);

  const auto chunk_of = [&](int begin) INLINE_LAMBDA {
    F x;
    std::memcpy(&x, row + begin, sizeof(x));
    return exp_nonpositive<W>(x - maximum);
  };
  F total = F{};
  int begin = 0;
  for (; begin + 4 * W <= full; begin += 4 * W) {  // by fours: shorter chains of additions are closer, and faster
    total += (chunk_of(begin) + chunk_of(begin + W)) + (chunk_of(begin + 2 * W) + chunk_of(begin + 3 * W));
  }
  for (; begin < full; begin += W) total += chunk_of(begin);
  if (full != n) total += last_seen ? exp_nonpositive<W>(last - maximum) : F{};
  const float sum = hsum<W>(total);

  // The heads of the lists with their places in one integer each, so that one reduction finds both: the complement
  // makes the lowest place of equal keys the largest.
  typedef typename V<W>::L L;
  typename V<W / 2>::I half_keys[2], half_places[2];
  const I complements = ~places[0];
  std::memcpy(half_keys, &keys[0], sizeof(half_keys));
  std::memcpy(half_places, &complements, sizeof(half_places));
  L low = (__builtin_convertvector(half_keys[0], L) << 32) | (__builtin_convertvector(half_places[0], L) & UINT32_MAX);
  L high = (__builtin_convertvector(half_keys[1], L) << 32) | (__builtin_convertvector(half_places[1], L) & UINT32_MAX);
  alignas(64) float chosen[MAX_K + W];
  int cursor[W] = {};
  const bool shortened = depth < (n + W - 1) / W;  // a list may be empty, and its lane not
  bool close = false;
  for (int t = 0; t < k; t++) {
    const int64_t best = hmax64<W / 2>(low > high ? low : high);
    const int32_t place = ~static_cast<int32_t>(best);
    chosen[t] = unordered(static_cast<int32_t>(best >> 32));
    indices[t] = place;
    const int lane = place < full || n < W ? place % W : place - (n - W);
    const int entry = ++cursor[lane];
    int32_t next_key = EMPTY, next_place = INT32_MAX;
    if (entry < depth) {
      std::memcpy(&next_key, reinterpret_cast<const char*>(keys + entry) + lane * 4, 4);
      std::memcpy(&next_place, reinterpret_cast<const char*>(places + entry) + lane * 4, 4);
    } else {
      close |= shortened;
    }
    const L next = (static_cast<int64_t>(next_key) * (int64_t{1} << 32) | static_cast<uint32_t>(~next_place)) - L{};
    low = low == best ? next : low;
    high = high == best ? next : high;
  }
  chosen[k] = k < n ? unordered(static_cast<int32_t>(hmax64<W / 2>(low > high ? low : high) >> 32)) : maximum;
  for (int t = 0; t <= k; t += W) {
    F p;
    std::memcpy(&p, chosen + t, sizeof(p));
    p = exp_nonpositive<W>(p - maximum) / sum;
    std::memcpy(chosen + t, &p, sizeof(p));
  }
  for (int t = 0; t < k; t++) {
    values[t] = chosen[t];
    close |= (t + 1 < k || k < n) && chosen[t + 1] >= chosen[t] * (1.0f - 1e-6f);
  }
  return close;
}

typedef bool (*Row)(const float*, int, int, int, float*, int64_t*);

template <int W> Row with_depth(int depth) {
  switch (depth) {
    case 1: return one_row<W, 1>;
    case 2: return one_row<W, 2>;
    case 4: return one_row<W, 4>;
    case 8: return one_row<W, 8>;
    default: return one_row<W, 0>;
  }
}

#if defined(__AVX512F__)
constexpr int WIDEST = 16;
#elif defined(__AVX2__)
constexpr int WIDEST = 8;
#else
constexpr int WIDEST = 4;
#endif

}  // namespace

// Returns how many rows are left to eager; these have a NaN for their first value.
extern "C" int64_t omnicomp_softmax_topk(
    const float* logits, int64_t rows, int64_t row_stride, int32_t n, int32_t k, float* values, int64_t* indices,
    int32_t threads) {
  const int width = WIDEST == 16 && n >= 16 ? 16 : WIDEST >= 8 && n >= 8 ? 8 : 4;
  const int chunks = (n + width - 1) / width;  // a lane never holds more elements than that
  const int depth = k < chunks ? k : chunks;
  const Row row = width == 16 ? with_depth<WIDEST>(depth)
                  : width == 8 ? with_depth<(WIDEST < 8 ? WIDEST : 8)>(depth)
                               : with_depth<4>(depth);
  int64_t left = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : left) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    if (row(logits + r * row_stride, n, k, depth, values + r * k, indices + r * k)) {
      values[r * k] = __builtin_nanf("");
      left++;
    }
  }
  return left;
}
"""


def kernel() -> Kernel | None:
    """The compiled kernel, or None if it could not be compiled, which the first call logs.

    The first call of a process compiles it, or loads it from Inductor's cache folder; every later call is a look-up.

    Returns:
        A function of logits (..., n) in float32 on the CPU, of any strides, and of k with 1 <= k <= min(n, 32), to
        values (..., k) in float32 and indices (..., k) in int64, both contiguous. It does not check its arguments.
    """
    with _lock:  # not left to functools.cache, which lets several threads compile, and log, at once
        return _build()


@functools.cache
def _build() -> Kernel | None:
    try:
        library = cpp.load(SOURCE, extra_flags=_FLAGS)
        run = library.omnicomp_softmax_topk
    except Exception as error:  # noqa: BLE001 (torch raises several types that have no common base)
        first_line = (str(error).splitlines() or [""])[0]
        _log.warning(
            "softmax_topk: the CPU kernel could not be compiled, so softmax and topk of ATen run instead (%s: %s)",
            type(error).__name__,
            first_line,
        )
        return None
    run.argtypes = [c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p, c_void_p, c_int32]
    run.restype = c_int64

    def call(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shape = (*logits.shape[:-1], k)
        values = logits.new_empty(shape)
        indices = logits.new_empty(shape, dtype=torch.int64)
        n = logits.shape[-1]
        table = logits if logits.dim() == 2 else logits.reshape(-1, n)  # a view where the strides allow one
        if table.stride(1) != 1:
            table = table.contiguous()
        rows = table.shape[0]
        if rows:
            # ctypes releases the GIL meanwhile.
            left = run(
                table.data_ptr(),
                rows,
                table.stride(0),
                n,
                k,
                values.data_ptr(),
                indices.data_ptr(),
                _threads(rows, n, k),
            )
            if left:
                those = values.view(-1, k)[:, 0].isnan().nonzero().squeeze(1)
                chosen = torch.topk(torch.softmax(table[those], dim=-1), k, dim=-1)
                values.view(-1, k)[those], indices.view(-1, k)[those] = chosen
        return values, indices

    return call


def _threads(rows: int, n: int, k: int) -> int:
    """How many threads to run on: the user's limit, less where their shares would be too small."""
    units = rows * (n + 16 * k)  # an element costs about a sixteenth of a merge step
    return max(1, min(torch.get_num_threads(), units // _UNITS_PER_THREAD))
