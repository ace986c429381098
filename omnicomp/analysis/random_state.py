"""The state of torch's default generators: taken before something that may have to be undone, and put back."""

import dataclasses
from collections.abc import Iterable

import torch

__all__ = ["GeneratorStates", "default_generators", "generator_states"]


@dataclasses.dataclass(frozen=True)
class GeneratorStates:
    """States of generators at one moment."""

    states: tuple[tuple[torch.Generator, torch.Tensor], ...]

    @classmethod
    def of(cls, generators: Iterable[torch.Generator]) -> "GeneratorStates":
        """Read the states; about a microsecond each. Not while a CUDA graph is recorded, which keeps its own."""
        return cls(tuple([(generator, generator.get_state()) for generator in generators]))

    def restore(self) -> None:
        """Put them back."""
        for generator, state in self.states:
            generator.set_state(state)

    def changed(self) -> bool:
        """Whether one of the generators has drawn since."""
        return any(not torch.equal(state, generator.get_state()) for generator, state in self.states)


def default_generators(devices: Iterable[torch.device]) -> tuple[torch.Generator, ...]:
    """The default generators of some devices, each once; devices without one are passed over."""
    found: dict[torch.device, torch.Generator] = {}
    for device in devices:
        if device.type == "cpu":
            found[device] = torch.default_generator
            continue
        known = getattr(torch.get_device_module(device), "default_generators", ())
        index: int = device.index or 0
        if index < len(known):
            found[torch.device(device.type, index)] = known[index]
    return tuple(found.values())


def generator_states(devices: Iterable[torch.device]) -> GeneratorStates:
    """The states of the default generators of some devices, and of the CPU."""
    return GeneratorStates.of(default_generators([torch.device("cpu"), *devices]))
