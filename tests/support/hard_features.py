"""Programs that are hard to compile for a feature of torch that they use."""

from typing import Any

import torch
import torch.nn.functional as F
from outcomes import leaf, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
    return lambda x: with_fake(x.sin(), 2.5).cos() * x, [leaf(4)]


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
    return lambda x: Squares.apply(x.sin()).sum(0), [leaf(3, 4)]


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

    return Block(), [leaf(3, 6)]


@program(draws=True)
def checkpointed_dropout() -> Any:
    layer = nn.Linear(6, 6)

    def f(x: Tensor) -> Tensor:
        return checkpoint(lambda h: F.dropout(layer(h).relu(), 0.5), x, use_reentrant=False) * 2

    return f, [leaf(3, 6)]


@program
def vmapped() -> Any:
    return lambda x, w: torch.vmap(lambda row: (row @ w).softmax(0))(x), [leaf(4, 3), leaf(3, 5)]


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

    return f, [leaf(4)]


@program
def hooks_on_modules() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,) if gi[0] is not None else None)
    return model, [leaf(2, 4)]


@program
def jagged_tensors() -> Any:
    def f(a: Tensor, b: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(a, b)
        return (x.sin() * 2 + x).values()

    return f, [leaf(7, 3), torch.tensor([0, 2, 3, 7])]


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

    return f, [leaf(4, 4), leaf(4, 4)]


@program
def no_grad_regions() -> Any:
    def f(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            scale = (x * w).abs().max()
            frozen = w * 2
        return x * w / scale, frozen

    return f, [leaf(4), leaf(4)]


@program
def thousands_of_nodes() -> Any:
    def f(x: Tensor) -> Tensor:
        for index in range(1100):
            x = (x + index % 3).tanh() if index % 50 == 49 else x * 0.999
        return x

    return f, [leaf(3, 3)]


@program
def in_place_chain() -> Any:
    def f(x: Tensor) -> Tensor:
        y = torch.zeros(6, 4)
        y[::2] += x
        y[1] = x[0]
        y.index_add_(0, torch.tensor([0, 0, 3]), x)
        y.masked_fill_(y > 1, 1.0)
        return y.clamp_(max=0.7)

    return f, [leaf(3, 4)]


@program
def scatter_with_repeated_places() -> Any:
    def f(x: Tensor, at: Tensor) -> Any:
        base = torch.zeros(4, 5)
        return base.scatter_add(0, at, x), base.scatter_reduce(0, at, x, "amax"), torch.gather(x, 0, at)

    return f, [leaf(4, 5), torch.randint(0, 4, (4, 5))]


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

    return f, [{"x": torch.randn(3), "w": [torch.randn(3), leaf(3)], "n": 4}]


@program(keeps=True)
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

    return f, [leaf(4)]


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


@program(keeps=True)
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
