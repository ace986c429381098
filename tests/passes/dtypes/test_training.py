"""Training under a policy: gradient scalers, dtypes of gradients, compiled optimizers."""

import copy

import pytest
import torch
from lowered import Block, compiled, rand
from torch import nn

import omnicomp
from omnicomp.timeline import NearMiss, Rewrite

EAGER = {"lowerings": ["eager"]}


def omni(function, policy, **options):
    return torch.compile(function, backend="omni", options={"dtype_policy": policy, **EAGER, **options})


def train(policy, steps=12, scale=None):
    """Train a block; returns it, the losses, and the scales of the gradient scaler."""
    torch.manual_seed(1)
    model, x = Block(), rand(4, 8, 32)
    target = rand(4, 8, 32) * 0.1
    step = omni(lambda: nn.functional.mse_loss(model(x), target), policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=4, enabled=scale is not None)
    losses, scales = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return model, losses, scales


def test_float16_trains_with_a_gradient_scaler():
    _, losses, scales = train("fp16", scale=2.0**10)
    _, exact, _ = train("keep")
    assert losses[-1] < 0.7 * losses[0]
    assert losses[-1] == pytest.approx(exact[-1], rel=0.05)
    assert scales[-1] > scales[0], "no step overflowed, and the scale grew"


def test_a_scaler_sees_the_overflow_of_float16_and_skips_the_step():
    model, losses, scales = train("fp16", steps=3, scale=2.0**40)
    assert scales[0] == 2.0**39, "infinite gradients halve the scale"
    torch.manual_seed(1)
    fresh = Block()
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), "and no step is made with them"
    assert losses[0] == losses[-1]


def test_gradients_arrive_in_the_parameters_dtype():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8))

    def forward(x):
        return model[2](model[1](model[0](x).bfloat16()).float())

    loss = omni(lambda x: forward(x).sum(), "fp16")
    x = rand(4, 8).requires_grad_()
    loss(x).backward()
    assert x.grad.dtype == torch.float32
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.shape == parameter.shape


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    **({"muon": lambda p: torch.optim.Muon(p, lr=0.1)} if hasattr(torch.optim, "Muon") else {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_compiled_optimizer_is_untouched(name, policy):
    start = [nn.Parameter(rand(8, 16)) for _ in range(2)]

    def steps(policy):
        torch.compiler.reset()
        parameters = copy.deepcopy(start)
        optimizer = OPTIMIZERS[name](parameters)
        step = omni(optimizer.step, policy)
        for index in range(3):
            torch.manual_seed(index)
            for parameter in parameters:
                parameter.grad = rand(*parameter.shape)
            step()
        return parameters

    for got, want in zip(steps(policy), steps("keep"), strict=True):
        assert torch.equal(got, want)


class Whitening(torch.optim.Optimizer):
    """An optimizer of the user's with matrix products in float32."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad @ (p.grad.mT @ p.grad))


def test_matrix_work_of_an_optimizer_stays_in_float32_and_is_told():
    parameter = nn.Parameter(rand(8, 8))
    parameter.grad = rand(8, 8)
    expected = parameter.detach() - parameter.grad @ (parameter.grad.mT @ parameter.grad)
    omni(Whitening([parameter]).step, "bf16")()
    torch.testing.assert_close(parameter.detach(), expected)
    events = omnicomp.timeline.events()
    assert not [event for event in events if isinstance(event, Rewrite)]
    assert {e.reason.code for e in events if isinstance(e, NearMiss)} == {"not_equal"}


def test_a_cast_of_the_users_ends_at_what_was_computed():
    linear = nn.Linear(8, 8)

    def function(x):
        h = linear(x)
        return h.bfloat16().relu(), h

    fn, backend = compiled(function)
    with torch.no_grad():
        low, wide = fn(rand(4, 8))
    assert torch.equal(low, wide.bfloat16().relu())
    assert not [n for n in backend.graphs[0].graph.nodes if n.target == "bfloat16"]


def test_casts_that_the_user_may_write_to_stay_apart():
    linear = nn.Linear(8, 8)

    def function(x):
        h = linear(x)
        a, b, c = h.bfloat16(), h.bfloat16(), h.bfloat16()
        c.add_(1)
        return a, b, c

    fn, _ = compiled(function)
    with torch.no_grad():
        a, b, c = fn(rand(4, 8))
    assert len({t.data_ptr() for t in (a, b, c)}) == 3
    assert torch.equal(a, b)
    assert torch.equal(c, a + 1)
