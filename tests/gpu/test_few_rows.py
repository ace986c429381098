"""On a CUDA device: layers of few rows and attention of few queries take their kernels, and are as near as eager."""

import re

import pytest
import torch
import torch.nn.functional as F
from recorded import events
from torch._inductor.utils import run_and_get_code

from omnicomp.devices import resolve_device
from omnicomp.devices.limits import limits
from omnicomp.passes.attention.few_queries import FEW_QUERIES
from omnicomp.passes.few_rows import CUBLAS, KERNEL, LINEARS, Bench, Problem, _reference
from omnicomp.passes.kernels import measured
from omnicomp.timeline import Rewrite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not measured(resolve_device("cuda")), reason="needs the GPU of the kernels"
    ),
]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def near(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the error is not above eager's, but for one rounding of the largest value."""
    errors = [(each.double() - exact).abs().max() for each in (found, eager)]
    return bool(errors[0] <= errors[1] + exact.abs().max() * torch.finfo(found.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("features", [256, 2560, 8192])
@pytest.mark.parametrize("sizes", [(100,), (2048, 512, 512)])
def test_layers_are_as_near_as_eagers(dtype: torch.dtype, rows: int, features: int, sizes: tuple[int, ...]) -> None:
    x, weights = random(rows, features, dtype=dtype), [random(size, features, dtype=dtype) for size in sizes]
    for biases in ([], [random(size, dtype=dtype) for size in sizes]):
        for at, found in enumerate(LINEARS(x, weights, biases)):
            given = (weights[at], *biases[at : at + 1])
            exact = F.linear(x.double(), *(each.double() for each in given))
            assert near(found, F.linear(x, *given), exact)


@pytest.mark.parametrize("heads", [(32, 8), (4, 4)])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize(("keys", "last"), [(1024, 1), (1024, 100), (1000, 1000), (8192, 5000)])
def test_attention_is_as_near_as_eagers(heads: tuple[int, int], queries: int, keys: int, last: int) -> None:
    query, key, value = (
        random(2, n, size, 64) for n, size in zip((*heads, heads[1]), (queries, keys, keys), strict=True)
    )
    mask = (torch.arange(keys, device="cuda") < last)[None, None, None].repeat(2, 1, 1, 1)
    mask[0, ..., : last // 2] = False
    number = torch.tensor(last, device="cuda")
    given = {"scale": 0.125, "enable_gqa": True}
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), attn_mask=mask, **given)
    eager = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)
    key[:, :, last:] = value[:, :, last:] = torch.nan
    added = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    for each in (mask, added):
        assert near(FEW_QUERIES(query, key, value, each, number, 0.125), eager, exact)
    assert not FEW_QUERIES(query, key.nan_to_num(), value.nan_to_num(), torch.zeros_like(mask), number, 0.125).any()


@pytest.mark.parametrize("features", [256, 2048, 2560])
@pytest.mark.parametrize("gate", ["", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("normed", [False, True])
def test_what_is_around_a_row_is_as_near_as_eager(features: int, gate: str, normed: bool) -> None:
    x, gain, weights = random(1, features) * 3, random(features), [random(96, features) / 16 for _ in range(2)]
    given = (weights if gate else weights[:1], [], gain if normed else None, 1.0, 1e-6, random(1, 96), gate)
    (found,) = LINEARS(x, *given)
    wide, rounded = (
        torch.utils._pytree.tree_map_only(torch.Tensor, convert, (x, *given))
        for convert in (torch.Tensor.double, lambda t: t)
    )
    assert near(found, _reference(*rounded)[0], _reference(*wide)[0])


class Step(torch.nn.Module):
    """An MLP behind an RMSNorm, with its residual."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (torch.nn.Linear(width, 1024, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(1024, width, bias=False)
        self.to("cuda", torch.bfloat16).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Halves(Step):
    """The same with one layer for both factors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(self.norm(x), self.both).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def __init__(self, width: int = 512) -> None:
        super().__init__(width)
        self.both = torch.nn.Parameter(torch.cat([self.gate.weight, self.up.weight]).detach())


@torch.no_grad()
@pytest.mark.parametrize(("kind", "layers"), [(Step, "2 layers"), (Halves, "1 layer")])
def test_a_norm_a_gate_and_a_sum_are_two_kernels_with_the_layers(kind: type[Step], layers: str) -> None:
    step, x = kind(), random(1, 1, 512)
    found = torch.compile(step, backend="omni")(x)
    exact = kind().double()
    exact.load_state_dict(step.state_dict())
    assert near(found, step(x), exact.double()(x.double()))
    details = [event.detail for event in events(Rewrite) if event.name == "few_rows"]
    assert details == [f"1 row, {layers}, norm, gate", "1 row, 1 layer, sum"]


class Block(torch.nn.Module):
    """A step of a decoder against a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(512, n, bias=False) for n in (512, 128, 128))
        self.gate, self.up = (torch.nn.Linear(512, 1024, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(1024, 512, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, 2, 1024, 64))
        self.to("cuda", torch.bfloat16).eval()

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(x.shape[0], 1, -1, 64).transpose(1, 2) for layer in (self.q, self.k, self.v))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mask = torch.arange(1024, device="cuda")[None, None, None] <= at
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_step_takes_the_kernels_and_waits_for_nothing(mode: str | None) -> None:
    block, x = Block(), random(1, 1, 512)
    step = torch.compile(block, backend="omni", mode=mode)
    places = [torch.tensor([n], device="cuda") for n in (0, 1, 2, 3, 700, 1023)]
    with torch.no_grad():
        eager = [block(x, at) for at in places]
        block.keys.zero_(), block.values.zero_()
        for count, (at, expected) in enumerate(zip(places, eager, strict=True)):
            if count > 2:
                torch.cuda.set_sync_debug_mode("error")
            try:
                found = step(x, at)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    made = [event.target for event in events(Rewrite)]
    assert made.count("omnicomp::linears_of_few_rows") == 5  # q, k, v; gate and up; down
    assert made.count("omnicomp::attention_of_few_queries") == 1


def test_what_is_small_in_a_step_is_combined() -> None:
    block, x, at = Block(), random(1, 1, 512), torch.tensor([5], device="cuda")
    for name in "abc":  # as the positions of caches
        block.register_buffer(name, torch.zeros((), dtype=torch.int64, device="cuda"))

    def step(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for counter in (block.a, block.b, block.c):
            at = at + counter
            x = block(x, at)
            counter.add_(1)
        return x

    with torch.no_grad():
        eager = step(x, at)
        for each in block.buffers():
            each.zero_()
        found, code = run_and_get_code(torch.compile(step, backend="omni"), x, at)
    torch.testing.assert_close(found, eager, atol=0.05, rtol=0.05)
    assert [int(each) for each in (block.a, block.b, block.c)] == [1, 1, 1]
    launches = re.findall(r"triton_(\w+?)_\d+\.run\(", "".join(code))
    # All counters are written by one launch.
    assert "for_fused" in launches, launches
    assert not any(name.startswith("poi_fused_add_copy") for name in launches), launches


def test_limits_are_measured_once() -> None:
    found = limits("cuda")
    assert found.bytes > 1e11
    assert found.flops > 1e13
    assert limits("cuda") == found


@pytest.mark.parametrize(("rows", "sizes"), [(1, (2048, 512, 512)), (8, (2048,))])
def test_both_ways_are_timed_on_weights_that_no_cache_holds(rows: int, sizes: tuple[int, ...]) -> None:
    problem = Problem(dtype=torch.bfloat16, rows=rows, features=2048, sizes=sizes, bias=True)
    with Bench(problem, torch.device("cuda", torch.cuda.current_device())) as bench:
        times = {name: bench.layers(name) for name in (KERNEL, CUBLAS)}
    fastest = 2 * 2048 * sum(sizes) / 8e9  # milliseconds at 8 TB/s
    assert all(fastest < ms < 1 for ms in times.values()), times


@torch.no_grad()
def test_the_report_has_what_was_measured() -> None:
    torch.compile(Block(), backend="omni")(random(1, 1, 512), torch.tensor([5], device="cuda"))
    timed = [rewrite.timed for rewrite in events(Rewrite) if rewrite.name == "few_rows"]
    assert timed
    assert all(set(times) == {KERNEL, CUBLAS} for times in timed)
