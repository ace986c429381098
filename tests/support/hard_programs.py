"""Programs that are hard to compile, and a comparison with eager that looks at more than values."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS", "Outcome", "Program", "compare", "outcome"]

Make = Callable[[], tuple[Callable[..., Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: `make` gives a new function or module and its inputs, the same at each call.

    Attributes:
        name: of the function that makes it.
        make: that function.
        tolerance: relative and absolute, of what it computes; more where it computes in half precision.
        traced: whether Dynamo itself, whatever the backend, can trace it.
    """

    name: str
    make: Make
    tolerance: float
    traced: bool


PROGRAMS: list[Program] = []


def program(make: Make | None = None, *, tolerance: float = 1e-3, traced: bool = True) -> Any:
    """Register the maker of a program."""

    def register(make: Make) -> Make:
        PROGRAMS.append(Program(make.__name__, make, tolerance, traced))
        return make

    return register if make is None else register(make)


@dataclasses.dataclass
class Outcome:
    """What two calls gave: results, gradients, what was written to, who shares memory, or the error."""

    results: list[Any]
    gradients: list[Any]
    state: list[Any]
    sharing: list[Any]
    error: str = ""


def outcome(program: Program, compile: Callable[[Any], Any], calls: int = 2) -> Outcome:
    """Run a program on inputs of its own; `compile` is what is done to the function first."""
    torch.manual_seed(0)
    function, inputs = program.make()
    compiled = compile(function)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    held = list(function.parameters()) + list(function.buffers()) if isinstance(function, nn.Module) else []
    results: list[Any] = []
    sharing: list[Any] = []
    gradients: list[Any] = []
    for _ in range(calls):
        torch.manual_seed(1)
        try:
            found = [leaf for leaf in tree_leaves(compiled(*inputs))]
        except Exception as error:
            return Outcome(results, gradients, _values(leaves + held), sharing, type(error).__name__)
        results += [f.detach().clone() if isinstance(f, Tensor) else f for f in found]
        sharing.append(_sharing(found, leaves + held))
        sharing.append([_layout(f) for f in found])
        differentiable = [f for f in found if isinstance(f, Tensor) and f.requires_grad]
        if differentiable:
            sum(
                (f.to_dense() if f.layout != torch.strided else f).abs().pow(2).sum() for f in differentiable
            ).backward()
    for tensor in leaves + held:
        gradients.append(tensor.grad if tensor.is_leaf else None)
    return Outcome(results, gradients, _values(leaves + held), sharing)


def _values(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | bool) else type(value).__name__
    sizes = () if value.layout != torch.strided or value.is_nested else (value.stride(), value.storage_offset())
    return (type(value).__name__, value.dtype, tuple(value.shape), sizes, value.requires_grad, value.is_conj())


def _sharing(found: Sequence[Any], known: Sequence[Tensor]) -> list[int]:
    """For each result the first tensor among inputs, state and results whose memory it has."""
    tensors = [*known, *(f for f in found if isinstance(f, Tensor))]
    tensors = [t for t in tensors if t.layout == torch.strided and type(t) in (Tensor, nn.Parameter) and t.numel()]
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(place) for place in places]


def compare(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Raise if a compiled program did something else than eager."""
    assert found.error == expected.error
    for name in ("results", "gradients", "state"):
        got, want = getattr(found, name), getattr(expected, name)
        assert len(got) == len(want), name
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            assert type(g) is type(w), (name, index, g, w)
            if isinstance(g, Tensor):
                if g.is_nested:
                    g, w = torch.nested.to_padded_tensor(g, 0.0), torch.nested.to_padded_tensor(w, 0.0)
                torch.testing.assert_close(
                    g, w, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name, i=index: f"{n} {i}: {m}"
                )
            else:
                assert g == w, (name, index)
    assert found.sharing == expected.sharing


def _leaf(*shape: int, **kwargs: Any) -> Tensor:
    return torch.randn(shape, **kwargs).requires_grad_()


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

    return f, [torch.randn(4, 5), _leaf(4, 5)]


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

    return f, [_leaf(4, 4)]


@program
def returns_one_thing_twice() -> Any:
    def f(x: Tensor) -> Any:
        y = x.relu() + 1
        return y, y, {"again": y}, 3, None

    return f, [_leaf(3, 3)]


@program
def gets_one_thing_twice() -> Any:
    x = _leaf(3, 4)
    return lambda a, b: (a * b.sin()).sum(0), [x, x]


@program
def returns_a_detached_alias() -> Any:
    return lambda x: (x.detach(), x.exp().detach(), x.exp()), [_leaf(3)]


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


@program
def dropout() -> Any:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.1)), [torch.randn(4, 6)]


@program
def random_numbers_of_many_kinds() -> Any:
    def f(x: Tensor) -> Any:
        noise = torch.randn_like(x) + torch.rand(4) + torch.randint(0, 9, (4,))
        return noise * x, torch.bernoulli(torch.full((4,), 0.5)), torch.randperm(5), x.clone().uniform_()

    return f, [_leaf(3, 4)]


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

    return f, [_leaf(5, 5)]


@program
def empty_tensors() -> Any:
    def f(x: Tensor, y: Tensor) -> Any:
        return torch.cat([x, y]), x.sum(), x @ y.t(), torch.softmax(x, -1), x.mean(1), F.layer_norm(x, (4,))

    return f, [_leaf(0, 4), _leaf(3, 4)]


@program
def scalars() -> Any:
    return lambda x, s, n: (x * s + n, s.exp(), torch.tensor(2.5) * x), [_leaf(3), _leaf(), 3]


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

    return f, [_leaf(4, 6)]


@program
def complex_inputs() -> Any:
    return lambda z: (z * z.conj(), z.angle(), z @ z.mH, z.imag + 1), [_leaf(3, 3, dtype=torch.complex64)]


@program
def float64() -> Any:
    return lambda x: (torch.linalg.inv(x @ x.mT + torch.eye(4, dtype=x.dtype)), x.logsumexp(-1)), [
        _leaf(4, 4, dtype=torch.float64)
    ]


@program
def integers() -> Any:
    def f(a: Tensor, b: Tensor) -> Any:
        return a // b, a % b, a << 2, a & b, a.float() / b, a.cumsum(0), a.bincount(minlength=20), (a > b).any()

    return f, [torch.arange(1, 13), torch.arange(2, 14).flip(0)]


@program(tolerance=0.02)
def half_precision() -> Any:
    return lambda x, w: F.gelu(F.layer_norm(x @ w, (8,))), [
        _leaf(4, 8, dtype=torch.bfloat16),
        _leaf(8, 8, dtype=torch.bfloat16),
    ]


@torch.library.custom_op("hard_programs::with_fake", mutates_args=())
def with_fake(x: Tensor, factor: float) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * factor)


with_fake.register_fake(lambda x, factor: torch.empty_like(x))
with_fake.register_autograd(
    lambda ctx, grad: (grad * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@torch.library.custom_op("hard_programs::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() + 1)


@torch.library.custom_op("hard_programs::writes", mutates_args=("x",))
def writes(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@program
def custom_operator_with_fake() -> Any:
    return lambda x: with_fake(x.sin(), 2.5).cos() * x, [_leaf(4)]


@program(traced=False)
def custom_operator_without_fake() -> Any:
    return lambda x: without_fake(x.sin()).cos(), [torch.randn(4)]


@program
def custom_operator_that_writes() -> Any:
    def f(x: Tensor, y: Tensor) -> Tensor:
        before = x * 2
        writes(x, y)
        z = y.clone()
        writes(z, y)
        return before + x + z

    return f, [torch.randn(4), torch.randn(4)]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x * 7  # not the derivative, so that nothing else can be taken for it


@program
def autograd_function() -> Any:
    return lambda x: Squares.apply(x.sin()).sum(0), [_leaf(3, 4)]


@program
def checkpointed() -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            def inner(h: Tensor) -> Tensor:
                return self.b(F.gelu(self.a(h)))

            return x + checkpoint(inner, x, use_reentrant=False)

    return Block(), [_leaf(3, 6)]


@program
def checkpointed_dropout() -> Any:
    layer = nn.Linear(6, 6)

    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda h: F.dropout(layer(h).relu(), 0.5), x, use_reentrant=False) * 2

    return f, [_leaf(3, 6)]


@program
def vmapped() -> Any:
    return lambda x, w: torch.vmap(lambda row: (row @ w).softmax(0))(x), [_leaf(4, 3), _leaf(3, 5)]


@program
def gradients_inside() -> Any:
    return lambda x: torch.func.grad(lambda a: (a.sin() * a).sum())(x) + torch.func.jacrev(torch.tanh)(x).sum(0), [
        torch.randn(4)
    ]


@program
def forward_mode() -> Any:
    return lambda x, t: torch.func.jvp(lambda a: a.exp().sin(), (x,), (t,)), [torch.randn(4), torch.randn(4)]


@program
def hooks_on_tensors() -> Any:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 3)
        return y * 2

    return f, [_leaf(4)]


@program
def hooks_on_modules() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,) if gi[0] is not None else None)
    return model, [_leaf(2, 4)]


@program
def jagged_tensors() -> Any:
    def f(a: Tensor, b: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(a, b)
        return (x.sin() * 2 + x).values()

    return f, [_leaf(7, 3), torch.tensor([0, 2, 3, 7])]


class Tagged(Tensor):
    """A subclass that does nothing but keep its type."""


@program
def a_subclass() -> Any:
    return lambda x: (x * 2).sin(), [torch.randn(3).as_subclass(Tagged)]


@program
def two_in_one() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return lambda x, y: x * y + x.sin(), [TwoTensor(torch.randn(3), torch.randn(3)), torch.randn(3)]


@program(tolerance=0.05)
def autocast_regions() -> Any:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ w
        return y.float() + z + (x @ w)

    return f, [_leaf(4, 4), _leaf(4, 4)]


@program
def no_grad_regions() -> Any:
    def f(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            scale = (x * w).abs().max()
            frozen = w * 2
        return x * w / scale, frozen

    return f, [_leaf(4), _leaf(4)]


@program
def thousands_of_nodes() -> Any:
    def f(x: Tensor) -> Tensor:
        for index in range(1500):
            x = (x + index % 3).tanh() if index % 50 == 49 else x * 0.999
        return x

    return f, [_leaf(3, 3)]


@program
def in_place_chain() -> Any:
    def f(x: Tensor) -> Tensor:
        y = torch.zeros(6, 4)
        y[::2] += x
        y[1] = x[0]
        y.index_add_(0, torch.tensor([0, 0, 3]), x)
        y.masked_fill_(y > 1, 1.0)
        return y.clamp_(max=0.7)

    return f, [_leaf(3, 4)]


@program
def scatter_with_repeated_places() -> Any:
    def f(x: Tensor, at: Tensor) -> Any:
        base = torch.zeros(4, 5)
        return base.scatter_add(0, at, x), base.scatter_reduce(0, at, x, "amax"), torch.gather(x, 0, at)

    return f, [_leaf(4, 5), torch.randint(0, 4, (4, 5))]


@program
def sorting_and_top_k() -> Any:
    return lambda x: (x.sort(-1), x.topk(3), x.argmax(), x.median(-1), x.unique()), [torch.randn(4, 6)]


@program
def not_a_number() -> Any:
    x = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1.0])
    return lambda x: (
        x.maximum(x.flip(0)), torch.sign(x), 1 / x, x * 0, torch.where(x == x, x, 1.0), x.nan_to_num(),
        torch.copysign(torch.ones(6), x), x.clamp(-1, 1), x.relu(), torch.softmax(x[:3], 0),
    ), [x]  # fmt: skip


@program
def set_data() -> Any:
    def f(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        x.data.copy_(y)
        return z + x

    return f, [torch.randn(3), torch.randn(3)]


@program
def lists_and_dictionaries() -> Any:
    def f(state: dict[str, Any]) -> Any:
        state["x"].add_(1)
        return {"y": [state["x"] * w for w in state["w"]], "n": state["n"] + 1}

    return f, [{"x": torch.randn(3), "w": [torch.randn(3), _leaf(3)], "n": 4}]


@program
def an_optimiser_step() -> Any:
    model = nn.Linear(4, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)

    def f(x: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return f, [torch.randn(5, 4)]


@program
def a_graph_break_in_the_middle() -> Any:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        y.mul_(2)
        return y.cos() + x

    return f, [_leaf(4)]


@program
def an_error_of_the_users_own() -> Any:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        if y.shape[0] == 4:
            raise KeyError("the user's own")
        return y

    return f, [torch.randn(4)]


@program
def an_index_out_of_range() -> Any:
    return lambda x, at: x[at] * 2, [torch.randn(4), torch.tensor([1, 7])]


@program
def sizes_that_depend_on_data() -> Any:
    return lambda x: x.nonzero().float().sum(0) + x.masked_select(x > 0).sum(), [torch.randn(4, 4)]


@program
def recurrent() -> Any:
    return nn.LSTM(4, 5, num_layers=2, batch_first=True), [torch.randn(2, 3, 4)]


@program
def control_flow_operators() -> Any:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a: a.sin() * 2, lambda a: a.cos(), (x,))

    return f, [torch.randn(4)]


@program
def sparse_results() -> Any:
    embed = nn.Embedding(7, 3, sparse=True)
    return lambda t: embed(t).sum(1), [torch.tensor([[1, 2], [2, 3]])]


@program
def changing_shapes() -> Any:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.length = 2

        def forward(self, x: Tensor) -> Tensor:
            self.length += 1
            return self.linear(x[: self.length]).relu().sum(0)

    return Grows(), [torch.randn(9, 4)]


warnings.filterwarnings("ignore", message=".*prototype stage.*")
