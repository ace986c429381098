"""Each test of engines begins with nothing compiled, and with the declared engines alone."""

from collections.abc import Iterator

import pytest

from omnicomp.lowerings import engines
from omnicomp.lowerings.engines.store import store
from omnicomp.options import checks


@pytest.fixture(autouse=True)
def fresh_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled is left from other tests, and engines that a test has installed are gone behind it."""
    store.clear()
    yield
    monkeypatch.undo()
    checks.engine_names.cache_clear()
    engines.resolve_engine.cache_clear()
