"""Programs that are hard to compile: what they write, share, draw, read, and of what dtype and layout it is."""

from typing import Any

import torch
import torch.nn.functional as F
from outcomes import leaf, program
from torch import Tensor, nn


@program
def writes_to_an_input() -> Any:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1).mul_(y)
        return x.sin() + y

    return f, [torch.randn(4, 5), torch.randn(4, 5)]


@program
def writes_to_an_input_while_training() -> Any:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin() * w  # a backward that computes the sine anew would see what is written next
        x.copy_(x.cos() * 2)
        return (y * x.exp() * w).tanh()

    return f, [torch.randn(4, 5), leaf(4, 5)]


@program
def writes_to_a_view_of_an_input() -> Any:
    def f(x: Tensor) -> Tensor:
        x[1:, ::2].mul_(3)
        x.t()[0].zero_()
        return x.cos()

    return f, [torch.randn(4, 6)]


@program
def writes_to_two_inputs_that_overlap() -> Any:
    base = torch.randn(10)

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(2)
        return x.sum() + y.sum()

    return f, [base[:6], base[4:]]


@program
def returns_its_input_and_views_of_it() -> Any:
    def f(x: Tensor) -> Any:
        return x, x.view(-1), x[0], x.t(), x * 2

    return f, [torch.randn(3, 4)]


@program
def returns_views_of_a_result() -> Any:
    def f(x: Tensor) -> Any:
        y = x.exp()
        return y, y.t(), y[1], y.chunk(2, 1)

    return f, [leaf(4, 4)]


@program
def returns_one_thing_twice() -> Any:
    def f(x: Tensor) -> Any:
        y = x.relu() + 1
        return y, y, {"again": y}, 3, None

    return f, [leaf(3, 3)]


@program
def gets_one_thing_twice() -> Any:
    x = leaf(3, 4)
    return lambda a, b: (a * b.sin()).sum(0), [x, x]


@program
def returns_a_detached_alias() -> Any:
    return lambda x: (x.detach(), x.exp().detach(), x.exp()), [leaf(3)]


@program
def batch_norm_in_training() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)), [torch.randn(2, 3, 8, 8)]


@program
def buffers_that_count() -> Any:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return self.linear(x - self.mean) / self.calls

    return Counts(), [torch.randn(5, 4)]


@program
def tied_weights() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).tanh())

    return Tied(), [torch.randint(0, 11, (2, 5))]


@program(draws=True)
def dropout() -> Any:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.1)), [torch.randn(4, 6)]


@program(draws=True)
def random_numbers_of_many_kinds() -> Any:
    def f(x: Tensor) -> Any:
        noise = torch.randn_like(x) + torch.rand(4) + torch.randint(0, 9, (4,))
        return noise * x, torch.bernoulli(torch.full((4,), 0.5)), torch.randperm(5), x.clone().uniform_()

    return f, [leaf(3, 4)]


@program
def branches_on_data() -> Any:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:
            return y.sin()
        return y.cos() * 3

    return f, [torch.randn(4)]


@program
def reads_a_number() -> Any:
    def f(x: Tensor, n: Tensor) -> Tensor:
        k = int(n.item())
        return x[:k].sum() * k + x.max().item()

    return f, [torch.randn(9), torch.tensor(4)]


@program
def loops_over_data() -> Any:
    def f(x: Tensor) -> Tensor:
        total = torch.zeros(())
        for row in x.tolist():
            total = total + row[0]
        return total + x.nonzero().shape[0]

    return f, [torch.tensor([[1.0, 0.0], [2.0, 3.0]])]


@program
def boolean_indexing() -> Any:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = 0.5
        return y[x < 0].sum() + x[x > 0.1].prod()

    return f, [leaf(5, 5)]


@program
def empty_tensors() -> Any:
    def f(x: Tensor, y: Tensor) -> Any:
        return torch.cat([x, y]), x.sum(), x @ y.t(), torch.softmax(x, -1), x.mean(1), F.layer_norm(x, (4,))

    return f, [leaf(0, 4), leaf(3, 4)]


@program
def scalars() -> Any:
    return lambda x, s, n: (x * s + n, s.exp(), torch.tensor(2.5) * x), [leaf(3), leaf(), 3]


@program
def strided_inputs() -> Any:
    x = torch.randn(8, 12)[::2, ::3].t()
    e = torch.randn(1, 4).expand(4, 4)
    return lambda x, e: (x.contiguous() + e, x + 1, torch.empty_like(x).fill_(2), e * x, x.reshape(-1)), [x, e]


@program
def channels_last() -> Any:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).to(
        memory_format=torch.channels_last
    )
    return model, [x]


@program
def complex_numbers() -> Any:
    def f(x: Tensor) -> Any:
        z = torch.fft.fft(x) * (1 + 2j)
        return z, z.abs(), z.conj(), z.real, torch.view_as_real(z)

    return f, [leaf(4, 6)]


@program
def complex_inputs() -> Any:
    return lambda z: (z * z.conj(), z.angle(), z @ z.mH, z.imag + 1), [leaf(3, 3, dtype=torch.complex64)]


@program
def float64() -> Any:
    return lambda x: (torch.linalg.inv(x @ x.mT + torch.eye(4, dtype=x.dtype)), x.logsumexp(-1)), [
        leaf(4, 4, dtype=torch.float64)
    ]


@program
def integers() -> Any:
    def f(a: Tensor, b: Tensor) -> Any:
        return a // b, a % b, a << 2, a & b, a.float() / b, a.cumsum(0), a.bincount(minlength=20), (a > b).any()

    return f, [torch.arange(1, 13), torch.arange(2, 14).flip(0)]


@program(tolerance=0.02)
def half_precision() -> Any:
    return lambda x, w: F.gelu(F.layer_norm(x @ w, (8,))), [
        leaf(4, 8, dtype=torch.bfloat16),
        leaf(8, 8, dtype=torch.bfloat16),
    ]
