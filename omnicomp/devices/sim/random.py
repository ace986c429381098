"""Random numbers of the simulated device. Equal seeds draw what the CPU draws."""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch

from omnicomp.devices.sim.driver import DRIVER, device_index

F = TypeVar("F", bound=Callable[..., Any])


def _not_compiled(function: F) -> F:
    """Dynamo calls it and does not look into it: a generator is nothing that a graph could hold."""
    return cast("F", torch.compiler.disable(function))


@_not_compiled
def _generator(device: Any = None) -> torch.Generator:
    return DRIVER.default_generator(device_index(device))


default_generators: Final[tuple[torch.Generator, ...]] = tuple(
    map(DRIVER.default_generator, range(DRIVER.device_count()))
)
"""The default generator of each device, as in `torch.cuda`."""


@_not_compiled
def manual_seed(seed: int) -> None:
    """Seed the current device. Equal seeds give the CPU's random numbers."""
    _generator().manual_seed(seed)


@_not_compiled
def manual_seed_all(seed: int) -> None:
    """Seed all devices. Equal seeds give the CPU's random numbers."""
    for generator in default_generators:
        generator.manual_seed(seed)


@_not_compiled
def seed() -> None:
    """Seed the current device from the machine's source of chance."""
    _generator().seed()


@_not_compiled
def seed_all() -> None:
    """Seed all devices, equally, from the machine's source of chance."""
    manual_seed_all(_generator(0).seed())


def initial_seed() -> int:
    """The seed of the current device."""
    return _generator().initial_seed()


@_not_compiled
def get_rng_state(device: Any = "sim") -> torch.Tensor:
    """State of a device's generator: uint8 on the CPU, 1-D."""
    return _generator(device).get_state()


@_not_compiled
def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices' generators."""
    return [get_rng_state(index) for index in range(DRIVER.device_count())]


@_not_compiled
def set_rng_state(new_state: torch.Tensor, device: Any = "sim") -> None:
    """Put a device's generator into a state that `get_rng_state` gave."""
    _generator(device).set_state(new_state)


@_not_compiled
def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put the generators of all devices into states that `get_rng_state_all` gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
