from typing import Any

import pytest
import torch
import torch.nn.functional as F


def test_equal_seeds_draw_what_the_cpu_draws(sim: Any) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        ones = torch.ones(40, device=device)
        drawn = [
            torch.randn(5, device=device),
            torch.rand(3, device=device),
            F.dropout(ones),
            torch.bernoulli(ones / 2),
        ]
        return [x.cpu() for x in (*drawn, torch.randperm(9, device=device), torch.multinomial(ones, 3))]

    for expected, found in zip(draw("cpu"), draw("sim"), strict=True):
        assert torch.equal(found, expected)


def test_the_cpu_s_own_numbers_are_not_drawn_from(sim: Any) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    F.dropout(torch.ones(40, device="sim"))
    torch.randn(5, device="sim")
    assert torch.equal(torch.rand(3), expected)


def test_a_state_can_be_kept_and_put_back(sim: Any) -> None:
    state = sim.get_rng_state()
    first = torch.rand(4, device="sim")
    assert not torch.equal(torch.rand(4, device="sim"), first)
    sim.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="sim"), first)


def test_each_device_has_a_generator(sim: Any) -> None:
    sim.manual_seed_all(3)
    zero = torch.rand(4, device="sim:0")
    torch.rand(4, device="sim:0")
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), zero.cpu())
    states = sim.get_rng_state_all()
    assert len(states) == sim.device_count()
    sim.set_rng_state_all(states[::-1])
    assert torch.equal(sim.get_rng_state(1), states[0])


def test_a_generator_of_one_s_own(sim: Any) -> None:
    generator = torch.Generator(device="sim:1").manual_seed(5)
    assert generator.device == torch.device("sim", 1)
    before = sim.get_rng_state(1)
    first = torch.randn(3, device="sim:1", generator=generator)
    assert torch.equal(sim.get_rng_state(1), before)
    assert torch.equal(first.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(5)))


def test_a_generator_of_the_host_is_refused(sim: Any) -> None:
    with pytest.raises(RuntimeError, match="'sim' device type for generator"):
        torch.empty(3, device="sim").normal_(generator=torch.Generator())


def test_fork_rng_puts_it_back(sim: Any) -> None:
    state = sim.get_rng_state()
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.rand(3, device="sim")
    assert torch.equal(sim.get_rng_state(), state)
