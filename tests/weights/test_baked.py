"""What was built of weights holds, or is seen not to."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from omnicomp import weights
from omnicomp._torch.parameters import is_observed
from omnicomp.weights import observer
from omnicomp.weights.baked import Constants, fixable, hash_of


def parameter(*shape: int) -> Parameter:
    """One whose memory nobody else holds, such as the tensor that it is made of."""
    return Parameter(torch.randn(shape or (4, 6)), requires_grad=False)


def test_what_was_not_touched_holds() -> None:
    values = (parameter(), torch.randn(3), parameter())
    constants = Constants(values)
    constants.built()
    assert constants.hold(values)
    assert constants.hold(values)
    assert constants.alive
    assert constants.same_objects(values)
    assert observer.find(values[0]) is not None
    assert observer.find(values[1]) is None, "a buffer is compared"


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.mul_(2),
    "a view": lambda p: p[0].zero_(),
    "data": lambda p: p.data.mul_(2),
    "data, set": lambda p: setattr(p, "data", torch.zeros(4, 6)),
    "a list of tensors": lambda p: torch._foreach_add_([p], 1),
    "a list of others with its memory": lambda p: torch._foreach_add_([p.detach()], 1),
    "another storage": lambda p: p.set_(torch.zeros(4, 6)),
    "copy": lambda p: p.copy_(torch.zeros(4, 6)),
    "an array that is gone": lambda p: p.numpy().fill(0),
    "out": lambda p: torch.add(p, 1, out=p),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_parameter_is_seen(name: str) -> None:
    value = parameter()
    constants = Constants((value,))
    constants.built()
    assert constants.hold((value,))
    WRITES[name](value)
    assert not constants.hold((value,))


@pytest.mark.parametrize(
    "write",
    [
        lambda b: b.mul_(2),
        lambda b: b.data.add_(1),
        lambda b: b.numpy().__setitem__(0, 9.0),
        lambda b: b.resize_(2),
    ],
)
def test_a_write_to_a_buffer_is_seen(write: Callable[[torch.Tensor], Any]) -> None:
    value = torch.ones(3)
    constants = Constants((value,))
    constants.built()
    assert constants.hold((value,))
    assert constants.hold((torch.ones(3),))  # the same contents
    assert not constants.hold((torch.ones(3, dtype=torch.float64),))
    write(value)
    assert not constants.hold((value,))


def test_another_object_does_not_hold() -> None:
    value = parameter()
    constants = Constants((value,))
    other = Parameter(value.clone(), requires_grad=False)
    assert not constants.hold((other,))
    assert not constants.same_objects((other,))


def test_a_view_that_somebody_has_is_seen() -> None:
    """It could be written to without being counted, by NumPy or by C."""
    value = parameter()
    constants = Constants((value,))
    constants.built()
    view = value.detach()
    assert not constants.hold((value,))
    del view
    assert constants.hold((value,))


def test_what_the_executable_holds_is_its_own() -> None:
    value = parameter()
    assert fixable(value)
    constants = Constants((value,))
    held = value.detach()
    constants.built()
    assert constants.hold((value,))
    assert fixable(value)
    del held
    assert constants.hold((value,))


def test_data_that_is_read_is_told_by_the_contents() -> None:
    value = parameter()
    constants = Constants((value,))
    constants.hashes((value,))
    constants.built()
    float(value.data.sum())
    assert constants.hold((value,))
    value.data.add_(1)
    assert not constants.hold((value,))
    value.data.sub_(1)
    value.data.copy_(value.data)
    plain = Constants((value,))  # without a hash nobody can tell
    float(value.data.sum())
    assert not plain.hold((value,))


def test_one_that_died_does_not_hold() -> None:
    values = [parameter()]
    constants = Constants(tuple(values))
    constants.built()
    values.clear()
    gc.collect()
    assert not constants.alive
    other = parameter()
    assert not constants.hold((other,))
    assert not constants.same_objects((other,))


def test_what_can_be_followed() -> None:
    assert fixable(parameter())
    assert fixable(torch.ones(3))
    assert not fixable(torch.ones(100_000))  # a buffer that takes too long to compare
    large = parameter(100_000)
    assert fixable(large)
    assert not fixable(Parameter(torch.from_numpy(np.ones(3, dtype=np.float32))))
    shared = Parameter(torch.ones(3))
    shared.share_memory_()
    assert not fixable(shared)
    first = Parameter(torch.ones(3))
    second = Parameter(first.detach())
    assert not fixable(first)
    assert not fixable(second)
    assert not fixable(torch.ones(2, 2).to_sparse())
    assert not fixable(torch.ones(2, device="meta"))
    with torch.inference_mode():
        assert not fixable(torch.ones(2))

    class Special(Parameter):
        pass

    assert not fixable(Special(torch.ones(3)))


def test_hashes_are_of_the_elements() -> None:
    x = torch.randn(4, 6)
    assert hash_of(x) == hash_of(x.clone()) == hash_of(x.t().contiguous().t())
    assert hash_of(x) != hash_of(x + 1)
    assert hash_of(torch.empty(0)) == hash_of(torch.empty(0, 3))
    assert hash_of(torch.ones(3, dtype=torch.bfloat16)) != hash_of(torch.zeros(3, dtype=torch.bfloat16))
    assert hash_of(torch.tensor(1.0).expand(3)) == hash_of(torch.ones(3))
    value = parameter()
    assert Constants((torch.ones(2), value)).hashes((torch.ones(2), value)) == [hash_of(torch.ones(2)), hash_of(value)]


def test_nothing_is_replaced_after_a_reset_and_a_write_meanwhile_is_seen() -> None:
    value = parameter()
    constants = Constants((value,))
    constants.built()
    constants.hashes((value,))
    weights.clear()  # as torch.compiler.reset() does
    assert not is_observed()
    value.data.mul_(1)
    assert constants.hold((value,))
    assert is_observed(), "again"
    weights.clear()
    value.data.mul_(2)
    assert not constants.hold((value,))
