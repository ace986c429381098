"""?"""

from typing import Any

import pytest
import torch
from torch import nn

from omnicomp.errors import OmnicompError
from omnicomp.testing.bringup.calls import Call, Subject, capture, load

_FILE = """
import torch

def tensor():
    return torch.nn.Linear(2, 3), torch.ones(1, 2)

def several():
    return torch.nn.Bilinear(2, 2, 3), (torch.ones(1, 2), torch.ones(1, 2))

def named():
    return torch.nn.Linear(2, 3), {"input": torch.ones(1, 2)}

def nothing():
    return 3

def broken():
    raise ValueError("no weights")
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(_FILE)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ["tensor", "several", "named"])
def test_a_function_gives_a_model_with_inputs(file, name):
    subject = load(f"{file}:{name}", training=True)
    assert subject.model.training
    result = subject.model(*subject.args, **subject.kwargs)
    assert result.shape == (1, 3)
    torch.testing.assert_close(subject.loss(result), result.square().mean())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("berd", 'did you mean "bert"'),
        ("mine.py:nothing", "has to return a module and its inputs, and returns a int"),
        ("mine.py:broken", "raises ValueError: no weights"),
        ("mine.py:absent", "has no function 'absent'"),
    ],
)
def test_bad_input_is_one_sentence(file, name, message):
    with pytest.raises(OmnicompError, match=message):
        load(name.replace("mine.py", file))


def test_an_unknown_size_is_one_sentence():
    with pytest.raises(OmnicompError, match="size can't be 'huge'"):
        load("bert", "huge")


def found(model: nn.Module, *args: Any, training: bool = False) -> dict[tuple[str, tuple[str, ...]], Call]:
    model.train(training)
    calls = capture(Subject(model=model, args=args), training=training).calls
    return {(call.name, call.shapes): call for call in calls}


def test_calls_are_counted_by_operator_dtypes_and_shapes():
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin() + x.sin().sin()
            return y + x[0].sin() + x.t().sin().t() + x.double().sin()[:, :1].expand(3, 3)

    calls = capture(Subject(model=Model(), args=(torch.randn(3, 3),))).calls
    sines = {(*call.dtypes, *call.shapes): call.count for call in calls if call.name == "aten::sin"}
    assert sines == {
        ("float32", "2d"): 3,
        ("float32", "1d"): 1,
        ("float32", "2d strided"): 1,
        ("float64", "2d"): 1,
    }
    assert any("broadcast" in shape for call in calls for shape in call.shapes)
    assert all(call.captured for call in calls)


def test_a_backward_is_taken_too():
    calls = found(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.randn(2, 3), training=True)
    parts = {name: call.parts for (name, _), call in calls.items()}
    assert parts["aten::relu"] == ("forward",)
    assert parts["aten::threshold_backward"] == ("backward",)


def test_what_runs_between_graphs_is_not_captured():
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            torch._dynamo.graph_break()
            return self.outside(y).cos()

        @torch._dynamo.disable
        def outside(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    model = Model().eval()
    capture_ = capture(Subject(model=model, args=(torch.randn(3),)))
    captured = {call.name: call.captured for call in capture_.calls}
    assert captured == {"aten::sin": True, "aten::exp": False, "aten::cos": True}
    assert capture_.graphs > 1
    assert capture_.note


def test_the_arguments_of_a_call_are_those_of_the_model():
    x = torch.tensor([[1, 2], [0, 1]])
    calls = found(nn.Embedding(3, 4), x)
    ((_, call),) = calls.items()
    assert torch.equal(call.args[1], x)
    assert call.args[1].data_ptr() != x.data_ptr()
