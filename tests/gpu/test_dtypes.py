"""The dtype policy on a GPU: TF32 for the graphs that ask for it, presets, gradient scalers."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import omnicomp
from omnicomp._torch.precision import tf32_settings
from omnicomp.timeline import Capture, Option, Rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 512


def compile_with(function: Any, policy: Any, **options: Any) -> Any:
    mode = options.pop("mode", None)
    if mode is not None:  # torch.compile takes a mode or options, so that the mode is given as Inductor's options
        options |= torch._inductor.list_mode_options(mode)
    return torch.compile(function, backend="omni", options={"dtype_policy": policy, **options})


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w = (torch.randn(SIZE, SIZE, device="cuda") for _ in range(2))
    return x, w, x.double() @ w.double()


MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("lowerings", [["inductor", "eager"], ["eager"]], ids=["inductor", "eager"])
@pytest.mark.parametrize("mode", MODES)
def test_products_are_in_tf32_for_this_graph_alone(mode: str, lowerings: list[str]) -> None:
    x, w, exact = operands()
    before = tf32_settings()
    wide = error(x @ w, exact)
    run = compile_with(lambda x, w: (x @ w).clone(), "tf32", mode=mode, lowerings=lowerings)
    for _ in range(4):  # with CUDA graphs: warm-up, recording, replays
        ours = error(run(x, w), exact)
        assert 5e-5 < ours < 1e-3, "operands of 10 bits"
        assert error(x @ w, exact) == wide, "the program's own products are as they were"
    assert wide < 1e-5
    assert tf32_settings() == before
    captured = [event for event in omnicomp.timeline.events() if isinstance(event, Capture)]
    assert len(captured) == 1, "Dynamo's guards saw no other setting"


@pytest.mark.parametrize("mode", MODES)
def test_the_backward_is_in_tf32_too(mode: str) -> None:
    x, w, _ = operands()
    w.requires_grad_()
    run = compile_with(lambda x, w: (x @ w).square().sum(), "tf32", mode=mode)
    exact = torch.autograd.grad((x.double() @ w.double()).square().sum(), w)[0].double()
    for _ in range(4):
        w.grad = None
        run(x, w).backward()
        assert w.grad is not None
        assert 5e-5 < error(w.grad, exact) < 2e-3
    assert tf32_settings()[0] != "tf32"


def test_convolutions_follow() -> None:
    kept = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        x, w = torch.randn(8, 64, 32, 32, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
        exact = nn.functional.conv2d(x.double(), w.double())
        run = compile_with(lambda x, w: nn.functional.conv2d(x, w), "tf32")
        for _ in range(2):
            assert 5e-5 < error(run(x, w), exact) < 1e-3
            assert error(nn.functional.conv2d(x, w), exact) < 1e-5
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = kept


def test_a_user_who_allows_it_loses_nothing() -> None:
    x, w, exact = operands()
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        run = compile_with(lambda x, w: x @ w, "tf32")
        assert 5e-5 < error(run(x, w), exact) < 1e-3
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept


def test_a_cache_restores_a_graph_in_tf32() -> None:
    x, w, exact = operands()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin()

    for _ in range(2):
        torch.compiler.reset()
        assert 5e-5 < error(compile_with(function, "tf32")(x, w), exact.sin())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).cuda()


@pytest.mark.parametrize("training", [False, True])
def test_auto_takes_bfloat16_where_it_is_fast(training: bool, caplog: pytest.LogCaptureFixture) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("needs a GPU with bfloat16")
    net, x = model(), torch.randn(64, 256, device="cuda")
    with torch.set_grad_enabled(training), caplog.at_level(logging.WARNING, "omnicomp"):
        result = compile_with(net, "auto")(x)
    events = omnicomp.timeline.events()
    assert {e.target for e in events if isinstance(e, Rewrite)} == {"bfloat16"}
    assert not [e for e in events if isinstance(e, Option)]
    assert not caplog.records
    assert error(result, net.double()(x.double())) < 2e-2


@pytest.mark.parametrize("lowerings", [["inductor", "eager"], ["eager"]], ids=["inductor", "eager"])
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("rows", [1, 17, 256])
def test_linear_layers_in_float8(scales: str, rows: int, lowerings: list[str]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    net, x = model(), torch.randn(2, rows, 256, device="cuda")
    run = compile_with(net, {"preset": "fp8", "fp8": scales}, lowerings=lowerings)
    with torch.no_grad():
        result = run(x)
    assert {e.target for e in omnicomp.timeline.events() if isinstance(e, Rewrite)} == {"float8_e4m3fn"}
    assert result.dtype == torch.float32
    assert 5e-3 < error(result, net.double()(x.double())) < 0.1


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_float16_trains_with_a_gradient_scaler(mode: str | None) -> None:
    net, x = model(), torch.randn(64, 256, device="cuda")
    target = torch.randn(64, 256, device="cuda") * 0.1
    step = compile_with(lambda x, y: nn.functional.mse_loss(net(x), y), "fp16", mode=mode)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=8)
    losses: list[float] = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = step(x, target)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < 0.6 * losses[0]
    assert scaler.get_scale() > 2.0**12


def test_a_compiled_optimizer_is_untouched() -> None:
    start = [torch.randn(64, 64, device="cuda") for _ in range(3)]
    gradients = [torch.randn(64, 64, device="cuda") for _ in range(3)]

    def stepped(policy: str) -> list[torch.Tensor]:
        torch.compiler.reset()
        parameters = [nn.Parameter(value.clone()) for value in start]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        step = compile_with(optimizer.step, policy)
        for _ in range(3):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            step()
        return [parameter.detach() for parameter in parameters]

    for got, want in zip(stepped("bf16"), stepped("keep"), strict=True):
        assert torch.equal(got, want)
