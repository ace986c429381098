"""Options of the suite, and shared fixtures: one seed for what is drawn, one cache folder for all compilations."""

import gc
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # as on machines that only tests of a device are run on
    settings = None

# Before torch is imported anywhere. C++ compilation is the slowest part of the suite, and is shared by tests, workers
# and runs; the folder can be set from outside. Each worker is one thread, as there is one worker for each core.
CACHE = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "inductor")))
CACHE.mkdir(parents=True, exist_ok=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor compiles a test of the processor's vector instructions in each cache folder (4 s), and each process loads it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.pop("OMNICOMP_TIMELINE", None)
# Kernels of Triton run on tensors of the CPU where there is no GPU; Triton reads this when it is imported.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The second one is for the slow tier: `--hypothesis-profile=many`.
if settings:
    for name, examples in (("few", 40), ("many", 100)):
        settings.register_profile(
            name,
            max_examples=examples,
            deadline=None,
            derandomize=False,
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
    settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="draw what the run with this seed drew (its header names it)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed; xdist's workers find it in the environment."""
    given = config.getoption("seed")
    seed = str(secrets.randbelow(2**32) if given is None else given)
    if given is not None or "OMNICOMP_TEST_SEED" not in os.environ:
        os.environ["OMNICOMP_TEST_SEED"] = seed
    config.option.hypothesis_seed = os.environ["OMNICOMP_TEST_SEED"]


def pytest_report_header() -> str:
    return f"seed: {os.environ['OMNICOMP_TEST_SEED']} (--seed draws the same again)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("drawn")


@pytest.fixture(autouse=True, scope="session")
def imported() -> None:
    """Import what nearly all tests need, and keep the garbage collector from visiting it again and again."""
    # Imported here, as the process that hands tests out to workers needs none of it.
    import processes

    processes.import_torch()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def clean_state(imported: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with nothing compiled, nothing recorded, no known failures and the same random numbers."""
    import reports
    import torch

    import omnicomp
    from omnicomp.audit.views import jsonform
    from omnicomp.lowerings.overrides import trust

    monkeypatch.delenv("COLUMNS", raising=False)  # workers of pytest-xdist have one
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "omnicomp"))
    torch.compiler.reset()
    omnicomp.timeline.clear()
    trust.forget()
    torch.manual_seed(0)
    written = jsonform.to_dict
    monkeypatch.setattr(jsonform, "to_dict", lambda audit: reports.check(written(audit)))
    yield
    if len(omnicomp.timeline.current()):
        reports.check_audit(omnicomp.audit())
    torch.compiler.reset()
    omnicomp.timeline.clear()


@pytest.fixture
def own_overrides() -> Iterator[None]:
    """Overrides that a test declares are gone after it."""
    from omnicomp.lowerings.overrides.registry import registered, unregister

    before = {item.name for item in registered()}
    yield
    for item in registered():
        if item.name not in before:
            unregister(item.name)
