"""The dtype policy on a GPU: TF32 for the graphs that ask for it, presets, gradient scalers."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import omnicomp
from omnicomp import weights
from omnicomp._torch.devices.precision import tf32_settings
from omnicomp.timeline import Capture, Option, Retreat, Rewrite

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


def model() -> nn.Sequential:
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


@pytest.mark.parametrize("lowerings", [["inductor", "eager"], ["eager"]], ids=["inductor", "eager"])
def test_weights_in_float8_are_kept_and_follow(lowerings: list[str]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    weights.clear()
    net, x = model(), torch.randn(64, 256, device="cuda")
    run = compile_with(net, "fp8", lowerings=lowerings)
    with torch.no_grad():
        for _ in range(3):
            assert error(run(x), copy.deepcopy(net).double()(x.double())) < 0.1
            run(x)  # to copy a model, its `.data` is read, which may have been a write
            versions = sorted(low._version for _, low in weights.copies())
            run(x)
            assert sorted(low._version for _, low in weights.copies()) == versions, "nothing changed"
            net[0].weight.mul_(torch.linspace(-2, 3, 256, device="cuda"))
            net[3].weight.data.neg_()
    held = sum(low.numel() for _, low in weights.copies() if low.dtype == torch.float8_e4m3fn)
    assert held == 2 * 256 * 512


def test_weights_of_convolutions_are_kept_as_the_kernels_read_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1)).cuda()
    x = torch.randn(4, 16, 16, 16, device="cuda")
    run = compile_with(net, "bf16")
    with torch.no_grad():
        result = run(x)
        assert error(result, copy.deepcopy(net).double()(x.double())) < 2e-2
        assert result.is_contiguous()
        kept = [low for _, low in weights.copies() if low.dim() == 4]
        assert all(low.is_contiguous(memory_format=torch.channels_last) for low in kept)
        assert kept
        run(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(x)
    ours = [event.key for event in profile.key_averages() if event.key.startswith("triton_")]
    assert len(ours) <= 3, "the input's cast, and what follows each convolution"


@pytest.mark.parametrize("training", [False, True])
def test_a_lowered_attention_takes_the_kernel_of_the_low_dtype(training: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU on which cuDNN's kernel is preferred")

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v

    q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", requires_grad=training) for _ in range(3))
    run = compile_with(attention, "bf16", attention_seconds=0.0)  # beside other processes, times tell little
    run(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = run(q, k, v)
        if training:
            result.sum().backward()
    called = {event.key for event in profile.key_averages()}
    assert any("_scaled_dot_product_cudnn_attention" in name for name in called), called
    assert error(result, attention(q.double(), k.double(), v.double())) < 2e-2


def test_weights_and_gradients_are_cast_by_few_kernels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
    x = torch.randn(64, 256, device="cuda")
    run = compile_with(net, "bf16")

    def step() -> list[torch.Tensor]:
        net.zero_grad(set_to_none=True)
        run(x).square().mean().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        got = step()
    launched = [event.key for event in profile.key_averages() if event.key.startswith("triton_for_")]
    assert len(launched) == 2, "one in the forward, one in the backward"
    wide = copy.deepcopy(net).double()
    wide.zero_grad()
    wide(x.double()).square().mean().backward()
    for actual, parameter in zip(got, wide.parameters(), strict=True):
        assert parameter.grad is not None
        assert error(actual, parameter.grad) < 3e-2
        assert actual.dtype == torch.float32
    assert not [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


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
