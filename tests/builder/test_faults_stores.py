"""Files that can't be read or written: the timeline's, and what is kept between processes. The program goes on."""

import errno
import logging
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import EAGER, MESSAGE, WHOLE, Place, check, planted, pretended, program, step
from tiers import fast
from torch import Tensor

import omnicomp
from omnicomp._torch.inductor import store
from omnicomp._torch.inductor.store import folder
from omnicomp.builder import known_failures as verdicts
from omnicomp.lowerings.overrides import trust
from omnicomp.lowerings.overrides.registry import unregister
from omnicomp.passes.dtypes import calibrate, resolve
from omnicomp.timeline import current


class Sink:
    """A sink that raises at some of its writes, with an error of any class."""

    def __init__(self, when: str) -> None:
        self.when, self.writes, self.raised = when, 0, 0

    def write(self, record: dict[str, Any]) -> None:
        self.writes += 1
        if {"first": self.writes == 1, "later": self.writes > 1, "always": True, "never": False}[self.when]:
            self.raised += 1
            raise RuntimeError(MESSAGE)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("when", ["first", "later", "always"])
def test_a_sink_that_raises_is_dropped(when: str, caplog: pytest.LogCaptureFixture) -> None:
    sink, sound = Sink(when), Sink("never")
    current().add_sink("broken", sink)
    current().add_sink("sound", sound)
    expected = step(program)
    torch.testing.assert_close(step(torch.compile(program, backend="omni", options=EAGER)), expected)
    assert sink.raised == 1
    assert not current().has_sink("broken")
    assert sound.writes == len(current()) > 4
    assert [r.levelno for r in caplog.records if MESSAGE in r.getMessage()] == [logging.WARNING]
    assert omnicomp.audit().mismatches == ()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_timeline_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    expected = step(program)
    compiled = torch.compile(program, backend="omni", options={**EAGER, "timeline": "/dev/full"})
    torch.testing.assert_close(step(compiled), expected)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert omnicomp.audit().mismatches == ()


def test_a_timeline_of_which_an_event_can_not_be_written(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    options = {**EAGER, "timeline": str(tmp_path / "timeline.jsonl")}
    assert check(Place("omnicomp.timeline.events", "Event.to_dict", parts=False), "later", options) > 0
    assert MESSAGE in caplog.text


def _forget() -> None:
    calibrate.clear()
    trust.forget()
    resolve.forget()


def uses_verdicts() -> None:
    """One operator can't be built, which is kept for the next process."""
    with pretended(lambda part, names: "cos" in names):
        torch.compiler.reset()
        torch.testing.assert_close(step(torch.compile(program, backend="omni", options=WHOLE)), step(program))


def uses_trust(wrong: bool) -> None:
    """An override is compared with its reference, which is kept for the next process."""

    @omnicomp.override(op=torch.ops.aten.digamma.default, name="stored_digamma")
    def own(x: Tensor) -> Tensor:
        return torch.special.digamma(x) * (2 if wrong else 1)

    try:
        x = torch.rand(5) + 1
        compiled = torch.compile(torch.digamma, backend="omni", options={"lowerings": ["override", "eager"]})
        torch.testing.assert_close(compiled(x), torch.digamma(x))
    finally:
        unregister("stored_digamma")


def uses_calibrations() -> None:
    """Operators are tried in low precision, and the finding is kept for the next process."""
    linear, x = torch.nn.Linear(32, 32), torch.randn(4, 32)
    options = {**EAGER, "dtype_policy": "bf16", "dtype_error": 1e-1}
    with torch.no_grad():
        compiled = torch.compile(lambda x: linear(x).relu() @ linear.weight, backend="omni", options=options)
        found, expected = compiled(x), linear(x).relu() @ linear.weight
    assert (found - expected).norm() <= 0.1 * expected.norm()


def uses_speeds() -> None:
    """The speed of a dtype is measured, and kept for the next process."""
    assert resolve.measured(torch.bfloat16).ratio > 0


USERS: dict[str, Callable[[], None]] = {
    "verdicts": uses_verdicts,
    "trust": lambda: uses_trust(wrong=False),
    "distrust": lambda: uses_trust(wrong=True),
    "calibrations": uses_calibrations,
    "speeds": uses_speeds,
}


@pytest.fixture(params=USERS.values(), ids=USERS)
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Something that keeps a file; each call of it is as in another process."""
    used = 0

    def once() -> None:
        nonlocal used
        used += 1
        monkeypatch.setattr(verdicts, "_PROCESS", f"process {used}")
        torch.compiler.reset()
        _forget()
        request.param()

    _forget()
    yield once
    _forget()


def kept_files() -> list[Path]:
    return [path for path in folder().rglob("*") if path.is_file()]


def test_what_is_kept_is_kept(use: Callable[[], None]) -> None:
    use()
    assert kept_files(), "or the other tests here would prove nothing"
    use()


@pytest.mark.parametrize(
    "content", fast([b"", b"\xff\xfe\x00{", b"[1, 2]", b'{"schema": 1}', None], lambda content: not content), ids=repr
)
def test_files_that_are_damaged_or_can_not_be_read(use: Callable[[], None], content: bytes | None) -> None:
    use()
    for path in kept_files():
        path.unlink()
        if content is None:
            path.mkdir()  # reading and replacing it are errors of the system
        else:
            path.write_bytes(content)
    use()
    use()


def test_a_folder_that_is_a_file(use: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").touch()
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / "occupied"))
    use()
    use()
    assert (tmp_path / "occupied").read_bytes() == b""


def test_a_disk_that_is_full(use: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    full = [0]

    def replace(made: str, path: Path) -> None:
        Path(made).write_bytes(Path(made).read_bytes()[:-7])
        full[0] += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "os", types.SimpleNamespace(**{**vars(os), "replace": replace}))
    use()
    use()
    assert full[0] > 0
    assert not [path for path in kept_files() if path.suffix == ".json"], "half a file is none"


STORES = {
    "verdicts' key": Place("omnicomp.builder.known_failures", "exact_hash"),
    "verdicts read": Place("omnicomp.builder.known_failures", "PartVerdicts.known"),
    "verdicts written": Place("omnicomp.builder.known_failures", "PartVerdicts.add"),
    "script": Place("omnicomp.builder.on_failure", "write_script"),
}


@pytest.mark.parametrize("when", fast(["first", "later", "always"], "first".__eq__))
@pytest.mark.parametrize("place", STORES.values(), ids=STORES)
def test_a_fault_of_the_store_itself(place: Place, when: str) -> None:
    with planted(place, when) as raised:
        uses_verdicts()
        uses_verdicts()
    assert raised[0] > 0
