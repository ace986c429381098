"""Conditions on symbolic sizes that Dynamo asks for in each call."""

from typing import Any

import pytest
import torch

from omnicomp._torch.autograd.attention import without_guards
from omnicomp._torch.dynamo import late_compile
from omnicomp._torch.symbols import guard_multiple, may_guard_multiple


class Backend:
    """Makes its graphs for multiples of 128, where it may."""

    def __init__(self, *, late: bool = False) -> None:
        self.late, self.found = late, []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def look(values: Any) -> None:
            (size,) = (value for value in values if isinstance(value, torch.SymInt))
            self.found.append(may_guard_multiple(size, 128))
            if self.found[-1]:
                guard_multiple(size, 128)

        if self.late:
            late_compile.compile_late(late_compile.keep_scene(inputs), look)
        else:
            look(inputs)
        return module


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def run(backend: Backend, sizes: tuple[int, ...], mark: Any = lambda x: None) -> list[bool]:
    compiled = torch.compile(double, backend=backend, dynamic=True)
    for size in sizes:
        x = torch.ones(size)
        mark(x)
        assert torch.equal(compiled(x), x * 2)
    return backend.found


def test_a_graph_for_multiples_is_followed_by_one_for_all_sizes() -> None:
    assert run(Backend(), (256, 384, 100, 77, 512)) == [True, False]


def test_no_condition_is_made_of_a_size_that_is_no_multiple() -> None:
    assert run(Backend(), (100, 256, 77)) == [False]


@pytest.mark.parametrize("bounds", [{}, {"min": 2, "max": 4096}])
def test_a_size_that_the_program_declares_to_be_dynamic_has_one_graph(bounds: dict[str, int]) -> None:
    assert run(Backend(), (256, 100, 77), lambda x: torch._dynamo.mark_dynamic(x, 0, **bounds)) == [False]


def test_what_is_compiled_late_is_for_all_sizes() -> None:
    assert run(Backend(late=True), (256, 100, 77)) == [False]


def test_an_exported_graph_is_for_all_sizes() -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return double(x)

    shapes = {"x": {0: torch.export.Dim("n", max=4096)}}
    exported = torch.export.export(Double(), (torch.ones(256),), dynamic_shapes=shapes)
    (x,) = exported.graph.find_nodes(op="placeholder")
    assert not may_guard_multiple(x.meta["val"].shape[0], 128)


def test_a_guard_that_is_not_added_is_an_error() -> None:
    found = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        x = module.graph.find_nodes(op="placeholder")[-1].meta["example_value"]
        with without_guards(x), pytest.raises(RuntimeError, match="no guard was added"):
            guard_multiple(x.shape[0], 128)
        found.append(x.shape[0])
        return module

    torch.compile(double, backend=backend, dynamic=True)(torch.ones(256))
    assert found
