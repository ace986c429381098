"""Shared fixtures: one cache folder for all compilations, a clean timeline and a reset compiler for each test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: C++ compilation is the slowest part of the suite, and is shared across tests and
# runs. The folder can be set from outside, and is thrown away with the checkout otherwise.
CACHE = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "inductor")))
CACHE.mkdir(parents=True, exist_ok=True)
os.environ.pop("OMNICOMP_TIMELINE", None)

import reports  # noqa: E402
import torch  # noqa: E402

import omnicomp  # noqa: E402
from omnicomp.audit.views import jsonform  # noqa: E402


@pytest.fixture(autouse=True)
def clean_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with nothing compiled, nothing recorded, no known failures and the same random numbers."""
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "omnicomp"))
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    written = jsonform.to_dict
    monkeypatch.setattr(jsonform, "to_dict", lambda audit: reports.check(written(audit)))
    yield
    if len(omnicomp.timeline.current()):
        reports.check_audit(omnicomp.audit())
    torch.compiler.reset()
    omnicomp.timeline.clear()
