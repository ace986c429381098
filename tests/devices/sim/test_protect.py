"""With OMNICOMP_SIM_PROTECT=1, in processes of their own: what touches the memory out of turn dies."""

import ast
import signal
from typing import Any

import pytest
from simulated import run_with

TRAIN = """
import torch, omnicomp.devices.sim
from torch import nn
sim = omnicomp.devices.sim.enable(inductor=False)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(64, 16), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 3),
).to("sim")
lstm, attention = nn.LSTM(4, 4).to("sim"), nn.MultiheadAttention(16, 2).to("sim")
optimizer = torch.optim.AdamW([*net.parameters(), *lstm.parameters(), *attention.parameters()])
x = torch.randn(6, 1, 8, 8, device="sim")
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), torch.arange(6, device="sim") % 3)
    loss = loss + lstm(x.view(6, 16, 4))[0].std() + attention(*[x.view(6, 4, 16)] * 3)[0].softmax(-1).var()
    loss.backward()
    optimizer.step()
out = torch.empty(0, device="sim")
torch.sort(x.flatten().resize_(600)[::3], out=(out, torch.empty(0, dtype=torch.long, device="sim")))
print(float(loss), torch.fft.fft(x).conj().imag.cpu().shape, sim.counters()["launches"])
"""


# Each access in a child of its own; what it says goes to a file, as a pipe could not be read after a crash in order.
ACCESSES = """
import ctypes, os, sys, torch, omnicomp.devices.sim
sim = omnicomp.devices.sim.enable(inductor=False)
x = torch.ones(64, device="sim")
accesses = {
    "read": lambda: ctypes.string_at(x.data_ptr(), 4),
    "write": lambda: ctypes.memset(x.data_ptr(), 0, 4),
    "launch": lambda: os.write(2, str((sim.launch(ctypes.memset, x, 0, 256, raw=True), x.sum().item())[1]).encode()),
    "elsewhere": lambda: ctypes.string_at(8, 1),
}
results = {"protected": sim.get_device_properties().protected}
for name, access in accesses.items():
    said = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    child = os.fork()
    if child == 0:
        os.dup2(said, 2)
        access()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results[name] = status, os.pread(said, 1000, 0).decode()
print(results)
"""


@pytest.fixture(scope="module", params=["1", "0"], ids=["protected", "open"])
def seen(request: Any, shared_sim: Any, tmp_path_factory: Any) -> dict[str, Any]:
    said = tmp_path_factory.mktemp("said") / "stderr"
    result = run_with(shared_sim[1], ACCESSES, str(said), OMNICOMP_SIM_PROTECT=request.param)
    assert result.returncode == 0, result.stderr
    return ast.literal_eval(result.stdout)


@pytest.mark.slow
def test_training_runs_with_the_memory_out_of_the_host_s_reach(in_process: Any) -> None:
    result = in_process(TRAIN, OMNICOMP_SIM_PROTECT="1")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("access", ["read", "write"])
def test_the_host_dies_of_touching_it_and_says_why(seen: dict[str, Any], access: str) -> None:
    code, said = seen[access]
    assert code == (-signal.SIGSEGV if seen["protected"] else 0)
    assert ("the host touched the device's memory" in said) == seen["protected"]


def test_within_a_launch_it_may(seen: dict[str, Any]) -> None:
    assert seen["launch"] == (0, "0.0")


def test_another_crash_is_not_taken_for_it(seen: dict[str, Any]) -> None:
    code, said = seen["elsewhere"]
    assert code == -signal.SIGSEGV
    assert "the host touched" not in said
