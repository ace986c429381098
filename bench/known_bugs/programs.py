"""Silent wrong results that people reported of torch.compile, as programs of a few lines.

A program gets what compiles a function, and returns all that a caller can see: results, inputs that are written to,
gradients. Its docstring is what was wrong. Only issues whose fault a CPU can show, or could once show, are here.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import plants
import torch
import torch.nn.functional as F
from torch import nn

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
inf, nan = float("inf"), float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """A reported fault.

    Attributes:
        issue: its number at pytorch/pytorch.
        program: what shows it.
        affected: versions that the report names.
        closed: whether the issue was closed when it was looked up; None where only other texts name it.
        exact: whether results have to be equal in each bit; the fault is a rounding that eager does and code does not.
        strides: whether the fault is in the strides.
        device: where it was seen, if not on a CPU.
        plant: puts the fault back into a version of torch that does not have it any more.
    """

    issue: int
    program: Callable[[Compile], Any]
    affected: str
    closed: bool | None
    exact: bool
    strides: bool
    device: str
    plant: Callable[[], contextlib.AbstractContextManager[None]] | None

    @property
    def title(self) -> str:
        """What was wrong."""
        return (self.program.__doc__ or "").rstrip(".")


BUGS: list[Bug] = []


def bug(
    issue: int,
    affected: str,
    *,
    closed: bool | None = True,
    exact: bool = False,
    strides: bool = False,
    device: str = "",
    plant: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Callable[[Callable[[Compile], Any]], Callable[[Compile], Any]]:
    """Declare a program."""

    def declare(program: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
        known = Bug(
            issue=issue,
            program=program,
            affected=affected,
            closed=closed,
            exact=exact,
            strides=strides,
            device=device,
            plant=plant,
        )
        BUGS.append(known)
        return program

    return declare


def _seeded(*shape: int, seed: int = 0, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(**kwargs)


def _gradients(f: Callable[..., Any], *inputs: torch.Tensor) -> list[Any]:
    own = [value.detach().clone().requires_grad_() for value in inputs]
    result = f(*own)
    result.sum().backward()
    return [result, *(value.grad for value in own)]


# Writes in place, views, memory that is shared


@bug(94777, "2.0 nightly", plant=plants.read_after_write(torch.ops.aten.log.default))
def log_before_log_(compile: Compile) -> Any:
    """A logarithm reads its input after that was changed in place."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.log(x)
        x.log_()
        return y

    x = torch.tensor(3.0)
    return f(x), x


@bug(97083, "2.0")
def squeeze_of_slice(compile: Compile) -> Any:
    """A squeezed slice does not see a write behind an `if`."""

    @compile
    def f() -> torch.Tensor:
        a = torch.tensor([1])[0:1]
        b = a.squeeze()
        a[0] = 0
        if a[0] < 1e5:
            pass
        a[0] = 2
        return b

    with torch.no_grad():
        return f()


@bug(93824, "2.0", plant=plants.lost_write)
def reciprocal_of_view(compile: Compile) -> Any:
    """`reciprocal_` of a view is not seen through another view of the same memory."""

    @compile
    def f(x: torch.Tensor) -> Any:
        low = x.view(1, 1, 12)
        other = low.squeeze(0)
        low.reciprocal_()
        return other * 1, x.min(0).values.squeeze(0)

    x = _seeded(1, 1, 1, 12).abs() + 0.5
    return f(x), x


@bug(195422, "2.14", plant=plants.lost_write)
def write_through_dropout(compile: Compile) -> Any:
    """A write through what `dropout` returned in inference is lost: it is the input itself."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.5, False)
        y += y
        return y * 1

    x = torch.ones(2, 2)
    return f(x), x


@bug(111133, "2.1")
def index_add_of_transposed(compile: Compile) -> Any:
    """`index_add_` into a transposed input returns another layout and other values."""

    @compile
    def f(x: torch.Tensor, a: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        y = x.permute(1, 0)
        y.index_add_(0, index, a)
        return y

    x = torch.ones(3, 5)
    return f(x, torch.arange(1.0, 10.0).view(3, 3), torch.tensor([0, 4, 2])), x


@bug(101950, "2.1 nightly", plant=plants.copy_in_place_of_flip)
def copy_of_flip(compile: Compile) -> Any:
    """`a.copy_(a.flip(0))` overwrites what it has yet to read."""

    @compile
    def f(a: torch.Tensor) -> None:
        a.copy_(torch.flip(a, (0,)))

    a = torch.arange(64.0)
    return f(a), a


@bug(197829, "2.14")
def shift_rows(compile: Compile) -> Any:
    """`x[1:] = x[:-1].clone()` becomes a copy over overlapping memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x[1:] = x[:-1].clone()
        return x

    return f(_seeded(3, 16, 16))


@bug(198270, "2.9 to 2.14", closed=False)
def index_put_then_flip(compile: Compile) -> Any:
    """`x.index_put_` and `x.add_(x.flip(0))` are fused into one loop."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x.index_put_((torch.arange(x.size(0)),), x * 2.0)
        x.add_(x.flip(0))
        return x

    return f(_seeded(4, 8))


@bug(198033, "2.9 to 2.14", closed=False)
def foreach_add_of_flip(compile: Compile) -> Any:
    """`_foreach_add_([x], [x.flip(0)])` reads x while it writes it."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([x], [x.flip(0)])
        return x

    return f(_seeded(8, 8))


@bug(198131, "2.14", closed=False)
def copy_then_add_(compile: Compile) -> Any:
    """A copy of an input into another one is made after the first was changed."""

    @compile
    def f(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        dst[0:, :] = src[0:, :]
        src.add_(1)
        return src

    dst, src = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
    return f(dst, src), dst, src


@bug(198101, "2.14", closed=False)
def dtype_view_then_write(compile: Compile) -> Any:
    """What was read through a dtype view is computed after a later write to the input."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.view(torch.int32) * 2
        y.sub_(-4)
        x[:, 2:5] = 2
        return y.view(torch.int64)

    x = torch.arange(-12, 12).reshape(4, 6)
    return f(x), x


@bug(198094, "2.14", closed=False)
def slice_scatter_then_zero_(compile: Compile) -> Any:
    """The result of `slice_scatter` is put into the input's memory, which is zeroed later."""

    @compile
    def f(x: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        y = torch.slice_scatter(x, src[1:3], dim=0, start=1, end=3)
        x.zero_()
        return y

    x = torch.arange(24).reshape(4, 6)
    return f(x, torch.arange(-12, 12).reshape(4, 6)), x


@bug(174074, "2.11 nightly")
def index_put_of_duplicates(compile: Compile) -> Any:
    """`x[[0, 0]] += x[[0, 0]]` adds twice."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x[[0, 0]] += x[[0, 0]]
        return x

    return f(torch.tensor([[-0.8716, 0.1114]], dtype=torch.float64))


@bug(138908, "2.5")
def index_put_of_itself(compile: Compile) -> Any:
    """`index_put_` that accumulates values of the tensor itself reads what it has just written."""

    @compile
    def f(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.index_put_((index,), x.index_select(0, index), accumulate=True)
        return x

    return f(torch.arange(1.0, 7.0).view(3, 2), torch.tensor([0, 0]))


@bug(108963, "2.2 nightly", plant=plants.times_one)
def index_add_alpha(compile: Compile) -> Any:
    """The second result of `index_add` with `alpha` is zero."""

    @compile
    def f(source: torch.Tensor) -> Any:
        zeros = torch.zeros(1, dtype=torch.double)
        out = zeros.index_add(0, torch.tensor([0]), source, alpha=2.0) / 2
        return source * 1, out

    return f(torch.tensor([0.75], dtype=torch.double))


@bug(94778, "2.0 nightly")
def index_add_broadcast(compile: Compile) -> Any:
    """`index_add` of one row of values adds it along the other dimension."""

    @compile
    def f(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.index_add(x, 0, torch.arange(5), values.expand(5, 5))

    return f(_seeded(5, 5), _seeded(5, seed=1))


@bug(94693, "2.0 nightly", plant=plants.lost_write)
def trailing_copy_(compile: Compile) -> Any:
    """A graph that ends in `copy_` into its input computes from what it has overwritten."""

    @compile
    def f(x: torch.Tensor) -> None:
        padded = F.pad(x[1:-2], (1, 2))
        x.copy_(padded + x.roll(3))

    x = _seeded(64)
    return f(x), x


@bug(127821, "2.4 nightly")
def mutating_operator(compile: Compile) -> Any:
    """What follows an operator of the program's own that writes to its argument reads the old value."""
    _define()

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        full = torch.full((2, 6), 1.0)
        torch.ops.known_bugs.cat_into(full, [x, y])
        return (full * full).sum()

    return f(_seeded(2, 3), _seeded(2, 3, seed=1))


@bug(153389, "2.7")
def mutating_operator_on_views(compile: Compile) -> Any:
    """An operator that writes to one of two views of an input undoes the write to the other."""
    _define()

    @compile
    def f(base: torch.Tensor) -> torch.Tensor:
        low, high = base[:3], base[3:]
        high.add_(1)
        torch.ops.known_bugs.cat_into(low, [high])
        return base * 1

    base = torch.arange(6.0)
    return f(base), base


@bug(198031, "2.14", closed=False)
def clone_for_mutating_operator(compile: Compile) -> Any:
    """The clone of what an operator writes to is removed, and it reads its own output."""
    _define()

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        torch.ops.known_bugs.reverse_into(y, x)
        return x * 2.0

    x = torch.arange(8.0)
    return f(x), x


@bug(139789, "2.6 nightly", closed=False)
def inputs_that_overlap_later(compile: Compile) -> Any:
    """A graph that writes to an input is used again for inputs that share memory."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    first = f(torch.ones(4), torch.ones(4))
    base = torch.ones(8)
    return first, f(base[:4], base[2:6]), base


@bug(133512, "2.4 to 2.12", closed=False)
def as_strided_copy_after_add_(compile: Compile) -> Any:
    """A strided input that was written to is contiguous for what asks for its strides."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.as_strided_copy(x, (3,), (2,))

    return f(torch.arange(10)[::2])


@bug(152425, "2.7", closed=False)
def write_to_expanded(compile: Compile) -> Any:
    """A write to one element of an expanded tensor does not change all of them."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        a = x.expand((2,))
        a[-1] = 3
        return a * 1

    return f(torch.tensor(1))


@bug(174371, "2.10", closed=None)
def write_to_overlapping_strides(compile: Compile) -> Any:
    """A write to a view that overlaps itself writes each element once."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x.as_strided((3, 2), (1, 1)).add_(1)
        return x * 1

    return f(torch.zeros(4))


@bug(193760, "2.14", closed=False)
def copy_through_bool_view(compile: Compile) -> Any:
    """Bytes copied through a view as bool become 0 and 1, in some runs."""

    @compile
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.view(torch.bool).copy_(b.view(torch.bool)).view(torch.float32)

    return f(torch.zeros(2, 8), _seeded(2, 8) * 7)


@bug(183575, "2.12")
def lerp_in_place_of_optimizer(compile: Compile) -> Any:
    """The memory of a momentum that `lerp_` has updated is used for something else."""

    @compile
    def f(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> None:
        y = x.bfloat16() @ p.bfloat16()
        g, h = (x.bfloat16().t() @ y).float(), (y.t() @ y).float()
        m.lerp_(g, 0.05)
        n.lerp_(h @ q.t() @ q, 0.05)
        p.add_(m, alpha=-0.01)
        q.add_(n, alpha=-0.01)

    values = [_seeded(16, 16, seed=seed) * 0.1 for seed in range(5)]
    f(*values)
    return values


@bug(185382, "2.13 nightly")
def adam_with_item(compile: Compile) -> Any:
    """`addcdiv_` behind a graph break goes wrong from the third step on."""

    def step(param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> None:
        count.add_(1)
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        number = count.item()
        denominator = (v.sqrt() / ((1 - 0.999**number) ** 0.5)).add_(1e-8)
        param.addcdiv_(m, denominator, value=-0.001 / (1 - 0.9**number))

    @compile
    def f(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        m, v, count = torch.zeros_like(param), torch.zeros_like(param), torch.tensor(0.0)
        for _ in range(5):
            step(param, grad, m, v, count)
        return param

    return f(_seeded(8), _seeded(8, seed=1))


@bug(159855, "2.8")
def sliding_cache(compile: Compile) -> Any:
    """A sliding window's cache that is rolled in place holds wrong keys."""

    @compile
    def f(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        kept = cache[:, 1:].clone()
        cache[:, :-1] = kept
        cache[:, -1:] = new
        return cache.sum(1)

    cache = _seeded(2, 6, 4)
    return f(cache, _seeded(2, 1, 4, seed=1)), f(cache, _seeded(2, 1, 4, seed=2)), cache


# Dtypes, integers, casts


@bug(109925, "2.1", plant=plants.retyped(torch.ops.aten.cumsum.default, torch.bool))
def cumsum_of_bools(compile: Compile) -> Any:
    """`cumsum` of bools returns bools."""

    @compile
    def f() -> torch.Tensor:
        return torch.cumsum(torch.full([2, 4], 1).to(torch.bool), 1)

    return f()


@bug(93829, "2.0", plant=plants.wider(torch.ops.aten.neg.default))
def neg_of_uint8(compile: Compile) -> Any:
    """`neg` of a uint8 does not wrap for the comparison behind it."""

    @compile
    def f(x: torch.Tensor) -> Any:
        y = torch.neg(x)
        return y, torch.lt(y, torch.tensor(4, dtype=torch.uint8))

    return f(torch.tensor(6, dtype=torch.uint8))


@bug(98149, "2.1 nightly", plant=plants.wider(torch.ops.aten.mul.Tensor))
def pow_of_uint8(compile: Compile) -> Any:
    """The power of a uint8 does not wrap for the cosine behind it."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x.pow(5))

    return f(torch.tensor([4], dtype=torch.uint8))


@bug(131910, "2.5 nightly")
def byte_of_negative(compile: Compile) -> Any:
    """`byte()` of a negative number is 0, not 255; C++ does not define it."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.byte()

    return f(_seeded(20))


@bug(143566, "2.6 nightly", plant=plants.shift_modulo)
def shift_by_width(compile: Compile) -> Any:
    """A shift to the left by the width of the number is no shift at all."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_left_shift(x, y)

    return f(torch.tensor(1000), torch.tensor(64))


@bug(143555, "2.6 nightly", closed=None)
def shift_right_by_width(compile: Compile) -> Any:
    """A shift to the right by the width of the number is no shift at all."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_right_shift(x, y)

    return f(torch.tensor([1000, -1000]), torch.tensor([64, 64]))


@bug(143738, "2.6 nightly", plant=plants.zeroed(torch.ops.aten.avg_pool2d.default))
def avg_pool_of_integers(compile: Compile) -> Any:
    """`avg_pool2d` of int64 is 0."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(torch.argsort(x, dim=3), kernel_size=2, stride=2)

    return f(_seeded(1, 1, 2, 4))


@bug(198081, "2.14", closed=False)
def any_of_uint8(compile: Compile) -> Any:
    """`any` of uint8 is a bool, and what is computed from it does not wrap."""

    @compile
    def f(x: torch.Tensor) -> Any:
        return torch.any(x), torch.any(x) * 200 + 100

    return f(torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8))


@bug(197091, "2.14", closed=False)
def ldexp_dtype(compile: Compile) -> Any:
    """`ldexp` of a bool and a half is a float32."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ldexp(x, y)

    return f(torch.ones(3, 4, dtype=torch.bool), _seeded(3, 4).half())


@bug(197098, "2.14", closed=False)
def bce_dtype(compile: Compile) -> Any:
    """`binary_cross_entropy` of bfloat16 with a float32 weight is a float32."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy(x, y, weight=w)

    x = torch.sigmoid(_seeded(8)).bfloat16()
    return f(x, torch.ones(8, dtype=torch.bfloat16), torch.ones(8))


@bug(138015, "2.4")
def randn_dtype(compile: Compile) -> Any:
    """`randn` is of float32 where the default dtype is bfloat16."""

    @compile
    def f() -> torch.Tensor:
        return torch.randn(1, dtype=torch.bfloat16) * 0

    torch.set_default_dtype(torch.bfloat16)
    try:
        return f()
    finally:
        torch.set_default_dtype(torch.float32)


@bug(190764, "2.14 nightly", plant=plants.product_of_floats)
def products_of_int32(compile: Compile) -> Any:
    """Sums of products of large int32 matrices are wrong."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (x @ y + x @ z).sum(dim=1)

    big = 2**31 - 1
    x = torch.tensor([[big, -7], [3, -big]], dtype=torch.int32)
    return f(x, x.t().contiguous(), torch.tensor([[1, 99999], [-5, big]], dtype=torch.int32))


@bug(188048, "2.13 nightly", device="cuda")
def floor_of_infinity(compile: Compile) -> Any:
    """`div(inf, 1, rounding_mode="floor")` is inf, and NaN in eager."""

    @compile
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.div(a, b, rounding_mode="floor")

    return f(torch.tensor([nan, inf, -inf], dtype=torch.float64), torch.ones(3, dtype=torch.float64))


@bug(197895, "2.14", closed=False)
def floor_division(compile: Compile) -> Any:
    """`1.0 // 0.1` is 10."""

    @compile
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a // b

    return f(torch.tensor([1.0, 0.5, 6.0, 1.0]), torch.tensor([0.1, 0.1, 0.2, 1 / 3]))


@bug(175966, "2.11", closed=False, device="cuda")
def arange_times_billion(compile: Compile) -> Any:
    """An int64 `arange` is computed in 32 bits."""

    @compile
    def f() -> torch.Tensor:
        return torch.arange(0, 11, dtype=torch.int64) * torch.tensor([int(1e9)])

    return f()


@bug(182131, "2.12", exact=True)
def half_cast_before_add(compile: Compile) -> Any:
    """The casts to float16 in front of a sum are not rounded."""

    @compile
    def f(x: torch.Tensor, c: torch.Tensor) -> Any:
        z = torch.where(c, torch.full_like(x, 0.5), torch.full_like(x, -0.5))
        y = z.to(torch.float16) + x.to(torch.float16)
        return y, y.float().sum()

    return f(torch.arange(24.0).reshape(2, 3, 4) / 10, (torch.arange(24) % 5 == 0).reshape(2, 3, 4))


@bug(181568, "2.12", exact=True)
def bfloat16_cast_before_add(compile: Compile) -> Any:
    """The cast of a product to bfloat16 in front of a sum is not rounded."""

    @compile
    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (x @ w).to(torch.bfloat16) + b

    return f(_seeded(2, 15, 32), _seeded(32, 17, seed=1), _seeded(17, seed=2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


@bug(182225, "2.13 nightly", exact=True)
def rotary_in_bfloat16(compile: Compile) -> Any:
    """Rotary embeddings in bfloat16 are rounded once, where eager rounds three times."""
    f = compile(_rotate)
    return f(*(_seeded(1, 2, 7, 16, seed=seed).bfloat16() for seed in range(3)))


@bug(159239, "2.8", exact=True)
def rotary_of_model(compile: Compile) -> Any:
    """Queries with rotary embeddings in bfloat16, as in a model, differ from eager's."""

    @compile
    def f(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return _rotate((x @ w).view(2, 7, 2, 16).transpose(1, 2), cos, sin)

    x, w = _seeded(2, 7, 32).bfloat16(), _seeded(32, 32, seed=1).bfloat16()
    return f(x, w, _seeded(7, 16, seed=2).bfloat16(), _seeded(7, 16, seed=3).bfloat16())


@bug(143182, "2.6 nightly")
def layer_norm(compile: Compile) -> Any:
    """`LayerNorm` loses digits."""
    module = nn.LayerNorm([16, 8, 8]).eval()
    f = compile(lambda x: module(x))
    with torch.no_grad():
        return f(_seeded(2, 16, 8, 8) * 100 + 1000)


@bug(126848, "2.4 nightly", plant=plants.denormals_flushed)
def denormal(compile: Compile) -> Any:
    """Denormal numbers are 0, in eager too once something was compiled."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 ** (-127 + 3)

    f = compile(twice)
    x = torch.tensor(0.1875)
    return f(x), twice(x)


# Values that are no numbers, ties, zeros with a sign


@bug(118266, "2.3 nightly", plant=plants.nans_ignored(torch.ops.aten.argmax.default))
def argmax_of_nan(compile: Compile) -> Any:
    """`argmax` ignores a NaN."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(torch.log1p(x))

    return f(torch.tensor([-2.0, 100.0]))


@bug(113175, "2.2 nightly", plant=plants.nans_ignored(torch.ops.aten.argmax.default))
def argmax_of_bessel(compile: Compile) -> Any:
    """`argmax` of a Bessel function with NaNs ignores them."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(torch.special.modified_bessel_k1(x))

    return f(torch.tensor([[0.5, -1.0, 2.0], [-3.0, 0.1, 1.0]]))


@bug(118177, "2.3 nightly")
def argmax_of_flipped(compile: Compile) -> Any:
    """`argmax` of a flipped tensor of nine dimensions is another place."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(torch.fliplr(x))

    return f(_seeded(4, 3, 2, 3, 2, 1, 1, 2, 1))


@bug(99879, "2.0")
def argmin_of_ties(compile: Compile) -> Any:
    """`argmin` of equal values is another place than eager's."""

    @compile
    def f(x: torch.Tensor) -> Any:
        return x.min(dim=1).indices, x.argmin(dim=1)

    return f(torch.tensor([[2.0, 1.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]]).repeat(1, 8))


@bug(183082, "2.10")
def argmax_of_transposed(compile: Compile) -> Any:
    """`argmax` of a transposed view counts in the order of the memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.sin_()
        return x.t().argmax()

    return f(_seeded(5, 7))


@bug(183894, "2.13 nightly")
def argmin_of_transposed(compile: Compile) -> Any:
    """`argmin` of a transposed input that was changed in place counts in the order of the memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x.sin_()
        return x.t().argmin()

    x = _seeded(5, 7, seed=21)
    return f(x), x


@bug(178964, "2.11", closed=False)
def max_of_transposed(compile: Compile) -> Any:
    """The indices of `max` of a sum with a transposed tensor are 0."""

    @compile
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        return tuple((a + b).max(dim=1))

    return f(_seeded(8, 8).t(), _seeded(8, 8, seed=1))


@bug(114229, "2.2 nightly", device="cuda")
def argmax_beside_its_input(compile: Compile) -> Any:
    """`argmax` changes when what it is computed from is returned as well."""

    @compile
    def f(x: torch.Tensor, p: torch.Tensor) -> Any:
        product = torch.div(p, torch.atan(p + 2)) * torch.tan(x)
        return product, torch.sub(product, product).argmax(2)

    return f(_seeded(2, 3, 11), _seeded(2, 3, 11, seed=1))


@bug(113636, "2.2 nightly", device="cuda")
def argmin_behind_cat(compile: Compile) -> Any:
    """`argmin` changes with the order in which results are returned."""

    @compile
    def f(x: torch.Tensor) -> Any:
        cat = torch.cat((torch.div(x, x),), dim=1)
        return cat, cat.argmin(0)

    return f(_seeded(5, 4, 3))


@bug(114226, "2.2 nightly", device="cuda")
def interpolate_beside_division(compile: Compile) -> Any:
    """`interpolate` changes with the order in which results are returned."""

    @compile
    def f(x: torch.Tensor) -> Any:
        cos = torch.cos(F.pad(x, (0, 0, 3, 0), "replicate"))
        floor = torch.floor(cos)
        return torch.div(cos, floor), F.pad(cos, (0,) * 4, "replicate"), F.interpolate(floor, size=[1, 1])

    return f(_seeded(1, 2, 4, 5))


@bug(93784, "1.13", plant=plants.nans_clamped)
def clamp_of_nan(compile: Compile) -> Any:
    """`clamp_min` and `maximum` lose a NaN."""

    @compile
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.relu(x), torch.clamp_min(x, 0.5), torch.maximum(x, y)

    return f(torch.tensor([-3.0, nan, 1.0, 2.0]).half(), torch.tensor([0.0, 1.0, nan, 0.0]).half())


@bug(143978, "2.6 nightly", closed=False)
def angle_of_nan(compile: Compile) -> Any:
    """`angle` of a NaN is pi."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.atan(torch.angle(torch.rsqrt(x))))

    return f(torch.tensor([0.78, -1.17, 0.51, 1.41, 1.38, 0.57, 1.72, -2.29, -0.32, 1.36]))


@bug(189799, "2.13 nightly", closed=False)
def zero_with_sign(compile: Compile) -> Any:
    """`-0.0 + 0.0` is -0.0."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        v = torch.ceil(x)
        return torch.reciprocal(torch.add(v, torch.zeros_like(v)))

    with torch.no_grad():
        return f(torch.tensor([-0.5, -0.1, -0.9]))


# Operators


@bug(93262, "2.0 nightly", plant=plants.zeroed(torch.ops.aten._unsafe_index.Tensor, torch.ops.aten.index.Tensor))
def bilinear_to_one(compile: Compile) -> Any:
    """`interpolate` to one pixel takes the first one."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=[1, 1], mode="bilinear")

    return f(_seeded(2, 8, 7, 10))


@bug(175154, "2.11", closed=False)
def nearest_of_same_size(compile: Compile) -> Any:
    """`interpolate` resamples although the size stays."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.3, mode="nearest")

    return f(torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64))


@bug(198201, "2.14", closed=False)
def nearest_of_one_same_size(compile: Compile) -> Any:
    """`interpolate` resamples the one dimension whose size stays."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=(1.3, 1.5), mode="nearest")

    return f(torch.arange(12.0).reshape(1, 1, 3, 4))


@bug(94775, "2.0 nightly")
def max_pool_ceil(compile: Compile) -> Any:
    """`max_pool2d` with `ceil_mode` returns a row of -inf too many."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, 1, stride=(2, 2), padding=0, ceil_mode=True)

    return f(_seeded(1, 1, 6, 7))


@bug(100987, "2.1 nightly", plant=plants.padding_counted)
def avg_pool_ceil(compile: Compile) -> Any:
    """`avg_pool2d` with `ceil_mode` divides by a wrong count at the edge."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, kernel_size=3, stride=2, padding=1, ceil_mode=True)

    return f(_seeded(1, 3, 6, 6))


@bug(143720, "2.6 nightly", device="cuda")
def avg_pool_of_one(compile: Compile) -> Any:
    """`avg_pool1d` of a single element does not count its padding."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool1d(x, 4, 3, 2)

    return f(torch.tensor([[1.7641]]))


@bug(99686, "2.1 nightly", plant=plants.cat_in_order)
def cat_of_split(compile: Compile) -> Any:
    """`cat` of what `split` returned, in another order, is replaced by the input."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, [3, 2, 3], dim=1)
        return torch.cat([parts[1], parts[0], parts[2]], dim=1)

    return f(_seeded(1, 8))


@bug(159154, "2.7")
def softmax_by_einsum(compile: Compile) -> Any:
    """A local buffer is too small, and memory is corrupted."""

    @compile
    def f(xs: torch.Tensor, ls: torch.Tensor) -> torch.Tensor:
        e = torch.exp(-torch.einsum("i...,i->i...", xs, ls))
        return torch.einsum("i,i...->i...", 1 / torch.einsum("i...->i", e), e)

    return f(torch.ones(5, 1, 32, 32), torch.ones(5))


@bug(185702, "2.13 nightly")
def stack_of_special_functions(compile: Compile) -> Any:
    """`stack` of functions of a strided slice has values of other elements."""

    @compile
    def f(c: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = c[..., 16]
        positive, rates = F.softplus(x) + 1e-4, F.softplus(y) + 1e-4
        gamma = torch.special.gammaln(positive + a.view(1, -1))
        error = torch.special.erf(x * b.view(1, -1))
        return torch.stack([gamma, error, torch.special.xlogy(positive, rates)], dim=-1)

    return f(_seeded(4, 8, 32), _seeded(4, 8, seed=1), _seeded(8, seed=2).abs(), _seeded(8, seed=3))


@bug(98852, "2.1 nightly")
def one_relu_three_times(compile: Compile) -> Any:
    """A module that is used three times is applied once."""
    torch.manual_seed(420)
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(10, 20), relu, nn.Linear(20, 30), relu, nn.Linear(30, 40), relu)
    with torch.no_grad():
        return compile(lambda x: net(x))(_seeded(2, 10))


@bug(100970, "2.1 nightly")
def batch_norm_with_large_weight(compile: Compile) -> Any:
    """`batch_norm` with a weight of four dimensions returns another shape."""
    weight, bias = _seeded(3, 1, 1, 1, seed=1), _seeded(3, seed=2)

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, torch.zeros(3), torch.ones(3), weight, bias)

    with torch.no_grad():
        return f(_seeded(1, 3, 2, 2))


@bug(174891, "2.11 nightly", closed=False)
def complex_broadcast(compile: Compile) -> Any:
    """A sum of complex tensors of different shapes has wrong imaginary parts."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, 1, dtype=torch.complex64)

    return f(torch.full((2, 2), 1.0, dtype=torch.complex64))


@bug(117623, "2.3 nightly", closed=False)
def cumsum_into_integers(compile: Compile) -> Any:
    """`cumsum` into an integer tensor is computed in floats."""

    @compile
    def f(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 0, out=out)

    out = torch.tensor([0, 0], dtype=torch.int32)
    return f(out, torch.tensor([0.9201, 0.1166])), out


@bug(195320, "2.14 nightly")
def attention_over_batches(compile: Compile) -> Any:
    """Attention whose keys are permuted across the batch is replaced by that of the keys as they were."""

    @compile
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.permute(0, 2, 1, 3)
        scores = torch.matmul(q, k.permute(0, 2, 3, 1)).div(8**0.5)
        return scores.softmax(dim=-1).matmul(v.permute(0, 2, 1, 3))

    return f(*(_seeded(2, 6, 2, 8, seed=seed) for seed in range(3)))


@bug(174049, "2.10", closed=False)
def attention_of_other_scale(compile: Compile) -> Any:
    """Attention with a mask and a scale of its own gets the default scale."""

    @compile
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) / 3.0
        return torch.matmul(F.dropout((scores + mask).softmax(dim=-1), 0.0), v)

    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -inf)
    return f(*(_seeded(2, 2, 6, 8, seed=seed) for seed in range(3)), mask)


@bug(151098, "2.7", closed=None)
def attention_scaled_twice(compile: Compile) -> Any:
    """Attention whose scale is a number in the graph gets another one."""

    @compile
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (torch.matmul(q, k.transpose(-2, -1)) * 0.7).softmax(dim=-1).matmul(v)

    return f(*(_seeded(2, 2, 6, 8, seed=seed) for seed in range(3)))


@bug(181696, "2.12", closed=False)
def log_of_norms(compile: Compile) -> Any:
    """`group_norm` behind `batch_norm` and `elu` of a constant is far from 0."""
    modules = [nn.BatchNorm1d(10).eval(), nn.ELU(), nn.GroupNorm(10, 10).eval()]

    @compile
    def f() -> torch.Tensor:
        x = torch.ones([6, 10, 12])
        for module in modules:
            x = module(x)
        return torch.log(torch.clamp(x, min=1e-6))

    with torch.no_grad():
        return f()


@bug(172693, "2.11 nightly", closed=False)
def reshape_of_strided(compile: Compile) -> Any:
    """A tensor with strides is taken for contiguous when sizes are symbolic."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(0, 1) * 2).reshape(-1)

    return f(_seeded(3, 4)), f(_seeded(5, 6)), f(_seeded(7, 2))


# Strides of results


@bug(116433, "2.2 nightly", strides=True)
def stride_of_one(compile: Compile) -> Any:
    """The stride of a dimension of size 1 is 0."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).view(-1, 1, 2)

    return f(torch.arange(8.0))


@bug(130394, "2.5 nightly", strides=True)
def empty_strided(compile: Compile) -> Any:
    """`empty_strided` is contiguous."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(x.size(), x.stride())
        result[:] = x + x
        return result

    return f(torch.as_strided(_seeded(16, 16), (16, 8), (16, 1)))


@bug(183771, "2.13 nightly", strides=True)
def strides_of_nearest(compile: Compile) -> Any:
    """`interpolate` of a permuted tensor is contiguous."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(5, 6, 7), mode="nearest")

    return f(_seeded(2, 5, 2, 3, 2).permute(0, 4, 1, 2, 3))


@bug(198364, "2.14", closed=False, strides=True)
def strides_of_floor_division(compile: Compile) -> Any:
    """`floor_divide` of a transposed tensor is contiguous."""

    @compile
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.floor_divide(a, b)

    return f(_seeded(6, 5).abs().mT, _seeded(5, 6, seed=1).abs() + 1)


# Gradients, and whether there are any


@bug(185509, "2.13 nightly")
def gradients_of_pools(compile: Compile) -> Any:
    """Gradients of interpolate, convolution and pooling are far off."""

    @compile
    def f(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)[:, :, 1:7, 1:8]
        conv = F.conv2d(y, weight, bias, padding=1)
        return torch.where(conv > 0, conv, F.max_pool2d(conv, kernel_size=3, stride=1, padding=1))

    return _gradients(f, _seeded(1, 2, 6, 8), _seeded(3, 2, 3, 3, seed=1), _seeded(3, seed=2))


@bug(193061, "2.10 to 2.14", device="cuda")
def gradients_of_modulated_norms(compile: Compile) -> Any:
    """Gradients of a table that shifts and scales two layer norms are those of memory that nobody wrote to."""

    @compile
    def f(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        a, b, c, d = table.chunk(4, dim=-1)
        x = F.layer_norm(x, (16,)) * (1 + a) + b
        return F.layer_norm(x, (16,)) * (1 + c) + d

    return _gradients(f, _seeded(4, 8, 16), _seeded(64, seed=1))


@bug(136662, "2.5", closed=False)
def grad_of_writes(compile: Compile) -> Any:
    """`torch.func.grad` of two writes to one column counts one of them."""

    def g(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].abs()
        y[:, 0] += x[:, 2].abs()
        return y.sum()

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(g)(x)

    return f(_seeded(2, 3))


@bug(176854, "2.11")
def detach_in_place(compile: Compile) -> Any:
    """`detach_` leaves `requires_grad` as it was."""

    @compile
    def f(x: torch.Tensor) -> Any:
        y = x * 2.0
        y.detach_()
        return y + 1.0, torch.tensor(y.requires_grad)

    result, wanted = f(torch.ones(4, requires_grad=True))
    return result.detach(), wanted, torch.tensor(result.requires_grad)


@bug(114338, "2.2 nightly")
def grad_inside_no_grad(compile: Compile) -> Any:
    """`enable_grad` inside of `no_grad` has no effect."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x + 1

    with torch.no_grad():
        result = f(torch.zeros(10, requires_grad=True))
    return result.detach(), torch.tensor(result.requires_grad)


@bug(100977, "2.1 nightly")
def training_after_inference(compile: Compile) -> Any:
    """A graph that was compiled for inference is used again where gradients are wanted."""
    torch.manual_seed(0)
    module = nn.Linear(3, 3)
    f = compile(lambda x: module(x))
    x = _seeded(2, 3)
    with torch.no_grad():
        first = f(x)
    second = f(x)
    return first, second.detach(), torch.tensor(second.requires_grad)


@bug(99455, "2.1 nightly")
def leaf_made_inside(compile: Compile) -> Any:
    """A tensor that is made inside with `requires_grad` has no gradient."""

    @compile
    def f() -> Any:
        x = torch.ones(5, requires_grad=True)
        return x, x + 2

    return [torch.tensor(each.requires_grad) for each in f()]


@bug(91468, "2.0 to 2.13", closed=False)
def retained_gradient(compile: Compile) -> Any:
    """`retain_grad` of a result inside has no effect."""

    @compile
    def f(x: torch.Tensor) -> Any:
        y = x.clone()
        y.retain_grad()
        return y.clone(), y

    z, y = f(torch.ones(3, requires_grad=True))
    z.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(3) if y.grad is None else y.grad


# Indices out of range


@bug(183769, "2.13 nightly")
def select_out_of_range(compile: Compile) -> Any:
    """`select` of an element that is not there returns other memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        base = x.unsqueeze(1)
        return torch.cat([torch.select(base, 1, 0), torch.select(base, 1, 1)], dim=-1)

    return f(torch.arange(12.0).reshape(3, 4))


@bug(121251, "2.3 nightly")
def index_select_out_of_range(compile: Compile) -> Any:
    """`index_select` of an element that is not there returns other memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.index_select(x, 0, torch.tensor([2]))

    return f(_seeded(2, 2, 2, 2))


@bug(169779, "2.10 nightly", closed=False)
def index_select_negative(compile: Compile) -> Any:
    """`index_select` takes a negative index for one from the end."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.index_select(x, 0, torch.tensor([-1]))

    return f(_seeded(5, 10))


@bug(102064, "2.1 nightly", closed=None)
def index_from_end(compile: Compile) -> Any:
    """A negative index reads in front of the memory."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[:, [-1], :]

    return f(_seeded(1, 64, 32))


# What a compiled function is used again for


@bug(197811, "2.14", closed=False)
def captured_method(compile: Compile) -> Any:
    """A function that captures another method of tensors runs the first one's graph."""

    def make(op: Callable[..., Any]) -> Callable[..., Any]:
        def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return op(x, y)

        return g

    x, y = torch.tensor(6.0), torch.tensor(3.0)
    return [compile(make(op))(x, y) for op in (torch.Tensor.__add__, torch.Tensor.__mul__)]


@bug(197859, "2.14", closed=False)
def shadowed_submodule(compile: Compile) -> Any:
    """A module that is hidden by an attribute goes on being used."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub = nn.Linear(4, 4, bias=False)
            nn.init.eye_(self.sub.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sub(x)

    module, x = Wrapper(), torch.arange(4.0)
    f = compile(module)
    other = nn.Linear(4, 4, bias=False)
    nn.init.constant_(other.weight, 5.0)
    with torch.no_grad():
        first = f(x)
        object.__setattr__(module, "sub", other)
        return first, f(x)


@bug(178365, "2.12 nightly")
def captured_default(compile: Compile) -> Any:
    """A function whose default argument has changed runs with the old one."""

    def made(offset: int) -> Callable[..., Any]:
        def g(x: torch.Tensor, by: int = offset) -> torch.Tensor:
            return x + by

        return g

    f = compile(lambda g, x: g(x))
    return [f(made(offset), torch.zeros(3)) for offset in (1, 2, 3)]


@bug(194976, "2.13")
def bounds_that_change(compile: Compile) -> Any:
    """From the third value of a float on, `clamp` goes on with the second one."""

    @compile
    def f(x: torch.Tensor, bound: float) -> torch.Tensor:
        return torch.clamp(x, max=bound) * bound

    return [f(_seeded(8), bound) for bound in (0.5, 0.75, 1.25)]


@bug(197889, "2.14", closed=False)
def eps_that_changes(compile: Compile) -> Any:
    """From the third value of a float on, a norm goes on with the `eps` made of the second one."""

    @compile
    def f(x: torch.Tensor, s: float) -> torch.Tensor:
        return F.rms_norm(x * s, (4,), eps=s + 1e-3)

    return [f(_seeded(2, 4), s) for s in (0.5, 0.75, 1.25)]


@bug(194329, "2.14", closed=False)
def sum_under_autocast(compile: Compile) -> Any:
    """A sum in a graph of symbolic sizes runs under the caller's autocast."""

    @compile
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()).sum(dim=0)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [f(_seeded(size, 4)) for size in (3, 5, 7)]


_LIBRARY: list[torch.library.Library] = []


def _define() -> None:
    """Operators of a program that write to an argument."""
    if _LIBRARY:
        return
    library = torch.library.Library("known_bugs", "DEF")
    _LIBRARY.append(library)

    def cat_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        out.copy_(torch.cat(parts, dim=-1))

    def reverse_into(src: torch.Tensor, dst: torch.Tensor) -> None:
        last = src.shape[0] - 1
        for index in range(last + 1):
            dst[last - index] = src[index]

    library.define("cat_into(Tensor(a!) out, Tensor[] parts) -> ()")
    library.define("reverse_into(Tensor src, Tensor(a!) dst) -> ()")
    for name, function in (("cat_into", cat_into), ("reverse_into", reverse_into)):
        library.impl(name, function, "CPU")
        library.impl(name, lambda *_: None, "Meta")


def closed() -> Iterator[Bug]:
    """Those whose issue is closed."""
    return (known for known in BUGS if known.closed)
