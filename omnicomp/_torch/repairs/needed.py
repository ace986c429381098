"""Which releases of torch need a repair, and where torch's own repair is discussed."""

import dataclasses
import re

import torch

__all__ = ["Needed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needed:
    """The releases of torch that have a fault.

    Attributes:
        first: the oldest supported release that has it.
        fixed: the first release that was seen without it; empty while none was.
        issue: torch's issue or pull request; empty where nobody reported it, and the repair has a reproducer.
    """

    first: str
    fixed: str = ""
    issue: str = ""

    @property
    def here(self) -> bool:
        """Whether the torch of this process has the fault; nightly builds count as the release that they lead to."""
        return self.of(torch.__version__)

    def of(self, version: str) -> bool:
        """Whether a release has the fault."""
        return _release(self.first) <= _release(version) and not (
            self.fixed and _release(self.fixed) <= _release(version)
        )


def _release(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
