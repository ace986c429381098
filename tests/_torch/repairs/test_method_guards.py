"""A graph holds for the method of tensors that its function was given, and for no other."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

EAGER: dict[str, Any] = {"lowerings": ["eager"]}
METHODS = (torch.Tensor.add, torch.Tensor.__mul__, torch.Tensor.add)

_read: Any = None  # the method that `of_a_global` reads


def of_an_argument(method: Any) -> Callable[..., Any]:
    def function(x: Tensor, method: Any = method) -> Any:
        return method(x, x)

    return function


def of_a_closure(method: Any) -> Callable[..., Any]:
    return lambda x: method(x, x)


def of_an_attribute(method: Any) -> Callable[..., Any]:
    holder = types.SimpleNamespace(methods=[method])
    return lambda x: holder.methods[0](x, x)


def _reading(x: Tensor) -> Any:
    return _read(x, x)


def of_a_global(method: Any) -> Callable[..., Any]:
    global _read
    _read = method
    return _reading


@pytest.mark.parametrize("made", [of_an_argument, of_a_closure, of_an_attribute, of_a_global])
def test_another_method_is_another_graph(made: Callable[[Any], Callable[..., Any]]) -> None:
    counters.clear()
    x = torch.tensor(6.0)
    found = [torch.compile(made(method), backend="omni", options=EAGER, fullgraph=True)(x) for method in METHODS]
    assert [float(value) for value in found] == [12.0, 36.0, 12.0]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.inductor
def test_a_function_that_names_a_method_can_be_saved(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.Tensor.add(x, x)

    x = torch.tensor(6.0)
    compiled: Any = torch.compile(function, backend="omni", fullgraph=True)
    with torch._dynamo.config.patch(enable_aot_compile=True):  # which torch 2.11 asks for
        saved = compiled.aot_compile(((x,), {}))
    saved.save_compiled_function(str(tmp_path / "function"))
    with (tmp_path / "function").open("rb") as file:
        assert torch.compiler.load_compiled_function(file)(x) == 12
