"""The softmax_topk override: against eager, at the edges of floats, as an operator, and what its checker refuses."""

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from omnicomp.lowerings.overrides.softmax_topk import (
    MAX_K,
    MAX_N,
    SOURCE_FILES,
    check,
    cpu,
    reference,
    softmax_topk,
)

INF, NAN = math.inf, math.nan
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 60, 64, 100, 128, 255, 256, 1000, 1024)
KS = (1, 2, 3, 6, 8, 17, 32)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def worst_error(logits: Tensor, values: Tensor, indices: Tensor) -> float:
    """The largest relative error of values against fp64, at the indices that they claim to be of."""
    exact = torch.softmax(logits.double(), dim=-1).gather(-1, indices)
    return ((values.double() - exact) / exact).abs().max().item()


def assert_right(logits: Tensor, k: int) -> None:
    """Equal to eager, with indices that are valid, distinct, and of those values."""
    values, indices = softmax_topk(logits, k)
    expected, _ = reference(logits, k)
    assert values.dtype == torch.float32
    assert indices.dtype == torch.int64
    assert values.shape == indices.shape == (*logits.shape[:-1], k)
    assert values.is_contiguous()
    assert indices.is_contiguous()
    assert values.device == indices.device == logits.device
    torch.testing.assert_close(values, expected, rtol=3e-6, atol=1e-37, equal_nan=True)
    if indices.numel():
        assert indices.min() >= 0
        assert indices.max() < logits.shape[-1]
        assert (indices.sort(-1).values.diff(dim=-1) > 0).all()
    probabilities = torch.softmax(logits, dim=-1)
    torch.testing.assert_close(probabilities.gather(-1, indices), values, rtol=3e-6, atol=1e-37, equal_nan=True)


@on_each_device
@pytest.mark.parametrize("n", SIZES)
def test_equals_eager(n: int, device: str) -> None:
    for k in (k for k in KS if k <= n):
        assert_right(torch.randn(37, n, device=device) * 4, k)


@on_each_device
@pytest.mark.parametrize("n", [2, 8, 60, 64, 256, 1024])
def test_indices_are_those_of_eager(n: int, device: str) -> None:
    # Logits of distinct probabilities: a permutation of steps that are far above rounding.
    steps = torch.arange(n, device=device, dtype=torch.float32) * (8.0 / n)
    logits = torch.stack([steps[torch.randperm(n, device=device)] for _ in range(50)])
    k = min(n, 8)
    assert torch.equal(softmax_topk(logits, k)[1], reference(logits, k)[1])


@on_each_device
@pytest.mark.parametrize(("n", "k", "scale"), [(8, 2, 1.0), (64, 8, 5.0), (256, 8, 20.0), (1024, 32, 5.0)])
def test_error_is_not_above_that_of_eager(n: int, k: int, scale: float, device: str) -> None:
    logits = torch.randn(2000, n, device=device) * scale
    probabilities = softmax_topk(logits, k)
    # A quarter more, and an ulp: the worst of some ten thousand roundings is itself random.
    assert worst_error(logits, *probabilities) <= 1.25 * worst_error(logits, *reference(logits, k)) + 1.2e-7


@on_each_device
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_sorted_rows(order: str, device: str) -> None:
    logits = torch.randn(20, 256, device=device).sort(dim=-1, descending=order == "descending").values
    for k in (1, 8, 32):
        assert_right(logits, k)


@on_each_device
def test_strides(device: str) -> None:
    base = torch.randn(6, 40, 64, device=device)
    for logits in (
        base[:, ::2],  # rows apart
        base.transpose(0, 1),  # leading dimensions that do not collapse
        base.transpose(1, 2),  # last dimension not contiguous
        base[..., ::3],
        base[2:, 1:, 5:],  # an offset, so rows that are not aligned
        base[:1, :1].expand(4, 5, 64),
    ):
        assert_right(logits, 4)


@on_each_device
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 64), (0, 0, 2)])
def test_no_rows(shape: tuple[int, ...], device: str) -> None:
    assert_right(torch.empty(shape, device=device), 2)


@on_each_device
def test_one_dimension(device: str) -> None:
    assert_right(torch.randn(64, device=device), 3)


@on_each_device
def test_many_rows(device: str) -> None:
    for n in (8, 60, 128):
        assert_right(torch.randn(5003, n, device=device), 6)


@on_each_device
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 16, 24, 60, 64, 200])
def test_infinities(n: int, device: str) -> None:
    k = min(n, 4)
    few_finite = torch.full((5, n), -INF, device=device)
    few_finite[torch.arange(5), torch.arange(5) % n] = torch.randn(5, device=device)
    assert_right(few_finite, k)
    values, indices = softmax_topk(few_finite, k)
    assert values[:, 0].eq(1.0).all()
    assert values[:, 1:].eq(0.0).all()
    assert torch.equal(indices[:, 0].cpu(), torch.arange(5) % n)

    masked = torch.randn(50, n, device=device)
    masked[torch.rand_like(masked) < 0.5] = -INF
    masked[:, 0] = 0.0
    assert_right(masked, k)


@on_each_device
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 16, 24, 60, 64, 200])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_undefined_rows(n: int, bad: float, device: str) -> None:
    k = min(n, 4)
    logits = torch.randn(n + 2, n, device=device)
    for position in range(n):
        logits[position, position] = bad
    logits[n] = -INF
    values, indices = softmax_topk(logits, k)
    assert values[: n + 1].isnan().all()
    expected = reference(logits, k)[1] if device == "cpu" else torch.arange(k).expand(len(logits), k)
    assert torch.equal(indices[: n + 1].cpu(), expected[: n + 1])
    assert_right(logits[n + 1 :], k)  # a row beside them is not touched


@on_each_device
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 16, 24, 60, 64, 200])
def test_ties_take_eagers_index_or_the_lowest_one_on_cuda(n: int, device: str) -> None:
    k = min(n, 7)
    logits = torch.randint(0, 3, (60, n), device=device).float()
    logits[0] = 1.0
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    assert_right(logits, k)
    lowest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    expected = reference(logits, k)[1] if device == "cpu" else lowest
    assert torch.equal(softmax_topk(logits, k)[1], expected)


@pytest.mark.parametrize("n", [8, 17, 64, 200])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e4])
def test_indices_are_eagers_where_rounded_probabilities_are_equal(n: int, scale: float) -> None:
    logits = torch.randn(60, n) * scale
    logits[:20] = logits[:20, torch.arange(n) % 3]
    logits[20:40] = (torch.arange(n) % 16 == 3).float() * 5  # all that is chosen is in one lane
    for k in (1, 2, 4, 8):
        assert torch.equal(softmax_topk(logits, k)[1], reference(logits, k)[1])


@on_each_device
def test_wide_range(device: str) -> None:
    logits = torch.tensor(
        [
            [0.0, -50.0, -80.0, -87.5, -95.0, -103.0, -104.5, -1e30],
            [3e38, -3e38, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            [-3e38, -3e38, -1e38, -2e38, -3e38, -3e38, -3e38, -3e38],
            [1e-45, -1e-45, 0.0, 1e-38, -1e-38, 2e-38, 0.0, 0.0],
        ],
        device=device,
    )
    assert_right(logits, 8)


def test_probabilities_below_the_normal_range() -> None:
    logits = torch.tensor([[0.0, -88.0, -90.0, -95.0, -100.0, -102.0, -103.0, -110.0]])
    values, _ = softmax_topk(logits, 8)
    exact = torch.softmax(logits.double(), dim=-1)
    assert values[0, -2] > 0.0  # rounded, not flushed to zero
    torch.testing.assert_close(values.double(), exact, rtol=3e-7, atol=2 * 2.0**-149)


@on_each_device
def test_operator(device: str) -> None:
    for logits in (torch.randn(5, 16, device=device), torch.randn(2, 16, 3, device=device).transpose(1, 2)):
        torch.library.opcheck(torch.ops.omnicomp.softmax_topk.default, (logits, 4))


@on_each_device
def test_has_no_gradient(device: str) -> None:
    values, indices = softmax_topk(torch.randn(4, 8, device=device, requires_grad=True), 2)
    assert not indices.requires_grad
    with pytest.raises(RuntimeError, match=r"backward through omnicomp\.softmax_topk"):
        values.sum().backward()


@pytest.mark.parametrize(
    ("logits", "k", "error", "message"),
    [
        (torch.randn(4, 8, dtype=torch.float64), 2, TypeError, "float32"),
        (torch.randn(4, 8, dtype=torch.bfloat16), 2, TypeError, "float32"),
        (torch.tensor(1.0), 1, ValueError, "at least one dimension"),
        (torch.randn(4, 8), 0, ValueError, "1 to 8 of 8 logits, not 0"),
        (torch.randn(4, 8), 9, ValueError, "1 to 8 of 8 logits, not 9"),
        (torch.randn(4, 64), MAX_K + 1, ValueError, "1 to 32 of 64"),
        (torch.randn(4, MAX_N + 1), 2, ValueError, "1 to 1024 logits, not 1025"),
        (torch.empty(4, 0), 1, ValueError, "1 to 1024 logits, not 0"),
    ],
)
def test_bad_arguments(logits: Tensor, k: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        softmax_topk(logits, k)


def test_ignores_the_default_device() -> None:
    logits = torch.randn(4, 8)
    with torch.device("meta"):
        values, indices = softmax_topk(logits, 2)
    assert values.device == indices.device == logits.device


def test_threads() -> None:
    batches = [torch.randn(100 + 50 * i, (8, 60, 64, 256)[i % 4]) for i in range(32)]
    cpu._build.cache_clear()  # so that the threads meet in the compilation as well
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda logits: softmax_topk(logits, 4), batches))
    for logits, (values, indices) in zip(batches, results, strict=True):
        again = softmax_topk(logits, 4)
        assert torch.equal(values, again[0])
        assert torch.equal(indices, again[1])
        torch.testing.assert_close(values, reference(logits, 4)[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    logits = torch.randn(2001, 64)
    before = torch.get_num_threads()
    expected = softmax_topk(logits, 8)
    try:
        torch.set_num_threads(threads)
        assert cpu._threads(2001, 64, 8) == min(threads, 2001 * (64 + 128) // cpu._UNITS_PER_THREAD)
        got = softmax_topk(logits, 8)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_without_a_compiler_it_runs_aten_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler\nand more lines")

    monkeypatch.setattr(cpu.cpp, "load", refuse)
    cpu._build.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "omnicomp.overrides"):
            for _ in range(3):
                assert_right(torch.randn(3, 5, 16).transpose(0, 1), 4)
    finally:
        cpu._build.cache_clear()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "ATen run instead (RuntimeError: no compiler)" in record.message


def test_source_files_exist() -> None:
    assert {path.name for path in SOURCE_FILES} == {"__init__.py", "cpu.py", "cuda.py"}
    assert all(Path(path).is_file() for path in SOURCE_FILES)


def fake(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("shape", "k", "device"),
    [
        ((4096, 8), 2, "cpu"),
        ((4, 1024, 8), 8, "cpu"),
        ((512, 64), 8, "cpu"),
        ((32, 1024), 32, "cpu"),
        ((65536, 64), 8, "cuda"),
        ((8, 2048, 256), 2, "cuda"),
    ],
)
def test_check_takes(shape: tuple[int, ...], k: int, device: str) -> None:
    assert check(fake(*shape, device=device), k) is None


@pytest.mark.parametrize(
    ("logits", "k", "observed", "needed"),
    [
        (fake(4096, 64, device="meta"), 2, "device=meta", "cpu or cuda"),
        (fake(4096, 64, dtype=torch.bfloat16), 2, "dtype=torch.bfloat16", "torch.float32"),
        (fake(4096, 64, dtype=torch.float64), 2, "dtype=torch.float64", "torch.float32"),
        (fake(64), 2, "1 dimensions", "at least 2"),
        (torch.randn(4096, 64, requires_grad=True), 2, "requires_grad=True", "logits that need no gradient"),
        (fake(65536, 7), 2, "n=7", "a fixed n with 8 <= n <= 1024"),
        (fake(65536, 63, device="cuda"), 1, "n=63", "a fixed n with 64 <= n <= 1024"),
        (fake(65535, 64, device="cuda"), 1, "65535 rows of n=64", "at least 65536 rows"),
        (fake(4096, 1025), 2, "n=1025", "a fixed n with 8 <= n <= 1024"),
        (fake(4096, 64), 0, "k=0", "a fixed k with 1 <= k <= 32"),
        (fake(4096, 64), 33, "k=33", "a fixed k with 1 <= k <= 32"),
        (fake(4096, 16), 17, "k=17", "a fixed k with 1 <= k <= 16"),
        (fake(511, 64), 8, "511 rows of n=64", "at least 512 rows"),
        (fake(0, 64), 8, "0 rows of n=64", "at least 512 rows"),
    ],
)
def test_check_refuses(logits: Tensor, k: int, observed: str, needed: str) -> None:
    reason = check(logits, k)
    assert reason is not None
    assert reason.code == "override_refused"
    assert reason.by == "softmax_topk"
    assert reason.sentence
    assert (reason.observed, reason.needed) == (observed, needed)


def symbolic(shape: tuple[int, ...], dynamic: tuple[bool, ...]) -> tuple[Tensor, ShapeEnv]:
    """A fake tensor with symbolic sizes, and the environment that would take the guards."""
    environment = ShapeEnv()
    sizes = [DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC for is_dynamic in dynamic]
    mode = FakeTensorMode(shape_env=environment)
    return mode.from_tensor(torch.empty(shape), symbolic_context=StatelessSymbolicContext(sizes)), environment


def test_check_puts_no_guard_on_symbolic_sizes() -> None:
    logits, environment = symbolic((64, 64, 64), (True, True, False))
    before = len(environment.guards)
    assert check(logits, 8) is None

    few, few_environment = symbolic((5, 64), (True, False))
    few_before = len(few_environment.guards)
    reason = check(few, 8)
    assert reason is not None
    assert reason.observed == "5 rows of n=64"

    long, long_environment = symbolic((4096, 64), (False, True))
    long_before = len(long_environment.guards)
    reason = check(long, 8)
    assert reason is not None
    assert "symbolic n" in reason.observed
    assert "mark_static" in reason.lever

    k = long.shape[1]
    reason = check(fake(4096, 64), k)  # type: ignore[arg-type]
    assert reason is not None
    assert "symbolic k" in reason.observed
    assert len(environment.guards) == before
    assert len(few_environment.guards) == few_before
    assert len(long_environment.guards) == long_before


@on_each_device
@pytest.mark.inductor
def test_in_a_compiled_graph(device: str) -> None:
    def router(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = softmax_topk(hidden @ weight, 4)
        return values / values.sum(-1, keepdim=True), indices

    weight = torch.randn(16, 64, device=device)
    compiled = torch.compile(router, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 700, 33):
            hidden = torch.randn(rows, 16, device=device)
            got, expected = compiled(hidden, weight), router(hidden, weight)
            torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-6)
            assert (got[1] == expected[1]).float().mean() > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_in_the_current_stream_and_in_graphs() -> None:
    logits = torch.randn(4096, 64, device="cuda")
    expected = softmax_topk(logits, 8)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        doubled = logits * 1.0
        values, indices = softmax_topk(doubled, 8)
    stream.synchronize()
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])

    static = torch.zeros_like(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, indices = softmax_topk(static, 8)
    static.copy_(logits)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_offsets_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    base = torch.empty(2**31 + 4096, device="cuda")
    logits = base.as_strided((3, 64), (2**30, 1))
    logits.copy_(torch.randn(3, 64))
    assert_right(logits, 8)
