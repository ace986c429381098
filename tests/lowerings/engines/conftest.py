"""Engines are not tried in another process in each of these tests; those of the trial itself ask for it."""

from collections.abc import Iterator

import pytest

from omnicomp.lowerings import engines
from omnicomp.lowerings.engines.store import store
from omnicomp.lowerings.engines.trial import VARIABLE
from omnicomp.options import engine_names


@pytest.fixture(autouse=True)
def fresh_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled is left from other tests, and engines that a test has installed are gone behind it."""
    monkeypatch.setenv(VARIABLE, "0")
    store.clear()
    yield
    monkeypatch.undo()
    engine_names.engine_names.cache_clear()
    engines.resolve_engine.cache_clear()
