"""Numbers with a bound on the error that rounding can have made, through a program and through its gradient.

The bound is a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, chapter 3).
A tracked number is what exact arithmetic gives (in float64), and a bound on the distance of what a device computes. For
an operator `f` with operands off by `e`, computed in a dtype of unit roundoff `u` and smallest positive number `eta`,

    error of the result  <=  L(e) + k * (u * (|f| + L(e)) + eta)

where `L(e)` bounds how far `f` moves when its operands move by `e`, and `k` is the number of roundings: of each
operand's cast, of each term that is summed up, and of the result. `u` is the largest of the dtypes that the program has
at the operator and of those that take their places on the device, as either may be what is computed in. Gradients are
the vector-Jacobian products of the operators, written in the same tracked operations, so that they have bounds as well:
those contain the errors of the values that the forward saved, and of each sum where a value was used more than once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omnicomp.passes.legal.dtypes import Legal

SLACK = 1 + 1e-6  # terms of second order in u that are not written out, and float64's own rounding


class Tape:
    """The operators of one program on one device, forward and backward."""

    def __init__(self, legal: Legal) -> None:
        self.legal = legal
        self.steps: list[Callable[[], None]] = []
        self.gradients: dict[int, Tracked] = {}

    def roundoff(self, *dtypes: torch.dtype) -> tuple[float, float]:
        """The unit roundoff, and the smallest positive number, of the coarsest dtype that may be computed in."""
        known = [d for dtype in dtypes for d in (dtype, self.legal.nearest(dtype)) if d is not None]
        infos = [torch.finfo(d) for d in known]
        return max(i.eps / 2 for i in infos), max(i.smallest_normal * i.eps for i in infos)

    def make(self, value: Tensor, moved: Tensor, roundings: int, *dtypes: torch.dtype) -> "Tracked":
        """A result of exact value `value`, which its operands' errors move by `moved`; the first dtype is its own."""
        u, eta = self.roundoff(*dtypes)
        return Tracked(value, (moved + roundings * (u * (value.abs() + moved) + eta)) * SLACK, dtypes[0])

    def add_gradient(self, value: "Tracked", gradient: "Tracked") -> None:
        """One more use's gradient of a value, which has the value's dtype."""
        dtypes = (value.dtype, gradient.dtype)
        known = self.gradients.get(id(value))
        total, error = gradient.value, gradient.error
        if known is not None:
            total, error = total + known.value, error + known.error
        self.gradients[id(value)] = self.make(total, error, 2, *dtypes)

    def backward(self, outputs: "Sequence[tuple[Tracked, Tensor]]") -> None:
        """Gradients of the sum of each output times its exact cotangent."""
        for output, cotangent in outputs:
            self.add_gradient(output, Tracked(cotangent, torch.zeros_like(cotangent), output.dtype))
        for step in reversed(self.steps):
            step()

    def apply(
        self,
        result: "Tracked",
        operands: "Sequence[Tracked]",
        vjp: "Callable[[Tracked], Sequence[Tracked]]",
    ) -> "Tracked":
        """Note how the gradient of a result becomes that of its operands."""

        def step() -> None:
            gradient = self.gradients.get(id(result))
            if gradient is not None:
                for operand, part in zip(operands, vjp(gradient), strict=True):
                    self.add_gradient(operand, part)

        self.steps.append(step)
        return result

    # The operators: exact value, movement, roundings. Those with `_` have no gradient: the backward uses them.

    def add(self, a: "Tracked", b: "Tracked", sign: int = 1) -> "Tracked":
        dtype = torch.promote_types(a.dtype, b.dtype)
        result = self.make(a.value + sign * b.value, a.error + b.error, 3, dtype, a.dtype, b.dtype)
        return self.apply(result, (a, b), lambda g: (g, Tracked(sign * g.value, g.error, g.dtype)))

    def _mul(self, a: "Tracked", b: "Tracked") -> "Tracked":
        moved = a.error * b.value.abs() + b.error * a.value.abs() + a.error * b.error
        return self.make(a.value * b.value, moved, 3, torch.promote_types(a.dtype, b.dtype), a.dtype, b.dtype)

    def mul(self, a: "Tracked", b: "Tracked") -> "Tracked":
        return self.apply(self._mul(a, b), (a, b), lambda g: (self._mul(g, b), self._mul(g, a)))

    def scale(self, a: "Tracked", factor: float | Tensor, dtype: torch.dtype | None = None) -> "Tracked":
        """By an exact number, or by exact numbers of a dtype."""
        number = torch.as_tensor(factor, dtype=torch.float64)

        def times(x: Tracked, *own: torch.dtype) -> Tracked:
            return self.make(x.value * number, x.error * number.abs(), 3, *own)

        own = a.dtype if dtype is None else torch.promote_types(a.dtype, dtype)
        return self.apply(times(a, own, a.dtype), (a,), lambda g: (times(g, a.dtype, g.dtype, own),))

    def tanh(self, a: "Tracked") -> "Tracked":
        result = self.make(a.value.tanh(), a.error, 5, a.dtype)

        def vjp(g: Tracked) -> Sequence[Tracked]:
            moved = 2 * result.error * result.value.abs() + result.error**2
            slope = self.make(1 - result.value**2, moved + 2 * self.roundoff(a.dtype)[0], 3, a.dtype)
            return (self._mul(g, slope),)

        return self.apply(result, (a,), vjp)

    def sin(self, a: "Tracked") -> "Tracked":
        result = self.make(a.value.sin(), a.error, 5, a.dtype)
        return self.apply(result, (a,), lambda g: (self._mul(g, self.make(a.value.cos(), a.error, 5, a.dtype)),))

    def softmax(self, a: "Tracked") -> "Tracked":
        width = a.value.shape[-1]
        u, eta = self.roundoff(a.dtype)
        # Every difference to the row's largest is off by twice the row's error and two roundings of it.
        spread = (a.value.abs().amax(-1, keepdim=True) + a.error.amax(-1, keepdim=True)) * 2
        off = 2 * (a.error.amax(-1, keepdim=True) + u * spread + eta)
        value = a.value.softmax(-1)
        result = self.make(value, value * torch.expm1(2 * off), 2 * width + 8, a.dtype)

        def vjp(g: Tracked) -> Sequence[Tracked]:
            product = self._mul(g, result)
            total = self._sum(product, -1)
            difference = self.make(g.value - total.value, g.error + total.error, 3, a.dtype)
            return (self._mul(difference, result),)

        return self.apply(result, (a,), vjp)

    def _sum(self, a: "Tracked", dim: int) -> "Tracked":
        value, u_terms = a.value.sum(dim, keepdim=True), a.value.shape[dim] + 1
        u, eta = self.roundoff(a.dtype)
        size = (a.value.abs() + a.error).sum(dim, keepdim=True)
        # Partial sums may be larger than the sum: each is rounded.
        moved = a.error.sum(dim, keepdim=True) + u_terms * (u * size + eta)
        return self.make(value, moved, 2, a.dtype)

    def mean(self, a: "Tracked", dim: int) -> "Tracked":
        """Over one dimension, repeated to the shape that was."""
        n = a.value.shape[dim]
        total = self._sum(a, dim)
        one = self.make(total.value / n, total.error / n, 2, a.dtype)
        shape = a.value.shape
        result = Tracked(one.value.expand(shape), one.error.expand(shape), a.dtype)

        def vjp(g: Tracked) -> Sequence[Tracked]:
            back = self._sum(g, dim)
            part = self.make(back.value / n, back.error / n, 2, a.dtype)
            return (Tracked(part.value.expand(shape), part.error.expand(shape), a.dtype),)

        return self.apply(result, (a,), vjp)

    def _matmul(self, a: "Tracked", b: "Tracked") -> "Tracked":
        u, eta = self.roundoff(a.dtype, b.dtype)
        x, y = a.value.abs() + a.error, b.value.abs() + b.error
        moved = a.error @ y + a.value.abs() @ b.error
        return self.make(a.value @ b.value, moved + (a.value.shape[-1] + 3) * (u * (x @ y) + eta), 2, a.dtype, b.dtype)

    def matmul(self, a: "Tracked", b: "Tracked") -> "Tracked":
        return self.apply(self._matmul(a, b), (a, b), lambda g: (self._matmul(g, b.T), self._matmul(a.T, g)))

    def cumsum(self, a: "Tracked") -> "Tracked":
        """Over rows."""

        def ordered(x: Tracked, flip: bool) -> Tracked:
            def along(t: Tensor) -> Tensor:
                return t.flip(0).cumsum(0).flip(0) if flip else t.cumsum(0)

            u, eta = self.roundoff(x.dtype)
            size = along(x.value.abs() + x.error)
            n = x.value.shape[0] + 1
            # Autograd's may be a difference of a total and partial sums.
            size = size.amax(0, keepdim=True).expand_as(size) if flip else size
            return self.make(along(x.value), along(x.error) + 2 * n * (u * size + eta), 3, x.dtype)

        return self.apply(ordered(a, False), (a,), lambda g: (ordered(g, True),))

    def cast(self, a: "Tracked", dtype: torch.dtype) -> "Tracked":
        result = self.make(a.value, a.error, 2, dtype, a.dtype)
        return self.apply(result, (a,), lambda g: (self.make(g.value, g.error, 2, a.dtype, dtype),))

    def index(self, a: "Tracked", read: Callable[[Tensor], Tensor], add: Callable[[Tensor], Tensor]) -> "Tracked":
        """Elements at exact indices; `add` adds to each element what was read of it."""
        result = Tracked(read(a.value), read(a.error), a.dtype)

        def vjp(g: Tracked) -> Sequence[Tracked]:
            u, eta = self.roundoff(a.dtype)
            size = add(g.value.abs() + g.error)
            return (self.make(add(g.value), add(g.error) + (g.value.shape[0] + 1) * (u * size + eta), 2, a.dtype),)

        return self.apply(result, (a,), vjp)

    def where(self, condition: Tensor, a: "Tracked", b: "Tracked") -> "Tracked":
        dtype = torch.promote_types(a.dtype, b.dtype)
        value, moved = torch.where(condition, a.value, b.value), torch.where(condition, a.error, b.error)

        def side(g: Tracked, chosen: Tensor) -> Tracked:
            return Tracked(g.value * chosen, g.error * chosen, g.dtype)

        result = self.make(value, moved, 2, dtype, a.dtype, b.dtype)
        return self.apply(result, (a, b), lambda g: (side(g, condition), side(g, ~condition)))


class Tracked:
    """An exact value, a bound on the error of what is computed, and the dtype that the program has."""

    def __init__(self, value: Tensor, error: Tensor, dtype: torch.dtype) -> None:
        self.value, self.error, self.dtype = value, error, dtype

    @property
    def T(self) -> "Tracked":
        return Tracked(self.value.T, self.error.T, self.dtype)
