"""What a program reads of an input is what it held before the program wrote to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import lowering
from torch._inductor.fx_passes import post_grad

from omnicomp._torch.repairs.written_while_read import NEEDED, read_before_overwritten, sources_kept
from omnicomp.timeline import Ran, Retreat, current


@torch.library.custom_op("omnicomp_test_while_read::turned_around", mutates_args=("x",))
def turned_around(x: Tensor, source: Tensor) -> None:
    for place in range(len(x)):
        x[place] = source[-1 - place]


def rows_move(x: Tensor, y: Tensor) -> Any:
    x[1:] = x[:-1].clone()
    return x


def a_list_is_added_to(x: Tensor, y: Tensor) -> Any:
    torch._foreach_add_([x, y], [x.flip(0), y.flip(1)])
    return x * 2


def lists_that_read_each_other(x: Tensor, y: Tensor) -> Any:
    torch._foreach_add_([x, y], [y * 2, x * 3])
    return x.sum(), y.sum()


def written_by_index_before(x: Tensor, y: Tensor) -> Any:
    x.index_copy_(0, torch.tensor([1, 3]), y[:2])
    x.add_(x.flip(0))
    return x.flip(1)


def rows_copied_by_index(x: Tensor, y: Tensor) -> Any:
    x.index_copy_(0, torch.tensor([1, 3]), x[:2].clone())
    y.index_put_((torch.tensor([2, 0]),), y[1:3] * 1)
    y.mul_(2)
    y.index_copy_(0, torch.tensor([1, 3]), y[:2].clone())
    places = y.round().long() % 4
    places.index_put_((places[:, 0].clone(),), places.flip(0))
    return places


def swapped(x: Tensor, y: Tensor) -> Any:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def turned_round_three(x: Tensor, y: Tensor) -> Any:
    z = torch.empty_like(x)
    z.copy_(y)
    y.copy_(x)
    x.copy_(z)
    return z


def copied_then_increased(x: Tensor, y: Tensor) -> Any:
    y[0:] = x[0:]
    x.add_(1)


def sums_of_sums(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    y.add_(x)
    x.add_(y)
    return x + y


def read_behind_a_write(x: Tensor, y: Tensor) -> Any:
    x[1:] = y[:-1]
    y.copy_(x)
    return y * x


def read_through_another_dtype(x: Tensor, y: Tensor) -> Any:
    z = x.view(torch.int16) * 2
    x[:, 1:3] = y[:, 1:3]
    y.copy_(x.view(torch.int16).sum(1, keepdim=True))
    return z, x.view(torch.int16)


def an_operator_reads_a_clone(x: Tensor, y: Tensor) -> Any:
    turned_around(x, x.clone())
    return x * y


def masked_before_it_has_strides(x: Tensor, y: Tensor) -> Any:
    z = x - 1
    z[(x < 0) | (y > 0)] = 0
    return z * 2, z.sum()


PROGRAMS = [
    rows_move,
    a_list_is_added_to,
    lists_that_read_each_other,
    written_by_index_before,
    rows_copied_by_index,
    swapped,
    turned_round_three,
    copied_then_increased,
    sums_of_sums,
    read_behind_a_write,
    read_through_another_dtype,
    an_operator_reads_a_clone,
    masked_before_it_has_strides,
]


@pytest.mark.inductor
@pytest.mark.parametrize("program", PROGRAMS)
@torch.no_grad()
def test_inputs_are_read_as_they_were(program: Callable[..., Any]) -> None:
    mine, eagers = ([torch.arange(16.0).view(4, 4) - 5, torch.arange(16.0).view(4, 4).cos()] for _ in range(2))
    found = torch.compile(program, backend="omni")(*mine)
    torch.testing.assert_close(found, program(*eagers))
    torch.testing.assert_close(mine, eagers)
    assert {event.lowering for event in current() if isinstance(event, Ran)} == {"inductor"}
    assert not [event for event in current() if isinstance(event, Retreat)]


@pytest.mark.parametrize("program", [swapped, an_operator_reads_a_clone])
@torch.no_grad()
def test_without_inductors_code_too(program: Callable[..., Any]) -> None:
    mine, eagers = ([torch.arange(16.0).view(4, 4) - 5, torch.arange(16.0).view(4, 4).cos()] for _ in range(2))
    torch.compile(program, backend="omni", options={"lowerings": ["eager"]})(*mine)
    program(*eagers)
    torch.testing.assert_close(mine, eagers)


@pytest.mark.inductor
@torch.no_grad()
def test_what_is_read_where_it_is_written_needs_no_copy() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        x.mul_(0.9).add_(y, alpha=0.1)

    from torch._inductor.utils import run_and_get_code

    _, (code,) = run_and_get_code(torch.compile(step, backend="omni"), torch.ones(4, 4), torch.ones(4, 4))
    assert "empty_strided_cpu((" not in code


def test_inductor_is_as_it_was_afterwards() -> None:
    before = lowering.mutate_to, post_grad.remove_noop_ops
    with sources_kept():
        assert (post_grad.remove_noop_ops is not before[1]) == NEEDED.here
        with read_before_overwritten():
            assert (lowering.mutate_to is not before[0]) == NEEDED.here
        assert (post_grad.remove_noop_ops is not before[1]) == NEEDED.here
    assert (lowering.mutate_to, post_grad.remove_noop_ops) == before
