"""The loss without logits: the operator against float64, the spellings it is found in, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import fast
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.overrides import linear_cross_entropy as package
from omnicomp.lowerings.overrides.linear_cross_entropy import linear_cross_entropy, memory, reference
from omnicomp.timeline import Reason

EAGER = {"lowerings": ["override", "eager"], "on_error": "raise", "check_passes": True}
CLASSES, FEATURES = 37, 8


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of any size are taken, in chunks of four rows."""
    monkeypatch.setattr(package, "_MIN_BYTES", dict.fromkeys(package._MIN_BYTES, 0))
    monkeypatch.setattr(package, "_MIN_SAVING", 0.0)
    monkeypatch.setattr(package, "rows_of_chunk", lambda rows, device: 4)


def inputs(rows: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    target = torch.randint(0, CLASSES, (rows,))
    target[::3] = -100
    return (
        torch.randn(rows, FEATURES, dtype=dtype),
        torch.randn(CLASSES, FEATURES, dtype=dtype),
        target,
        torch.randn(CLASSES, dtype=dtype),
    )


def derivatives(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    fresh = [tensor.detach().requires_grad_() for tensor in tensors]
    value = loss(*fresh)
    return [value.detach(), *torch.autograd.grad(value * 3, fresh)]


def error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [2, 4, 50])
def test_value_and_gradients_are_as_close_to_float64_as_eager(
    rows: int, with_bias: bool, reduction: str, dtype: torch.dtype
) -> None:
    hidden, weight, target, bias = inputs(rows, dtype)
    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)

    def plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        logits = F.linear(x, w, b)
        return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), target, reduction=reduction)

    def ours(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(x, w, target, b, reduction=reduction)

    exact = derivatives(plain, *(t.double() for t in tensors))
    for own, eager, right in zip(derivatives(ours, *tensors), derivatives(plain, *tensors), exact, strict=True):
        assert own.dtype == eager.dtype
        allowed = 1.3 * error(eager, right) + 4 * torch.finfo(torch.float32).eps
        # Of a few numbers the errors are a matter of luck.
        assert error(own, right) <= (allowed if rows > 10 else torch.finfo(dtype).eps)


@pytest.mark.usefixtures("small")
def test_only_the_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, target, bias = inputs()
    call = torch.ops.omnicomp.linear_cross_entropy.default
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        loss, *grads = call(hidden, weight, bias, target, -100, "mean", *needs)
        assert [grad.numel() > 0 for grad in grads[:3]] == list(needs)
        expected = reference(hidden, weight, bias, target, -100, "mean", *needs)
        for value, right in zip([loss, *grads], expected, strict=True):
            torch.testing.assert_close(value, right)
    frozen = linear_cross_entropy(hidden.requires_grad_(), weight, target)
    (grad,) = torch.autograd.grad(frozen, hidden)
    assert grad.shape == hidden.shape


def test_rows_that_do_not_count_and_infinities() -> None:
    hidden, weight, target, bias = inputs()
    nothing = torch.full_like(target, -100)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, nothing)
    assert loss.isnan()
    assert not torch.autograd.grad(loss, hidden)[0].any()
    assert linear_cross_entropy(hidden.detach()[:0], weight, target[:0], reduction="sum") == 0
    bias = torch.where(torch.arange(CLASSES) == 3, bias, -torch.inf)
    torch.testing.assert_close(linear_cross_entropy(hidden.detach(), weight, nothing + 103, bias), torch.zeros(()))
    broken = hidden.detach().clone()
    broken[1, 0] = torch.nan
    assert linear_cross_entropy(broken, weight, target, reduction="none").isnan().tolist() == [
        i == 1 for i in range(10)
    ]


def test_what_the_operator_can_not_do_is_an_error() -> None:
    hidden, weight, target, _ = inputs()
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, target + CLASSES)
    with pytest.raises(ValueError, match="hidden"):
        linear_cross_entropy(hidden[None], weight, target)
    with pytest.raises(TypeError, match="int64"):
        linear_cross_entropy(hidden, weight, target.int())
    x = hidden.requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        linear_cross_entropy(x, weight, target, reduction="none")
    with pytest.raises(TypeError, match="float16"):
        linear_cross_entropy(x.half(), weight.half(), target)
    call = torch.ops.omnicomp.linear_cross_entropy.default
    loss = call(x, weight, None, target, -100, "mean", False, False, False)[0]
    with pytest.raises(RuntimeError, match="hidden_grad=False"):
        loss.backward()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, target), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


class Head(nn.Module):
    def __init__(self, loss: Callable[..., Any], bias: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self.out, x, y)


def view_float(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES).float(), y.view(-1))


def view_float_of_double(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1))


def shifted(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = out(x).float()
    logits, y = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), y.view(-1))


def padded_labels(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1), ignore_index=-100, reduction="sum") / 7


def log_softmax(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(out(x).flatten(0, 1), dim=-1), y.reshape(-1))


def matmul(out: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ out.weight.t()).reshape(-1, CLASSES), y.flatten())


def matmul_of_the_transposed(out: Any, x: Tensor, y: Tensor) -> Tensor:
    table = out.weight.t().contiguous()
    return F.cross_entropy(torch.matmul(x, table).reshape(-1, CLASSES), y.flatten())


def masked_labels(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits, y = out(x), y.clone()
    y[y == 5] = -100
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1))


def under_autocast(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = out(x)
    return F.cross_entropy(logits.view(-1, CLASSES).float(), y.view(-1))


SPELLINGS = [view_float, shifted, padded_labels, log_softmax, matmul, matmul_of_the_transposed, masked_labels]


def run(function: Any, module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    loss = function(x, y)
    (loss * 2).backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def rewrites() -> list[str]:
    return [rewrite.name for graph in omnicomp.audit().graphs for rewrite in graph.rewrites]


def refusals() -> list[Reason]:
    parts = [part for graph in omnicomp.audit().graphs for part in graph.parts]
    return [reason for part in parts for node in part.declined for reason in node.chain]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dynamic", "bias"), fast([(False, False), (True, True), (False, True), (True, False)], all))
@pytest.mark.parametrize("loss", SPELLINGS)
def test_every_spelling_is_taken_and_equal(loss: Callable[..., Any], dynamic: bool, bias: bool) -> None:
    head = Head(loss, bias)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    compiled = torch.compile(head, backend="omni", options=EAGER, dynamic=dynamic)
    for got, expected in zip(run(compiled, head, x, y), run(head, head, x, y), strict=True):
        torch.testing.assert_close(got, expected)
    assert rewrites() == ["linear_cross_entropy"]
    more = torch.randn(4, 6, FEATURES), torch.randint(0, CLASSES, (4, 6))
    for got, expected in zip(run(compiled, head, *more), run(head, head, *more), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(omnicomp.audit().graphs) == (1 if dynamic else 2)


@pytest.mark.usefixtures("small")
def test_autocast_keeps_the_gradient_of_the_weight_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    item = next(i for i in omnicomp.lowerings.overrides.registered() if i.name == "linear_cross_entropy")
    monkeypatch.setitem(item.__dict__, "check", None)
    head = Head(under_autocast)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    compiled = torch.compile(head, backend="omni", options=EAGER)
    values, eager = run(compiled, head, x, y), run(head, head, x, y)
    double = Head(view_float_of_double).double()
    double.load_state_dict(head.state_dict())
    exact = run(double, double, x.double(), y)
    assert rewrites() == ["linear_cross_entropy"]
    for got, other, right in zip(values, eager, exact, strict=True):
        assert got.dtype == other.dtype == torch.float32
        assert error(got, right) <= 1.1 * error(other, right)


def returns_logits(out: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = out(x)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)), logits


def reads_logits(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = out(x).view(-1, CLASSES)
    return F.cross_entropy(logits, y.view(-1)) + logits.logsumexp(-1).pow(2).mean()


def capped(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(out(x)).view(-1, CLASSES), y.view(-1))


def smoothed(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1), label_smoothing=0.1)


def weighted(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1), torch.arange(float(CLASSES)))


def distribution(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES), F.one_hot(y.view(-1), CLASSES).float())


def changed_before(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    logits = out(h)
    h.zero_()
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)) + h.sum()


def without_grad_first(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = out(x)
    return F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)) + out(x).sum()


def by_row(out: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1), reduction="none").square().sum()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (returns_logits, "returned"),
        (reads_logits, "also read by"),
        (capped, "stands between"),
        (smoothed, "label_smoothing"),
        (weighted, "weight"),
        (distribution, "one class for each row"),
        (without_grad_first, "change of mode"),
        (by_row, "weights of the rows"),
    ],
)
def test_what_it_can_not_take_stays_with_a_reason(loss: Callable[..., Any], words: str) -> None:
    head = Head(loss)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    function = torch.compile(head, backend="omni", options=EAGER)

    def first(call: Any) -> Callable[..., Tensor]:
        return lambda x, y: value[0] if isinstance(value := call(x, y), tuple) else value

    for got, expected in zip(run(first(function), head, x, y), run(first(head), head, x, y), strict=True):
        torch.testing.assert_close(got, expected)
    assert rewrites() == []
    (reason,) = refusals()
    assert words in reason.sentence
    assert reason.by == "linear_cross_entropy"


@pytest.mark.usefixtures("small")
@torch.no_grad()
def test_inputs_that_change_before_the_loss_are_not_read_late() -> None:
    head = Head(changed_before)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    torch.testing.assert_close(torch.compile(head, backend="omni", options=EAGER)(x, y), head(x, y))
    assert rewrites() == []
    assert "changed in place" in refusals()[0].sentence


@pytest.mark.usefixtures("small")
def test_rows_are_not_reduced_in_inference() -> None:
    head = Head(lambda out, x, y: F.cross_entropy(out(x).view(-1, CLASSES), y.view(-1), reduction="none").view(3, 5))
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    with torch.no_grad():
        got = torch.compile(head, backend="omni", options=EAGER)(x, y)
        torch.testing.assert_close(got, head(x, y))
    assert rewrites() == ["linear_cross_entropy"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "options",
    [{"lowerings": ["eager"]}, {"disable_overrides": ["linear_cross_entropy"]}, {"overrides": ["int8_linear"]}],
)
def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    head = Head(view_float)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    torch.compile(head, backend="omni", options={**EAGER, **options})(x, y)
    assert rewrites() == []


@pytest.mark.usefixtures("small")
def test_in_a_checkpointed_region_it_would_run_twice() -> None:
    head = Head(view_float)
    x, y = torch.randn(3, 5, FEATURES, requires_grad=True), torch.randint(0, CLASSES, (3, 5))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(head, x, y, use_reentrant=False)

    torch.compile(function, backend="omni", options=EAGER)(x, y).backward()
    assert rewrites() == []
    assert "region" in refusals()[0].sentence


def test_small_losses_are_refused() -> None:
    head = Head(view_float)
    torch.compile(head, backend="omni", options=EAGER)(torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5)))
    (reason,) = refusals()
    assert (reason.code, reason.needed) == ("override_refused", "at least 128 MiB of logits")


def test_memory_is_that_of_one_chunk_and_the_gradients() -> None:
    size = {"gradient": True, "of_weight": True, "device": "cuda"}
    theirs, ours = memory(8192, 128256, 2048, 2, 2, **size)  # type: ignore[arg-type]
    assert theirs / 2**30 == pytest.approx(2.48, abs=0.01)
    assert theirs / ours > 1.5
    theirs, ours = memory(8192, 128256, 4096, 2, 2, **size)  # type: ignore[arg-type]
    assert theirs / ours < 1.5
    theirs, ours = memory(8192, 128256, 4096, 2, 2, **{**size, "of_weight": False})  # type: ignore[arg-type]
    assert theirs / ours > 3


@pytest.mark.inductor
@pytest.mark.usefixtures("small")
def test_it_stays_inside_of_inductors_graph() -> None:
    head = Head(view_float)
    x, y = torch.randn(3, 5, FEATURES), torch.randint(0, CLASSES, (3, 5))
    compiled = torch.compile(head, backend="omni")
    for got, expected in zip(run(compiled, head, x, y), run(head, head, x, y), strict=True):
        torch.testing.assert_close(got, expected)
    forward = [row.ran for row in omnicomp.audit().subgraphs if "forward" in row.id]
    assert forward == ["inductor", "override"]
