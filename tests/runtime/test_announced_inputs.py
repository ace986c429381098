import random
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from omnicomp.backend import pipeline
from omnicomp.errors import LoweringError
from omnicomp.runtime.announced_inputs import announce, difference
from omnicomp.timeline import Retreat, current


@pytest.mark.parametrize(
    ("announced", "value", "said"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "a float64 tensor of (2)"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), "strides (1, 2)"),
        (torch.ones(2), torch.ones(3), "(3)"),
        (torch.ones(2), torch.ones(()), "()"),
        (torch.ones(2), torch.ones(2, device="meta"), "on meta"),
        (torch.ones(2), 1.0, "is a float"),
        (1, 1.0, "is a float"),
        (1, torch.ones(2), "tensor"),
        (torch.ones(1, 3), torch.ones(3, 1).t(), ""),
        (torch.ones(0, 3), torch.ones(3, 0).t(), ""),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2)), ""),
        (torch.ones(2), torch.ones(2).to_sparse(), ""),
        (1, 2, ""),
        (None, torch.ones(2), ""),
    ],
)
def test_what_differs(announced: Any, value: Any, said: str) -> None:
    found = difference(announce([0, announced]), [0, value], strides=True)
    assert bool(found) == bool(said)
    assert said in found


def test_seeds_of_attention_may_be_on_the_host() -> None:
    with FakeTensorMode():
        seed, number, seeds = (torch.empty(shape, dtype=torch.int64, device="cuda") for shape in ((), (), (2,)))
        number = number.double()
    assert not difference(announce([seed]), [torch.tensor(3)], strides=True)
    assert "on cpu" in difference(announce([number]), [torch.tensor(3.0, dtype=torch.float64)], strides=True)
    assert "on cpu" in difference(announce([seeds]), [torch.tensor([3, 4])], strides=True)


def test_symbolic_sizes_and_a_wrong_count_are_left_to_the_call() -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(4, 3), symbolic_context=dynamic)
    assert not difference(announce([fake]), [torch.ones(6, 5)], strides=True)
    assert difference(announce([fake]), [torch.ones(6)], strides=True)
    assert not difference(announce([1, 2]), [1], strides=True)


@pytest.mark.inductor
@pytest.mark.parametrize("cut", [False, True])
def test_code_that_was_not_built_for_its_inputs_is_not_called(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "as_passed", lambda module, inputs: inputs)  # Dynamo announces a float32

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * random.uniform(1, 2)).sin() + 1

    def called(function: Any) -> list[torch.Tensor]:
        random.seed(0)
        return [function(torch.ones(3)) for _ in range(3)]

    options: dict[str, Any] = {"lowerings": {"*": ["inductor", "eager"], "aten.sin": "eager"}} if cut else {}
    torch.testing.assert_close(called(torch.compile(program, backend="omni", options=options)), called(program))
    (event,) = [event for event in current() if isinstance(event, Retreat) and event.reason.code == "inputs_differ"]
    assert (event.source_lowering, event.target_lowering) == ("inductor", "eager")
    assert "is a float64 tensor" in event.reason.sentence
    torch.compiler.reset()
    with pytest.raises(LoweringError, match="announced as a float32"):
        called(torch.compile(program, backend="omni", options={**options, "on_error": "raise"}))
