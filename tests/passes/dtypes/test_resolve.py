"""What a policy comes to on a device: by its instructions, and by a measured product."""

import dataclasses
import logging

import pytest
import torch
from lowered import check, compiled, rand

from omnicomp.devices import resolve_device
from omnicomp.devices.cpu import instruction_set
from omnicomp.options.dtype_policy import PRESETS, parse_dtype_policy
from omnicomp.passes.dtypes import resolve as module
from omnicomp.passes.dtypes.resolve import resolve, slowness
from omnicomp.timeline import NearMiss, Option, Rewrite

BF16, FP16 = torch.bfloat16, torch.float16


class Device:
    lowerings = ("eager",)

    def __init__(self, kind="cpu", **capabilities):
        self.type = kind
        self._capabilities = dataclasses.replace(resolve_device("cpu").capabilities(), **capabilities)

    def capabilities(self):
        return self._capabilities


@pytest.fixture
def measures(monkeypatch):
    """The measurement finds the low-precision product so many times as fast."""
    monkeypatch.setattr(module, "_warned", set())

    def set_ratio(ratio):
        monkeypatch.setattr(
            module,
            "measured",
            lambda dtype: module.Speed(dtype=str(dtype)[6:], wide_ms=1.0, low_ms=1 / ratio, threads=2),
        )

    set_ratio(2.0)
    return set_ratio


def test_auto_that_keeps_float32_leaves_float8_out_as_well(measures):
    measures(0.8)
    policy, reason = resolve(
        parse_dtype_policy({"preset": "auto", "fp8": "row"}), Device(fast_dtypes=()), training=False
    )
    assert (policy.compute, policy.fp8, policy.auto) == (None, None, False)
    assert reason is not None


@pytest.mark.parametrize(
    ("fast", "ratio", "training", "expected"),
    [
        ((BF16, FP16), 2.0, False, BF16),
        ((BF16, FP16), 2.0, True, BF16),
        ((FP16,), 2.0, False, FP16),
        ((FP16,), 2.0, True, None),  # float16 needs a gradient scaler
        ((BF16,), 0.8, False, None),  # instructions that bring nothing
        ((), 2.0, False, None),  # a product that is faster by chance: no instructions
    ],
)
def test_auto_needs_instructions_and_a_faster_product(measures, fast, ratio, training, expected):
    measures(ratio)
    policy, reason = resolve(PRESETS["auto"], Device(fast_dtypes=fast), training=training)
    assert policy.compute is expected
    assert not policy.auto
    assert (reason is None) is (expected is not None)
    if reason is not None:
        assert reason.code == "not_profitable"
        assert reason.lever
        assert torch.backends.cpu.get_cpu_capability() in reason.observed


def test_another_device_goes_by_its_capabilities(measures):
    measures(0.1)
    assert resolve(PRESETS["auto"], Device("cuda", fast_dtypes=(BF16,)), training=True)[0].compute is BF16
    assert "bfloat16" in slowness(BF16, Device("cuda", fast_dtypes=()))


def test_auto_runs_what_it_chose(measures):
    backend = check(lambda x, w: x @ w, rand(4, 8), rand(8, 8), policy="auto", device=Device(fast_dtypes=(BF16,)))
    assert [event.target for event in backend.of(Rewrite)] == ["bfloat16"]
    assert not backend.of(Option)


def test_auto_tells_once_why_it_keeps_float32(measures):
    def function(x, w):
        return (x @ w) @ w

    backend = check(function, rand(4, 8), rand(8, 8), policy="auto", device=Device(fast_dtypes=()))
    assert not backend.modified
    (event,) = backend.of(Option)
    assert (event.key, event.requested, event.effective) == ("dtype_policy", "auto", "keep")
    assert event.reason.observed == "; ".join(
        f"{name}: {instruction_set(dtype)}"
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    )


def test_rules_hold_where_auto_keeps_float32(measures):
    policy = parse_dtype_policy({"preset": "auto", "ops": {"matmul": "fp16"}})
    backend = check(lambda x, w: x @ w, rand(4, 8), rand(8, 8), policy=policy, device=Device(fast_dtypes=()))
    assert [event.target for event in backend.of(Rewrite)] == ["float16"]


def test_rules_hold_under_auto_without_matrix_work(measures):
    policy = parse_dtype_policy({"preset": "auto", "ops": {"tanh": "bf16"}})
    backend = check(lambda x: x.tanh(), rand(4, 8), policy=policy, device=Device(fast_dtypes=()))
    assert [event.target for event in backend.of(Rewrite)] == ["bfloat16"]


def test_device_without_the_dtype():
    device = Device(compute_dtypes=(torch.float32, torch.float64))
    backend = check(lambda x, w: (x @ w) @ w, rand(4, 8), rand(8, 8), device=device)
    assert not backend.modified
    (miss,) = backend.of(NearMiss)
    assert miss.reason.code == "option_ineffective"
    assert "bfloat16" in miss.reason.observed
    assert miss.reason.lever


@pytest.mark.parametrize("fast", [True, False])
def test_slow_dtype_is_obeyed_and_told(fast, measures, caplog):
    measures(2.0 if fast else 0.5)
    device = Device(fast_dtypes=(BF16,) if fast else ())
    with caplog.at_level(logging.WARNING, "omnicomp"):
        for _ in range(2):
            torch.compiler.reset()
            backend = check(lambda x, w: x @ w, rand(4, 8), rand(8, 8), device=device)
    (rewrite,) = backend.of(Rewrite)
    assert ("not faster" in rewrite.detail) is not fast
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (not fast), "one warning a process"
    if lines:
        assert "2.0 times as long" in lines[0]
        assert "bfloat16" in lines[0]


def test_nothing_is_measured_without_a_policy(monkeypatch):
    monkeypatch.setattr(module, "measured", lambda dtype: pytest.fail("measured"))
    fn, backend = compiled(lambda x: x @ x, "keep")
    fn(rand(4, 4))
    assert not backend.modified
