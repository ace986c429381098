from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnicomp.devices import resolve_device
from omnicomp.devices.sim.device import SimDevice
from omnicomp.testing.bringup.calls import Call
from omnicomp.testing.bringup.ladder import climb

ATEN = torch.ops.aten
EAGER = {"lowerings": ["eager"]}
ALL = dict.fromkeys(("captured", "supported", "lowered", "built", "ran", "matched"), "yes")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("aten", "IMPL")
    yield library
    library._destroy()


def call(operator: Any, *args: Any, **kwargs: Any) -> Call:
    name = operator._schema.name + (f".{operator._overloadname}" if operator._overloadname != "default" else "")
    return Call(operator=operator, name=name, dtypes=(), shapes=(), args=args, kwargs=kwargs, count=1, captured=True)


def test_a_native_kernel_comes_through_all_steps():
    row = climb(resolve_device("cpu"), call(ATEN.add.Tensor, torch.ones(3), torch.ones(3), alpha=2), EAGER)
    assert row["steps"] == ALL
    assert (row["kernel"], row["lowering"], row["reason"]) == ("native", "eager", "")


def test_what_torch_composes_is_told_from_what_it_requires():
    linear = climb(resolve_device("cpu"), call(ATEN.linear.default, torch.ones(2, 3), torch.ones(4, 3)), EAGER)
    assert (linear["kernel"], linear["required"]) == ("composite", [])
    relu = climb(resolve_device("cpu"), call(ATEN.relu.default, torch.ones(2)), EAGER)
    assert (relu["kernel"], relu["required"]) == ("native", ["aten::relu"])


def test_operators_that_write_that_draw_and_that_name_a_device(sim):
    device = resolve_device("sim")
    for each in (
        call(ATEN.copy_.default, torch.zeros(3), torch.ones(3)),
        call(ATEN.rand.default, [3], device=torch.device("cpu")),
        call(ATEN.zeros.default, [3], device=torch.device("cpu"), dtype=torch.int32),
        call(ATEN.index.Tensor, torch.arange(4.0), [torch.tensor([1, 0])]),
        call(ATEN.topk.default, torch.arange(4.0), 2),
    ):
        row = climb(device, each, EAGER)
        assert row["steps"] == ALL, (each.name, row)


def test_a_fallback_to_the_cpu_is_counted(sim):
    row = climb(resolve_device("sim"), call(ATEN.cumsum.default, torch.ones(3), 0), EAGER)
    assert (row["kernel"], row["needs"]) == ("fallback", {"aten::cumsum.out": 1})
    assert row["required"] == ["aten::cumsum.out"]
    assert row["steps"] == ALL


def test_a_wrong_kernel_does_not_match(sim, library):
    library.impl("relu", lambda x: x + 1, "PrivateUse1", allow_override=True)
    row = climb(resolve_device("sim"), call(ATEN.relu.default, torch.ones(3)), EAGER)
    assert row["steps"] == {**ALL, "matched": "no"}
    assert row["kernel"] == "wrong"
    assert row["needs"] == {"aten::relu": 1}
    assert "not close" in row["reason"]


def test_a_missing_kernel_is_named_by_what_was_asked_for(sim, library):
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Could not run 'aten::relu.inner' with arguments from the 'sim' backend.")

    library.impl("relu", missing, "PrivateUse1", allow_override=True)
    row = climb(resolve_device("sim"), call(ATEN.relu.default, torch.ones(3)), EAGER)
    assert (row["kernel"], row["needs"]) == ("missing", {"aten::relu.inner": 1})
    assert row["steps"] == {**dict.fromkeys(ALL, ""), "captured": "yes", "supported": "no"}
    assert "Could not run" in row["reason"]


def test_a_dtype_that_the_device_lacks_is_not_supported(sim):
    device = SimDevice(compute_dtypes=(torch.float32,), storage_dtypes=(torch.float32, torch.int64))
    row = climb(device, call(ATEN.sin.default, torch.ones(3, dtype=torch.float64)), EAGER)
    assert row["steps"]["supported"] == "no"
    assert row["reason"] == "sim holds no torch.float64"


@pytest.mark.inductor
def test_a_kernel_that_a_compiler_makes_is_as_good_as_a_native_one(sim, library):
    def missing(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("Could not run 'aten::relu' with arguments from the 'sim' backend.")

    library.impl("relu", missing, "PrivateUse1", allow_override=True)
    row = climb(resolve_device("sim"), call(ATEN.relu.default, torch.ones(3)), {})
    assert row["steps"] == ALL
    assert (row["kernel"], row["lowering"]) == ("missing", "inductor")
