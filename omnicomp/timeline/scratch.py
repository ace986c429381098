"""A timeline aside: what is recorded in a trial is no part of what ran, and is kept apart from it."""

import contextlib
from collections.abc import Generator

from omnicomp.timeline import recorder
from omnicomp.timeline.recorder import Timeline

__all__ = ["drafting"]


@contextlib.contextmanager
def drafting(draft: Timeline) -> Generator[None]:
    """Inside, in this thread, `current()` is the draft."""
    token = recorder.drafts.set(draft)
    try:
        yield
    finally:
        recorder.drafts.reset(token)
