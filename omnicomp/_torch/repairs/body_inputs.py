"""Where code that a backward calls several times overwrites what it is given.

The backward may overwrite some of its inputs, and knows them by their numbers. Inductor takes the inputs of a body that
the backward calls for those of the same numbers, and computes in place what a later call, or a weight, still needs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._inductor.graph import SubgraphLowering

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", issue="https://github.com/pytorch/pytorch/pull/193960")


def _giving_nothing(original: Callable[..., None]) -> Callable[..., None]:
    """The constructor, after which no input of a body may be overwritten."""

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.bw_donated_idxs = None

    return init


_INIT: Final = Exchange(SubgraphLowering, "__init__", _giving_nothing)


def inputs_kept() -> AbstractContextManager[None]:
    """Inside, no body that Inductor lowers overwrites its inputs."""
    return NEEDED.exchanging(_INIT)
