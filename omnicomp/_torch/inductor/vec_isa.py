"""The vector instruction sets of the processor, of which the best is tested first, and no other one if it works.

Inductor takes the best set that the processor, the compiler and torch have. To find it, torch compiles and loads a test
for each set that the processor knows, ten tests on one with AMX, before it takes the first. That takes seconds of a
first build; what later processes take again is the loading, which on torch 2.11 imports torch each time. Torch 2.11 and
2.13 do so (https://github.com/pytorch/pytorch/issues/140970).
"""

import functools
import itertools
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch._inductor import cpu_vec_isa

from omnicomp._torch.repairs.needed import Exchange


class LazyISAs(Sequence[Any]):
    """What torch takes for the list of the sets that work; each is tested when it is asked for, once."""

    def __init__(self, known: list[Any]) -> None:
        """Take those that the processor has, the best one first."""
        self._known = known

    def __iter__(self) -> Iterator[Any]:
        """Those that work."""
        return (each for each in self._known if each)

    def __bool__(self) -> bool:
        """Whether one works."""
        return any(self._known)

    def __len__(self) -> int:
        """How many work, all of which are tested for that."""
        return sum(map(bool, self._known))

    def __getitem__(self, index: Any) -> Any:
        """One of those that work, by its place."""
        begins = isinstance(index, int) and index >= 0  # those behind it need no test
        return (list(itertools.islice(self, index + 1)) if begins else list(self))[index]


def isas_of_processor() -> LazyISAs | None:
    """The sets of an x86 processor; None for others, which torch asks for theirs without a test."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    flags = set(cpu_vec_isa.x86_isa_checker())
    return LazyISAs([each for each in cpu_vec_isa.supported_vec_isa_list if set(str(each).split()) <= flags])


def _lazily(original: Callable[[], Any]) -> Callable[[], Any]:
    @functools.cache
    def valid() -> Any:
        sets = isas_of_processor()
        return original() if sets is None else sets

    return valid


isas_tested_lazily: Final = Exchange(cpu_vec_isa, "valid_vec_isa_list", _lazily)
"""Inside, no set is tested once a better one works; on whatever thread."""
