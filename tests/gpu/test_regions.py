"""Repeated regions on a CUDA device: their values are those of the whole build, and a warm start builds nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import omnicomp
from omnicomp.timeline import Cache, CudaGraph, events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, HEADS, LAYERS = 128, 4, 6


class Layer(nn.Module):
    """Attention that is written by hand, with a bias that all layers share, and a feed-forward block."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.norm, self.spelling = nn.LayerNorm(WIDTH), spelling
        self.inner, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.inner(self.norm(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        if self.spelling == "bias":
            scores = scores + bias.permute(2, 0, 1)
        elif self.spelling == "softcap":
            scores = 20 * torch.tanh(scores / 20)
        if self.spelling != "bias":
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spelling) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def inputs(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(length)
    return tuple(
        torch.randn(*size, device="cuda", dtype=dtype) for size in ((2, length, WIDTH), (length, length, HEADS))
    )


def compiled(model: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Any:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    return torch.compile(model, backend="omni", options=options, dynamic=dynamic)


def parts() -> set[str]:
    return {row.part for row in omnicomp.audit().subgraphs if row.repeats}


@pytest.mark.parametrize("spelling", ["causal", "bias", "softcap"])
@pytest.mark.parametrize("cudagraphs", ["auto", "always", "never"])
def test_inference(spelling: str, cudagraphs: str) -> None:
    torch.manual_seed(0)
    model = Model(spelling).cuda().eval()
    with torch.no_grad(), fresh_cache():
        run = compiled(model, cudagraphs=cudagraphs)
        for index in range(30):
            x, bias = inputs(128, torch.float32)
            x = x * (1 + index / 30)
            torch.testing.assert_close(run(x, bias), model(x, bias), rtol=2e-3, atol=2e-3)
    assert parts() == {"inference"}
    assert cudagraphs != "always" or any(isinstance(event, CudaGraph) for event in events())


@pytest.mark.parametrize("spelling", ["causal", "bias"])
def test_training(spelling: str) -> None:
    torch.manual_seed(0)
    model = Model(spelling).cuda()
    with fresh_cache():
        run = compiled(model)
        for index in range(25):
            x, bias = inputs(128, torch.float32)
            x = (x * (1 + index / 30)).requires_grad_()
            found: list[list[torch.Tensor]] = []
            for call in (run, model):
                model.zero_grad(set_to_none=True)
                y = call(x, bias)
                gradients = torch.autograd.grad((y.cos() * x).sum(), [x, *model.parameters()])
                found.append([y.detach(), *gradients])
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=5e-3, atol=5e-3)
    assert parts() == {"forward", "backward"}


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    model = Model("causal").cuda().eval()
    with torch.no_grad(), fresh_cache():
        run = compiled(model, dynamic=True)
        for length in (64, 96, 160, 64, 33):
            x, bias = inputs(length, torch.float32)
            torch.testing.assert_close(run(x, bias), model(x, bias), rtol=2e-3, atol=2e-3)
    assert parts() == {"inference"}


@pytest.mark.parametrize("spelling", ["causal", "bias"])
def test_a_warm_start_takes_all_from_the_cache(spelling: str) -> None:
    torch.manual_seed(0)
    model = Model(spelling).cuda().eval().bfloat16()
    x, bias = inputs(128, torch.bfloat16)
    with torch.no_grad(), fresh_cache():
        for number in range(2):
            result = compiled(model)(x, bias)
            assert parts() == {"inference"}
            if number:
                found = {event.cache: event.verdict for event in events() if isinstance(event, Cache)}
                assert found == {"decisions": "hit", "aot_autograd": "hit"}
        exact = Model(spelling).cuda().double().eval()
        exact.load_state_dict(model.state_dict())
        expected = exact(x.double(), bias.double())
        assert (result - expected).norm() <= 2 * (model(x, bias) - expected).norm()
