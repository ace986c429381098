"""Copies out of the pool have the values and layouts of what they copy, and share memory as that does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnicomp._torch.inductor import pool_copies
from omnicomp._torch.inductor.pool_copies import PoolCopies


def pooled(*tensors: torch.Tensor) -> Callable[[int], bool]:
    addresses = {each.untyped_storage().data_ptr() for each in tensors}
    return lambda address: address in addresses


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[2:],
        lambda x: x[:, 1],
        lambda x: x[:1].expand(5, 6),
        lambda x: x.as_strided((3, 3), (1, 1)),
        lambda x: x.view(torch.int32),
    ],
)
def test_a_copy_is_laid_out_like_the_output(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pool = torch.randn(4, 6)
    outputs = [view(pool)]
    PoolCopies().copy_out(outputs, [0], pooled(pool))
    assert torch.equal(outputs[0], view(pool))
    assert outputs[0].stride() == view(pool).stride()
    before = outputs[0].clone()
    pool.fill_(7)
    assert torch.equal(outputs[0], before)


def test_outputs_that_share_memory_go_on_sharing_it() -> None:
    pool = torch.randn(4, 6)
    outputs = [pool, pool[1:], pool.t(), pool.view(torch.int32)]
    assert PoolCopies().copy_out(outputs, range(4), pooled(pool)) == 96
    outputs[0].fill_(3)
    assert outputs[1].eq(3).all()
    assert outputs[2].eq(3).all()
    assert torch.equal(outputs[3].view(torch.float32), outputs[0])


def test_what_lies_elsewhere_is_not_copied() -> None:
    pool, parameter = torch.randn(3), torch.randn(3)
    outputs: list[Any] = [parameter, None, 3, pool]
    assert PoolCopies().copy_out(outputs, range(3), pooled(pool)) == 0
    assert outputs[0] is parameter
    assert outputs[3] is pool


def test_dtypes_are_copied_together() -> None:
    pool = [torch.randn(3), torch.arange(4), torch.randn(2, dtype=torch.float64), torch.randn(5)]
    outputs = list(pool)
    PoolCopies().copy_out(outputs, range(4), pooled(*pool))
    assert all(torch.equal(a, b) and a is not b for a, b in zip(outputs, pool, strict=True))


def test_copies_in_inference_mode_are_its_tensors() -> None:
    pool = torch.randn(3)
    outputs = [pool]
    with torch.inference_mode():
        PoolCopies().copy_out(outputs, [0], pooled(pool))
    assert outputs[0].is_inference()


def test_what_is_known_of_outputs_counts_only_where_they_lie_as_they_did() -> None:
    pool, other, copies = torch.randn(4, 6), torch.randn(4, 6), PoolCopies()
    calls: list[tuple[list[Any], int]] = [
        ([pool, other], 1),
        ([pool, other], 1),
        ([other, pool], 1),
        ([pool[1:], pool], 2),
        ([pool, 3], 1),
        ([pool[2:], other], 1),
        ([other, other], 0),
    ]
    for call, count in calls:
        outputs = list(call)
        assert copies.copy_out(outputs, range(2), pooled(pool)) == 96 * bool(count)
        assert sum(copy is not value for copy, value in zip(outputs, call, strict=True)) == count
        for copy, value in zip(outputs, call, strict=True):
            if isinstance(value, torch.Tensor):
                assert torch.equal(copy, value)
                assert copy.stride() == value.stride()


def test_recordings_in_turn_are_each_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plan = pool_copies._Plan
    monkeypatch.setattr(pool_copies, "_Plan", lambda *given: made.append(given) or plan(*given))
    layers, copies = [torch.randn(3) for _ in range(5)], PoolCopies()
    for layer in layers * 3:
        outputs = [layer]
        assert copies.copy_out(outputs, [0], pooled(*layers)) == 12
        assert outputs[0] is not layer
    assert len(made) == 5


def test_what_becomes_memory_of_the_pool_is_copied_from_then_on() -> None:
    tensor, copies = torch.randn(3), PoolCopies()
    assert copies.copy_out([tensor], [0], pooled()) == 0
    assert copies.copy_out([tensor], [0], pooled(tensor)) == 12


def test_places_beyond_the_bound_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_copies, "_PLANS", 2)
    tensors, copies = [torch.randn(3) for _ in range(5)], PoolCopies()
    for tensor in tensors * 2:
        outputs = [tensor]
        assert copies.copy_out(outputs, [0], pooled(*tensors)) == 12
        assert torch.equal(outputs[0], tensor)
    assert len(copies._plans) <= 2
