"""Where Inductor forgets that a buffer is written to before it is read, and so puts the reader first.

`a = x[i]` as a result and `a + zeros.index_put((j,), s)` are two loops, over rows and columns and over all elements. To
fuse them, Inductor's C++ generator works out the second anew in the shape of the first, and what it then takes it to
read is the zeros, and no longer what was made of them: the sum comes out without `s`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

from omnicomp._torch.repairs.needed import Exchange, Needed

NEEDED: Final = Needed(first="2.11", fixed="2.15", issue="https://github.com/pytorch/pytorch/issues/185509")


def _keeping_renames(original: Callable[..., None]) -> Callable[..., None]:
    """The method, after which what it did is done once more at worst, and changes nothing then."""

    def recompute(self: Any, *arguments: Any, **named: Any) -> None:
        by_hand: OrderedSet[Any] = OrderedSet(
            dep for dep in self.read_writes.reads if isinstance(dep, (StarDep, WeakDep))
        )
        original(self, *arguments, **named)
        self.set_read_writes(self.read_writes.with_read(by_hand).rename(self.mutation_renames))

    return recompute


_RENAMES: Final = Exchange(SchedulerNode, "recompute_size_and_body", _keeping_renames)


def written_before_read() -> AbstractContextManager[None]:
    """Inside, a loop that is worked out anew still waits for whatever writes to what it reads."""
    return NEEDED.exchanging(_RENAMES)
