"""What a device lacks: which dtype takes its place, where values are cast, and what is told or refused."""

import logging

import pytest
import torch
import torch.nn.functional as F
from lacking import Checking, LackedDtypeError, Lacking, legalised
from torch import nn
from torch.utils.checkpoint import checkpoint

import omnicomp
from omnicomp import devices
from omnicomp.devices import resolve_device
from omnicomp.errors import LegaliseError
from omnicomp.passes.legal.dtypes import Legal
from omnicomp.timeline import NearMiss, Rewrite

NO_DOUBLE = Lacking(unstored=(torch.float64,))
NO_LONG = Lacking(unstored=(torch.int64,))
NO_BF16 = Lacking(unstored=(torch.bfloat16,))
STORED_BF16 = Lacking(uncomputed=(torch.bfloat16,))
STORED_HALF = Lacking(uncomputed=(torch.float16,))
STORED_DOUBLE = Lacking(uncomputed=(torch.float64,))
STORED_FLOAT8 = Lacking(uncomputed=(torch.float8_e4m3fn, torch.float8_e5m2))
NO_COMPLEX128 = Lacking(unstored=(torch.complex128,))
NO_COMPLEX = Lacking(unstored=(torch.complex64, torch.complex128))


def legal(*, compute, storage=()):
    return Legal(compute=frozenset(compute), storage=frozenset((*compute, *storage)))


@pytest.mark.parametrize(
    ("dtype", "has", "nearest"),
    [
        (torch.float64, (torch.float32, torch.float16), torch.float32),
        (torch.bfloat16, (torch.float16, torch.float32, torch.float64), torch.float32),
        (torch.float16, (torch.bfloat16, torch.float64), torch.float64),
        (torch.float32, (torch.float16, torch.bfloat16), torch.bfloat16),
        (torch.float16, (torch.bfloat16,), torch.bfloat16),
        (torch.float8_e4m3fn, (torch.float16, torch.bfloat16, torch.float32), torch.float16),
        (torch.float8_e5m2, (torch.float16, torch.float32), torch.float16),
        (torch.float8_e5m2, (torch.bfloat16, torch.float32), torch.bfloat16),
        (torch.int64, (torch.int32, torch.int16, torch.uint8), torch.int32),
        (torch.int16, (torch.int64, torch.int32, torch.int8), torch.int32),
        (torch.uint8, (torch.int8, torch.int16), torch.int16),
        (torch.int64, (torch.uint64, torch.uint32, torch.int32), torch.int32),
        (torch.complex128, (torch.complex64, torch.float64), torch.complex64),
        (torch.complex64, (torch.complex128,), torch.complex128),
        (torch.complex64, (torch.float32,), None),
        (torch.float32, (torch.float32,), torch.float32),
    ],
)
def test_the_nearest_is_wider_if_it_can_be(dtype, has, nearest):
    assert legal(compute=has).nearest(dtype) is nearest


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_devices_of_torch_are_left_alone(name):
    if name == "cuda" and not torch.cuda.is_available():
        assert not devices.Capabilities(compute_dtypes=(), storage_dtypes=()).exhaustive
        return
    assert Legal.of(resolve_device(name).capabilities()) is None


def run(function, device, *args, tolerance=1e-5, training=False, **kwargs):
    """Compiled for the device and checked there, against the program as it is: values, and dtypes if stored."""
    expected = function(*args)
    compiled, backend = legalised(function, device, training=training, **kwargs)
    actual = compiled(*args)
    leaves = torch.utils._pytree.tree_leaves
    for want, got in zip(leaves(expected), leaves(actual), strict=True):
        if not isinstance(want, torch.Tensor):
            assert want == got
            continue
        assert got.shape == want.shape
        if want.dtype not in device.unstored:
            assert got.dtype is want.dtype
        torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance, equal_nan=True)
    return backend


x32 = torch.linspace(-2, 2, 12).reshape(3, 4)

DOUBLE = {
    "method": lambda x: x.double().sin() + 1,
    "to": lambda x: (x.to(torch.float64) * 2).float(),
    "type": lambda x: x.type(torch.float64).exp(),
    "arange": lambda x: x + torch.arange(4, dtype=torch.float64),
    "linspace": lambda x: torch.linspace(0, 1, 4, dtype=torch.float64) * x,
    "full": lambda x: torch.full((4,), 2.5, dtype=torch.float64) - x,
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.float64) + x,
    "new_ones": lambda x: x.new_ones(4, dtype=torch.float64) + x,
    "tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
    "sum": lambda x: x.sum(0, dtype=torch.float64),
    "softmax": lambda x: F.softmax(x, -1, dtype=torch.float64).log(),
    "cumsum": lambda x: x.cumsum(0, dtype=torch.float64),
    "matmul": lambda x: x.double() @ x.double().T,
    "getitem": lambda x: x.double()[1:, x[0] > 0],
    "split": lambda x: [part * 2 for part in x.double().split(2, 1)],
    "max": lambda x: x.double().max(1),
    "where": lambda x: torch.where(x > 0, x.double(), 0.0),
    "type_as": lambda x: x.type_as(torch.ones(1, dtype=torch.float64)) / 3,
    "back_and_forth": lambda x: x.double().float().double().float() + 1,
    "infinite": lambda x: x.double().masked_fill(x > 0, float("-inf")).softmax(-1),
    "cat": lambda x: torch.cat([x.double(), x.double() + 1]),
    "complex": lambda x: torch.fft.fft(x.double()).abs(),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_float64_becomes_float32(name):
    device = Lacking(unstored=(torch.float64, torch.complex128))
    backend = run(DOUBLE[name], device, x32)
    assert backend.modified
    assert {event.target for event in backend.of(Rewrite)} <= {"float32", "complex64"}
    assert not backend.of(NearMiss)


@pytest.mark.parametrize("name", DOUBLE)
def test_float64_that_is_stored_comes_out_as_float64(name):
    run(DOUBLE[name], Lacking(uncomputed=(torch.float64, torch.complex128)), x32)


def test_a_cast_that_is_none_any_more_still_copies():
    def function(x):
        y = x.double()
        y.add_(1)
        return x * 2, y.float()

    run(function, NO_DOUBLE, x32)


def test_views_of_a_retyped_value_are_written_through():
    def function(x):
        y = x.double().clone()
        row = y[1]
        row.mul_(3)
        y[0, 2] = 7.0
        y += 1
        return y.float(), row.sum().float()

    run(function, NO_DOUBLE, x32)
    run(function, STORED_DOUBLE, x32)


INDICES = {
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2),
    "sort": lambda x: torch.sort(x, dim=-1).indices + 1,
    "gather": lambda x: x.gather(1, x.argsort(-1)),
    "index": lambda x: x[x.argmax(0)],
    "embedding": lambda x: F.embedding(x.argmax(0), x),
    "arange": lambda x: x * torch.arange(4),
    "count": lambda x: (x > 0).sum() + (x > 1).long().cumsum(0),
    "full": lambda x: torch.full((4,), 3) + x.long(),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(-1)),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 4) * 2,
    "scatter": lambda x: x.scatter(1, x.argmax(1, keepdim=True), 9.0),
    "take": lambda x: x.take(torch.tensor([0, 5, 7])),
    "tril": lambda x: torch.tril_indices(3, 3) + 1,
    "mask": lambda x: torch.arange(3)[:, None] >= torch.arange(4),
    "floordiv": lambda x: x * (torch.arange(4) // 2 % 2),
}


@pytest.mark.parametrize("name", INDICES)
def test_int64_becomes_int32_and_sizes_prove_it(name):
    unproven = name == "full"  # it casts floats to integers
    backend = run(INDICES[name], NO_LONG, x32, policy="warn" if unproven else "error")
    assert backend.modified


def test_int64_inputs_are_checked_in_each_call():
    compiled, backend = legalised(lambda ids, table: F.embedding(ids % 3, table), NO_LONG)
    assert compiled(torch.tensor([0, 4, 8]), x32).equal(x32[[0, 1, 2]])
    with pytest.raises(RuntimeError, match=r"an integer of l_ids_ .* does not fit int32"):
        compiled(torch.tensor([0, 4, 2**31 + 2]), x32)
    assert backend.modified


def test_a_product_that_may_overflow_is_checked_in_each_call():
    compiled, _ = legalised(lambda ids: (ids * ids, ids + 1), NO_LONG)
    assert compiled(torch.tensor([46000]))[0].equal(torch.tensor([46000**2], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"an integer of mul .*test_legalise.py:\d+ does not fit int32"):
        compiled(torch.tensor([47000]))


def test_unproved_integers_are_an_error_by_policy():
    compiled, _ = legalised(lambda ids, x: x[ids], NO_LONG, policy="error")
    with pytest.raises(Exception, match=r"l_ids_ .* needs int64, which the cpu device lacks.*could lose range"):
        compiled(torch.tensor([1]), x32)


def test_a_number_that_does_not_fit_is_an_error():
    compiled, _ = legalised(lambda x: x.long() + 2**40, NO_LONG)
    with pytest.raises(Exception, match=rf"add .*needs int64.*the number {2**40} does not fit"):
        compiled(x32)


def test_a_dynamic_size_is_guarded_on():
    function = lambda x: x * torch.arange(x.shape[0])[:, None]  # noqa: E731
    backend = run(function, NO_LONG, x32, dynamic=True, policy="error")
    assert backend.modified


def test_a_float_beyond_float32_becomes_infinite_with_a_warning(caplog):
    def function(x):
        return (x.double() * 1e300).float(), (x.double() + torch.tensor([1e39], dtype=torch.float64)).float()

    backend = run(function, NO_DOUBLE, x32.abs() + 1)
    assert backend.modified
    with pytest.raises(Exception, match=r"needs float64.*could lose range"):
        legalised(function, NO_DOUBLE, policy="error")[0](x32)


def test_bits_can_not_be_retyped():
    compiled, _ = legalised(lambda x: x.double().view(torch.int64), NO_DOUBLE)
    with pytest.raises(Exception, match=r"view .*needs float64.*its bits are read"):
        compiled(x32)


def test_complex_without_support_is_an_error():
    compiled, _ = legalised(lambda x: torch.fft.fft(x).abs(), NO_COMPLEX)
    with pytest.raises(Exception, match=r"fft_fft.*needs complex64.*none of its kind"):
        compiled(x32)


def test_complex128_becomes_complex64():
    backend = run(lambda x: torch.fft.ifft(torch.fft.fft(x.double())).real, NO_COMPLEX128, x32)
    assert "complex64" in {event.target for event in backend.of(Rewrite)}


HALVES = {
    "chain": lambda x, w: (x @ w).relu() * 2 + 1,
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (4,)),
    "explicit": lambda x, w: (x.float() @ w.float()).to(x.dtype) + x[:, :1],
    "moved": lambda x, w: x.T.reshape(2, -1).contiguous(),
    "chunks": lambda x, w: x.chunk(2, 1)[0] + w[0, :2],
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "ones": lambda x, w: x + torch.ones(4, dtype=x.dtype) * w.sum(),
}


@pytest.mark.parametrize("device", [STORED_BF16, NO_BF16, STORED_HALF], ids=["stored_bf16", "no_bf16", "stored_half"])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_that_is_only_stored_is_upcast_at_use(name, device):
    dtype = torch.float16 if device is STORED_HALF else torch.bfloat16
    args = [x32.to(dtype), torch.linspace(-1, 1, 16).reshape(4, 4).to(dtype)]
    host = (dtype,) if device is NO_BF16 else ()
    backend = run(HALVES[name], device, *args, tolerance=4e-2, host=host)
    assert dtype not in backend.computed or name == "moved"


def test_float8_is_stored_and_upcast_at_use():
    w = torch.randn(4, 4).to(torch.float8_e4m3fn)
    compiled, backend = legalised(lambda x, w: (x @ w.to(x.dtype), w.t()), STORED_FLOAT8)
    product, moved = compiled(x32, w)
    assert product.equal(x32 @ w.float())
    assert moved.dtype is torch.float8_e4m3fn
    assert not backend.modified
    compiled, backend = legalised(lambda w: w * 2, STORED_FLOAT8)  # which eager refuses
    assert compiled(w).dtype is torch.float8_e4m3fn
    assert compiled(w).float().equal((w.float() * 2).to(w.dtype).float())


@pytest.mark.parametrize("rows", [False, True])
def test_a_scaled_product_in_float8_is_one_of_upcast_operands(rows):
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(16, 32).to(torch.float8_e4m3fn).T
    scales = (torch.rand(16, 1) + 1, torch.rand(1, 16) + 1) if rows else (torch.tensor(0.5), torch.tensor(2.0))
    bias = torch.randn(16, dtype=torch.bfloat16)

    def function(a, b, first, second, bias):
        return torch._scaled_mm(a, b, first, second, bias=bias, out_dtype=torch.bfloat16) + 1

    compiled, _ = legalised(function, STORED_FLOAT8)
    exact = (a.double() * scales[0]) @ (b.double() * scales[1]) + bias + 1
    result = compiled(a, b, *scales, bias)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.double(), exact, atol=0.1, rtol=2e-2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", [STORED_BF16, NO_BF16], ids=["stored", "missing"])
def test_inputs_that_are_changed_keep_their_dtype(device, training):
    def function(x, y):
        same = x.to(torch.bfloat16)
        same.mul_(2)
        x[0].add_(y[0].detach().float())
        x += 1
        x.view(-1)[3:6].zero_()
        return x.sum(), y + x

    y = x32.to(torch.bfloat16).requires_grad_(training)
    x, same = x32.to(torch.bfloat16), x32.to(torch.bfloat16)
    host = (torch.bfloat16,) if device is NO_BF16 else ()
    compiled, _ = legalised(function, device, training=training, host=host)
    _, result = compiled(x, y)
    function(same, y)
    assert x.dtype is torch.bfloat16
    torch.testing.assert_close(x, same, atol=4e-2, rtol=2e-2)
    if training:
        result.sum().backward()
        assert y.grad.equal(torch.ones_like(y))


@pytest.mark.parametrize("device", [STORED_BF16, NO_BF16], ids=["stored", "missing"])
def test_running_statistics_are_written_back(device):
    model = nn.BatchNorm1d(4).to(torch.bfloat16).train()
    same = nn.BatchNorm1d(4).to(torch.bfloat16).train()
    compiled, _ = legalised(model, device, host=(torch.bfloat16,) if device is NO_BF16 else (), training=True)
    for _ in range(2):
        compiled(x32.to(torch.bfloat16))
        same(x32.to(torch.bfloat16))
    assert model.running_var.dtype is torch.bfloat16
    torch.testing.assert_close(model.running_var, same.running_var, atol=2e-2, rtol=2e-2)
    assert model.num_batches_tracked == 2


def test_gradients_have_the_dtype_of_what_they_belong_to():
    def function(x, w):
        return ((x.double() @ w) * torch.arange(4, dtype=torch.float64)).tanh().sum()

    for device in (NO_DOUBLE, STORED_DOUBLE):
        x, w = x32.clone().requires_grad_(), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        same = [v.detach().clone().requires_grad_() for v in (x, w)]
        function(*same).backward()
        compiled, _ = legalised(function, device, training=True, host=(torch.float64,))
        compiled(x, w).backward()
        assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float64)
        for got, want in zip((x, w), same, strict=True):
            torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4)


def test_a_written_copy_adds_up_its_gradients_where_it_is_computed():
    def function(x):
        r = x.clone()
        r.mul_(0.5)
        r[:, 1] += 0.25
        r[0].add_(1)
        return r.sin()

    x = x32.to(torch.bfloat16).requires_grad_()
    compiled, backend = legalised(function, STORED_BF16, training=True)
    result = compiled(x)
    result.sum().backward()
    assert (result.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.bfloat16 not in backend.computed
    same = x.detach().float().requires_grad_()
    function(same).sum().backward()
    torch.testing.assert_close(x.grad.float(), same.grad, atol=1e-2, rtol=1e-2)


def test_checkpointed_regions_are_legalised_on_both_sides():
    def inner(x, w):
        return torch.sin(x @ w.double()), x.argmax(-1)

    def function(x, w):
        y, index = checkpoint(inner, x.double() * 2, w, use_reentrant=False)
        return (y * 2).float().sum() + index.sum()

    for device in (Lacking(unstored=(torch.float64, torch.int64)), STORED_DOUBLE):
        x, w = x32.clone().requires_grad_(), torch.randn(4, 4, requires_grad=True)
        same = [v.detach().clone().requires_grad_() for v in (x, w)]
        function(*same).backward()
        compiled, backend = legalised(function, device, training=True)
        compiled(x, w).backward()
        assert len(backend.graphs) == 1
        torch.testing.assert_close(w.grad, same[1].grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(x.grad, same[0].grad, atol=1e-4, rtol=1e-4)


def test_autocast_to_a_missing_dtype_is_off():
    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y + 1, (x @ w).double()

    w = torch.linspace(-1, 1, 16).reshape(4, 4)
    for device in (STORED_BF16, NO_BF16, NO_DOUBLE):
        run(function, device, x32, w, tolerance=4e-2)


@pytest.mark.parametrize("training", [False, True])
def test_autocast_around_the_graph_is_off_in_it(training):
    w = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_(training)
    for device in (STORED_BF16, NO_BF16):
        compiled, backend = legalised(lambda x, w: (x @ w).sin(), device, training=training)
        with torch.autocast("cpu", torch.bfloat16):
            result = compiled(x32, w)
        torch.testing.assert_close(result.float(), (x32 @ w).sin(), atol=4e-2, rtol=4e-2)
        assert torch.bfloat16 not in backend.computed
        if training:
            result.sum().backward()
            assert w.grad.dtype is torch.float32


def test_no_grad_is_no_place_for_a_shared_cast():
    def function(x, w):
        with torch.no_grad():
            scale = (x * w).sum()
        return (x * w).sum() / scale.detach()

    w = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    x = x32.to(torch.bfloat16)
    compiled, _ = legalised(function, STORED_BF16, training=True)
    compiled(x, w).backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.bfloat16


def test_each_node_is_a_decision_and_equal_ones_are_grouped():
    def function(x):
        for _ in range(3):
            x = x.double() + 1
        return x.float()

    backend = run(function, NO_DOUBLE, x32)
    (adds,) = [event for event in backend.of(Rewrite) if event.detail.startswith("add ")]
    assert adds.kind == "legalise"
    assert "float64 -> float32 (3 nodes: " in adds.detail
    assert "nothing wider is there" in adds.detail
    assert adds.source.partition(":")[0].endswith("test_legalise.py")


def test_a_second_run_changes_nothing():
    _, backend = legalised(lambda x: x, NO_LONG)
    for function in INDICES.values():
        compiled, backend = legalised(function, NO_LONG)
        compiled(x32)
        (first, second) = (event for event in backend.of(omnicomp.timeline.PassRun) if event.name == "legalise")
        assert first.modified
        assert not second.modified


def test_nothing_changes_on_a_device_that_has_it_all():
    compiled, backend = legalised(lambda x: (x.double() + 1).long().sum(), Lacking())
    compiled(x32)
    assert not backend.modified


def test_the_checking_device_catches_what_is_not_legalised():
    for device, function in (
        (NO_DOUBLE, DOUBLE["method"]),
        (STORED_DOUBLE, DOUBLE["method"]),
        (NO_LONG, INDICES["arange"]),
        (STORED_BF16, lambda x: x.bfloat16() + 1),
    ):
        with pytest.raises(LackedDtypeError), Checking(device):
            function(x32)


@pytest.fixture
def no_double(monkeypatch):
    monkeypatch.setitem(devices._discover()[0], "cpu", NO_DOUBLE)


def test_the_backend_legalises_and_says_so(no_double, caplog):
    caplog.set_level(logging.WARNING, logger="omnicomp")
    function = lambda x: (x.double() * 2).sin()  # noqa: E731
    assert torch.compile(function, backend="omni")(x32).dtype is torch.float32
    assert "the cpu device lacks dtypes of the graph" in caplog.text
    details = [event.detail for event in omnicomp.timeline.events() if isinstance(event, Rewrite)]
    assert any("float64 -> float32" in detail for detail in details)
    torch.compiler.reset()
    off = torch.compile(function, backend="omni", options={"legalise": "off"})
    assert off(x32).dtype is torch.float64
    torch.compiler.reset()
    with pytest.raises(LegaliseError) as caught:
        torch.compile(function, backend="omni", options={"legalise": "error"})(x32)
    assert "\n" not in str(caught.value).split("\n\nSet TORCHDYNAMO_VERBOSE")[0]  # which Dynamo adds
    assert "test_legalise.py:" in str(caught.value)
    assert "options={'legalise': 'warn'}" in str(caught.value)


@pytest.mark.inductor
def test_inductor_compiles_what_was_legalised(monkeypatch):
    device = Lacking(unstored=(torch.float64, torch.int64), lowerings=("override", "inductor", "eager"))
    monkeypatch.setitem(devices._discover()[0], "cpu", device)

    def function(ids, table):
        return (F.embedding(ids, table).double() * torch.arange(4)).sum(-1), table.argmax(-1)

    compiled = torch.compile(function, backend="omni", options={"on_error": "raise"})
    found, index = compiled(torch.tensor([2, 0]), x32)
    assert (found.dtype, index.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(found.double(), function(torch.tensor([2, 0]), x32)[0])
    assert {row.ran for row in omnicomp.audit().subgraphs} == {"inductor"}
    with pytest.raises(RuntimeError, match="does not fit int32"):
        compiled(torch.tensor([2, 2**31]), x32)
