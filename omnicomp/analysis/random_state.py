"""Random numbers: which nodes draw them, and the state of torch's default generators, taken and put back."""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import Node

from omnicomp import records
from omnicomp.analysis.nodes import op_name

SEEDS: Final = ("prims.inductor_seed", "prims.inductor_lookup_seed")
"""Inductor's operators that make a seed."""

SEEDED: Final = ("prims.inductor_random", "prims.inductor_randint")
"""Inductor's operators that make random numbers of a seed."""


@records.dataclass(frozen=True)
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


def draws_at_random(node: Node) -> bool:
    """Whether a node of a post-autograd graph draws random numbers."""
    if op_name(node).startswith((*SEEDS, *SEEDED, "rngprims.")):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _drops_nothing(node)


def _drops_nothing(node: Node) -> bool:
    """Whether it is attention with `dropout_p=0`."""
    schema: Any = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return bool((node.args[position] if position < len(node.args) else default) == 0)
    return False
