"""XLA on a CUDA device: values, streams, memory, and no copy through the host."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from concurrency import in_threads
from engine_tables import calls, difference, subgraph_of
from recorded import ran
from torch import Tensor, nn

import omnicomp
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.timeline import Placement, Ran, Retreat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

jax = pytest.importorskip("jax")
pytest.importorskip("expecttest", reason="PyTorch's operator database needs it")
LONG = 200_000_000  # cycles: about a tenth of a second, in which everything else is queued
NAMES = (
    "add", "sub", "mul", "div.no_rounding_mode", "exp", "sqrt", "eq", "lt", "where", "clamp", "maximum", "sum", "mean",
    "prod", "amax", "argmax", "any", "cumsum", "sort", "topk", "cat", "tril", "nn.functional.gelu", "softmax",
    "nn.functional.layer_norm", "log_softmax", "mm", "addmm", "bmm", "index_add", "scatter_add", "gather",
    "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.max_pool2d", "nn.functional.avg_pool2d",
    "nn.functional.relu", "nn.functional.embedding", "nn.functional.group_norm", "nn.functional.cross_entropy",
)  # fmt: skip


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="omni", options={"lowerings": ["xla", "eager"], **options})


def trouble() -> list[str]:
    events = omnicomp.timeline.events()
    found = [str(event.reason) for event in events if isinstance(event, Retreat)]
    return found + [str(node) for event in events if isinstance(event, Placement) for node in event.declined]


def network() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(784, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5)).eval().cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_network_runs_whole(dtype: torch.dtype) -> None:
    model, x = network().to(dtype), torch.randn(8, 3, 32, 32, device="cuda", dtype=dtype)
    call = compiled(model)
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x), **tolerance)
    assert ran() == {"xla"}
    assert not trouble()


def test_operators_of_the_table_compute_what_eager_computes() -> None:
    engine = resolve_engine("xla")
    wanted = {entry.target for entry in engine.operators} | set(engine.decompositions)
    compared: set[Any] = set()
    wrong: list[str] = []
    for name in NAMES:
        for call in calls(name, wanted, torch.float32, samples=2, device="cuda"):
            if call.target in compared:
                continue
            sentence = difference(engine, call)
            if sentence is not None:
                compared.add(call.target)
            if sentence:
                wrong.append(f"{call.target}: {sentence}")
    assert not wrong, "\n".join(wrong)
    assert len(compared) > 60


def test_a_training_step_has_eagers_gradients() -> None:
    torch.manual_seed(1)
    model = network()
    x = torch.randn(8, 3, 32, 32, device="cuda", requires_grad=True)
    target = torch.randint(0, 5, (8,), device="cuda")
    owner = model

    def step(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        loss = F.cross_entropy(model(x), target)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *owner.parameters()])]

    for actual, expected in zip(step(compiled(model)), step(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)
    assert "xla" in ran()
    assert not [each for each in trouble() if "xla can't" in each]


def test_products_are_as_exact_as_torch_is_set_to() -> None:
    x, y = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = x.double() @ y.double()
    assert torch.get_float32_matmul_precision() == "highest"
    error = (compiled(lambda x, y: torch.relu(x @ y))(x, y) - exact.relu()).abs().max()
    assert error < 1e-3  # TF32 is about 3e-2 off


def test_nothing_is_copied_and_nothing_passes_through_the_host() -> None:
    from omnicomp.lowerings.engines.xla.engine import imported

    x = torch.randn(1024, device="cuda")
    assert imported(x).unsafe_buffer_pointer() == x.data_ptr()
    call = compiled(lambda x, y: (torch.tanh(x) * 2, (y + 1).bool(), x.bfloat16()))
    y = torch.arange(1024, device="cuda")
    for _ in range(2):
        call(x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # raises at what waits for the device, as a copy to the host does
    try:
        with jax.transfer_guard("disallow"):
            results = call(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [value.device.type for value in results] == ["cuda"] * 3
    torch.testing.assert_close(results, (torch.tanh(x) * 2, (y + 1).bool(), x.bfloat16()))
    assert ran() == {"xla"}


def test_it_waits_for_the_stream_of_the_inputs_and_is_waited_for() -> None:
    call = compiled(lambda x: torch.tanh(x) * 2 + 1)
    x = torch.zeros(1 << 20, device="cuda")
    call(x)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            x.fill_(3)  # the program has to see it
            result = call(x) + 1  # and this has to see the program's result
            x.zero_()  # which the program may not see
        torch.cuda.synchronize()
        torch.testing.assert_close(result, torch.full_like(x, 3).tanh() * 2 + 2)


def test_memory_that_is_still_read_is_not_given_back() -> None:
    call = compiled(lambda x: x * 2 + 1)
    first, second = torch.ones(1 << 20, device="cuda"), torch.full((1 << 20,), 5.0, device="cuda")
    call(first)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    result = call(first)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        copied = result.clone()
        del result  # its reader is still in the queue
    for _ in range(8):
        call(second)
    torch.cuda.synchronize()
    assert torch.equal(copied, torch.full_like(copied, 3))


def test_what_was_let_go_of_is_used_again() -> None:
    call = compiled(lambda x: torch.tanh(x) * 2)
    x = torch.randn(1 << 24, device="cuda")
    call(x)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(50):
        call(x)
        torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] < 8 * x.numel() * 4


def test_a_result_is_the_callers() -> None:
    call = compiled(lambda x: torch.tanh(x) * 2)
    x = torch.randn(1 << 16, device="cuda")
    first = call(x)
    kept = first.clone()
    for _ in range(5):
        call(torch.randn(1 << 16, device="cuda")).zero_()
    assert torch.equal(first, kept)
    assert torch.equal(first.view(256, 256).t().contiguous().t().reshape(-1), kept)


def test_threads_on_streams_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).cuda()
    call = compiled(model)
    with torch.no_grad():
        call(torch.randn(128, 64, device="cuda"))
    torch.cuda.synchronize()

    def work(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(30):
                x = torch.randn(128, 64, device="cuda")
                torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)

    in_threads(work)


def test_a_weight_that_changes_in_place_is_never_stale() -> None:
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    call = compiled(model)
    with torch.no_grad():
        for factor in (1, 3, -2, 0.5, 2):
            model.weight.mul_(factor)
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-4)


def test_the_cpu_and_a_device_in_one_process() -> None:
    call = compiled(lambda x: torch.tanh(x) * 2)
    for device in ("cuda", "cpu", "cuda"):
        x = torch.randn(100, device=device)
        torch.testing.assert_close(call(x), torch.tanh(x) * 2)
    assert ran() == {"xla"}


def test_a_number_on_the_cpu_is_left_to_others() -> None:
    x, factor = torch.randn(100, device="cuda"), torch.tensor(2.5)
    torch.testing.assert_close(compiled(lambda x, f: torch.tanh(x) * f)(x, factor), torch.tanh(x) * factor)


def test_a_program_comes_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnicomp.lowerings.engines.store import store

    x = torch.randn(64, 64, device="cuda")
    expected = compiled(lambda x: torch.softmax(x @ x, -1))(x)
    torch.compiler.reset()
    omnicomp.timeline.clear()
    store.clear()
    monkeypatch.setattr(type(resolve_engine("xla")), "compile", lambda self, subgraph: pytest.fail("compiled again"))
    assert torch.equal(compiled(lambda x: torch.softmax(x @ x, -1))(x), expected)
    (event,) = (event for event in omnicomp.timeline.events() if isinstance(event, Ran))
    assert "from disk" in event.evidence


def test_jax_leaves_the_devices_memory_to_torch() -> None:
    compiled(lambda x: x * 2 + 1)(torch.randn(100, device="cuda"))
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    stats = jax.local_devices(backend="cuda")[0].memory_stats()
    assert stats is None or stats.get("bytes_reserved", 0) < 2**32
    free, total = torch.cuda.mem_get_info()
    assert free > total // 2


def test_recording_a_cuda_graph_is_refused() -> None:
    engine = resolve_engine("xla")
    x = torch.randn(16, device="cuda")
    (call,) = list(calls("tanh", {torch.ops.aten.tanh.default}, torch.float32, samples=1, device="cuda"))[:1]
    subgraph, inputs, _ = subgraph_of(call, engine)
    run = engine.compile(subgraph).session()
    run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        with pytest.raises(EngineError, match="CUDA graph"):
            run(inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
