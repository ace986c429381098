"""What torch counts of writes to parameters, what is counted for it, and that nobody else sees anything of that."""

import inspect
import pickle
from collections.abc import Iterator

import pytest
import torch
from foreach_versions import uncounted
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from omnicomp._torch import parameters


@pytest.fixture
def seen() -> Iterator[list[torch.Tensor]]:
    parameters.stop_observing()  # what other tests left
    found: list[torch.Tensor] = []
    parameters.observe(found.append)
    yield found
    parameters.stop_observing()


def data_of_parameters() -> object:
    return inspect.getattr_static(Parameter, "data")


def test_all_functions_on_lists_count_what_they_write_on_the_cpu() -> None:
    assert uncounted("cpu") == set()


def test_no_more_is_replaced_than_has_to_be_and_all_is_put_back() -> None:
    parameters.stop_observing()
    before = {name: getattr(torch, name) for name in dir(torch)}
    data = data_of_parameters()
    parameters.observe(lambda parameter: None)
    try:
        assert all(getattr(torch, name) is value for name, value in before.items())
        assert data_of_parameters() is not data
    finally:
        parameters.stop_observing()
    assert data_of_parameters() is data


def scripted(x: torch.Tensor) -> torch.Tensor:
    y = [x]
    torch._foreach_zero_(y)
    torch._foreach_lerp_(y, y, 0.5)
    return x


def test_functions_on_lists_are_torch_s_where_the_dispatcher_counts_for_them() -> None:
    tensors = [Parameter(torch.ones(2)) for _ in range(2)]
    with torch.no_grad():
        torch._foreach_zero_(tensors)
        alone = tensors[0]._version
        stop = parameters.count_foreach()
        try:
            torch._foreach_zero_(self=tensors)
            torch._foreach_lerp_([p.detach() for p in tensors], tensors1=tensors, weight=0.5)
            with torch.inference_mode():
                torch._foreach_zero_(tensors)
            assert [p._version for p in tensors] == [7 * alone] * 2, "each is counted once by torch and once more"
            assert torch.jit.script(scripted)(torch.ones(2)).shape == (2,)
            compiled = torch.compile(scripted, backend="aot_eager", fullgraph=True)
            assert compiled(torch.ones(2)).tolist() == [0, 0]
            assert pickle.loads(pickle.dumps(torch._foreach_zero_)) is torch._foreach_zero_
        finally:
            stop()
        torch._foreach_zero_(tensors)
    assert tensors[0]._version == 8 * alone


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_data_as_torch_has_it(seen: list[torch.Tensor]) -> None:
    parameter = Parameter(torch.ones(2))
    with Functions() as mode:
        assert parameter.data.shape == (2,)
    assert mode.seen[0] == torch.Tensor.data.__get__
    assert [value is parameter for value in seen] == [True]


def test_a_property_of_another_library_is_asked_and_stays() -> None:
    parameters.stop_observing()
    torch_s = data_of_parameters()
    below: list[str] = []
    asked = property(lambda self: (below.append("below"), torch_s.__get__(self))[1])  # type: ignore[attr-defined]
    Parameter.data = asked  # type: ignore[assignment,misc]
    try:
        found: list[torch.Tensor] = []
        parameters.observe(found.append)
        ours = data_of_parameters()
        above = property(lambda self: ours.__get__(self))  # type: ignore[attr-defined]
        Parameter.data = above  # type: ignore[assignment,misc]
        parameter = Parameter(torch.ones(2))
        assert parameter.data.shape == (2,)
        parameters.stop_observing()
        assert data_of_parameters() is above
        assert parameter.data.shape == (2,)
        assert (len(found), below) == (1, ["below", "below"])
    finally:
        del Parameter.data
