import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated import alike
from torch import nn
from torch.utils.checkpoint import checkpoint


def test_a_training_step_of_an_mlp_stays_on_the_device(sim: Any) -> None:
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)]
    host = nn.Sequential(*layers)
    device = copy.deepcopy(host).to("sim")
    x, target = torch.randn(5, 8), torch.randint(0, 4, (5,))
    there, target_there = x.to("sim"), target.to("sim")
    sim.reset_counters()

    def step(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), target) + F.mse_loss(model(x).softmax(-1), x[:, :4])).backward()
            optimizer.step()

    step(device, there, target_there)
    found = sim.counters()
    assert sim.fallbacks() == {}
    assert found["h2d_copies"] == found["d2h_copies"] == 0
    assert found["kernels"] == sum(found["natives"].values()) > 100
    step(host, x, target)
    for expected, trained in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(trained.cpu(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(sim: Any, approximate: str) -> None:
    alike(lambda x: F.gelu(x, approximate=approximate), torch.randn(4, 6) * 3, grad=True)
    alike(lambda x: F.gelu(x, approximate=approximate), torch.randn(4, 6, dtype=torch.bfloat16), grad=True)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("log", [False, True])
def test_softmax(sim: Any, dim: int, log: bool) -> None:
    function = F.log_softmax if log else F.softmax
    x = torch.randn(4, 6) * 10
    x[1, 2] = -torch.inf
    alike(lambda x: function(x, dim), x, grad=not log)
    x[2, 1], x[3] = torch.nan, -torch.inf
    alike(lambda x: function(x, dim), x, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_layer_norm(sim: Any, affine: bool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, 3, 4, 5).to(dtype), *(torch.randn(4, 5).to(dtype) for _ in range(2 * affine))]
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    alike(lambda x, *rest: F.layer_norm(x, (4, 5), *rest), *inputs, grad=True, **tolerance)


def test_relu_lets_nan_through(sim: Any) -> None:
    x = torch.tensor([-1.0, 2.0, torch.nan])
    alike(F.relu, x, equal_nan=True, rtol=0, atol=0)
    assert F.relu(x.to("sim"), inplace=True)[0].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_arithmetic_promotes_as_torch_does(sim: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0], [0.0], [2.0]]).to(dtype)
    alike(lambda x, y: x + y, x, torch.randn(4))
    alike(lambda x: x * 2.5, x)
    alike(lambda x: 1 / (x + 1), x)
    alike(lambda x: torch.add(x, x, alpha=1), x)
    alike(lambda x, y: x * y, x, torch.tensor(3, dtype=torch.int32))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(sim: Any, groups: int, transposed: bool) -> None:
    function = F.conv_transpose2d if transposed else F.conv2d
    x, weight = torch.randn(2, 4, 7, 6), torch.randn(4, 4 // groups, 3, 3)
    bias = torch.randn(4 // groups * groups if not transposed else weight.shape[1] * groups)
    alike(
        lambda *inputs: function(*inputs, stride=2, padding=1, groups=groups), x, weight, bias, grad=True,
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    last = x.to("sim").to(memory_format=torch.channels_last)
    assert F.conv2d(last, torch.randn(3, 4, 3, 3, device="sim")).is_contiguous()
    assert not any("conv" in name for name in sim.fallbacks())


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers(sim: Any, cell: type[nn.RNNBase], bias: bool) -> None:
    host = cell(5, 7, num_layers=2, bidirectional=True, bias=bias)
    device = copy.deepcopy(host).to("sim")
    x = torch.randn(4, 3, 5)
    expected, found = host(x)[0], device(x.to("sim"))[0]
    torch.testing.assert_close(found.cpu(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for mine, theirs in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad, rtol=1e-4, atol=1e-5)


def test_a_backward_on_the_second_device(sim: Any) -> None:
    x = torch.randn(3, device="sim:1", requires_grad=True)
    (x * x.to("sim:0").to("sim:1")).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_a_backward_on_the_host_may_come_before_the_device(in_process: Any) -> None:
    program = (
        "import torch; (torch.ones(2, requires_grad=True) * 2).sum().backward(); import omnicomp.devices.sim;"
        "omnicomp.devices.sim.enable(inductor=False); "
        "x = torch.ones(3, device='sim:1', requires_grad=True); (x * x).sum().backward();"
        "print(x.grad.tolist())"
    )
    result = in_process(program)
    assert result.stdout.strip() == "[2.0, 2.0, 2.0]", result.stderr


def test_batch_norm_keeps_running_statistics(sim: Any) -> None:
    ours, host = nn.BatchNorm1d(3).to("sim"), nn.BatchNorm1d(3)
    for _ in range(2):
        x = torch.randn(4, 3, 5)
        torch.testing.assert_close(ours(x.to("sim")).cpu(), host(x))
        for name, value in host.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name].cpu(), value)
    assert not sim.fallbacks(), "a fallback would lose them: the schema does not say that they are written"


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_the_same_where_a_checkpoint_computes_it_again(sim: Any, reentrant: bool) -> None:
    x = torch.ones(256, device="sim", requires_grad=True)
    y = checkpoint(F.dropout, x, use_reentrant=reentrant)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
