"""The cache of what engines compiled: in memory, on disk, damaged, and limited in size."""

import os
import time
from pathlib import Path
from typing import Any

import fake_engines as fake
import pytest
import torch
from concurrency import in_threads

import omnicomp
from omnicomp.lowerings.engines.store import Store, key_of, limit, prune, store
from omnicomp.timeline import Ran

X = torch.randn(4, 6)


class Made:
    """Something that a weak reference can be held to."""

    def __init__(self, data: bytes = b"body") -> None:
        self.data = data


def folder() -> Path:
    return Path(os.environ["OMNICOMP_CACHE_DIR"]) / "engines"


def files() -> list[Path]:
    return sorted(folder().glob("*/*.bin"))


def get(own: Store, key: str = "k", *, made: list[Made] | None = None) -> tuple[Made, str]:
    def make() -> Made:
        found = Made()
        if made is not None:
            made.append(found)
        return found

    found, source = own.get(key, "e", make, Made, lambda made: made.data)  # type: ignore[attr-defined]
    assert isinstance(found, Made)
    return found, source


def test_memory_then_disk() -> None:
    own = Store()
    first, source = get(own)
    assert source == "compiled"
    assert get(own) == (first, "memory")
    assert [path.name for path in files()] == ["k.bin"]
    second, source = get(Store())
    assert (source, second.data) == ("disk", b"body")
    own.clear()
    assert get(own)[1] == "disk"


def test_what_nobody_uses_is_not_held() -> None:
    own = Store()
    get(own)
    assert get(own)[1] == "disk"  # the first was freed


def test_one_that_keeps_nothing() -> None:
    own = Store()
    held = own.get("k", "e", Made, None, None)
    assert held[1] == "compiled"
    assert own.get("k", "e", Made, None, None)[1] == "memory"
    assert own.get("l", "e", Made, Made, lambda made: None)[1] == "compiled"
    assert files() == []


@pytest.mark.parametrize("damage", ["", "cut", "changed", "no hash"])
def test_a_damaged_file_is_compiled_again(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    get(Store())
    (path,) = files()
    data = path.read_bytes()
    path.write_bytes(
        {"": b"", "cut": data[:-1], "changed": data[:-1] + b"!", "no hash": b"\xff" * 64 + data[64:]}[damage]
    )
    found, source = get(Store())
    assert (source, found.data) == ("compiled", b"body")
    assert "k.bin is damaged, so it is compiled again" in caplog.text
    assert path.read_bytes() == data


def test_a_file_that_can_not_be_loaded_is_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    get(Store())

    def load(data: bytes) -> object:
        raise ValueError("made by another library")

    _, source = Store().get("k", "e", Made, load, lambda made: None)
    assert source == "compiled"
    assert "k.bin can't be loaded, so it is compiled again: ValueError: made by another library" in caplog.text
    assert files() == []


def test_a_folder_that_can_not_be_written(caplog: pytest.LogCaptureFixture) -> None:
    folder().parent.mkdir(parents=True, exist_ok=True)
    folder().write_text("a file is in the way")
    found, source = get(Store())
    assert (source, found.data) == ("compiled", b"body")
    assert "k.bin can't be kept" in caplog.text


def test_what_can_not_be_dumped_runs_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def dump(made: object) -> bytes:
        raise RuntimeError("no serialiser")

    assert Store().get("k", "e", Made, Made, dump)[1] == "compiled"
    assert "k.bin can't be kept: RuntimeError: no serialiser" in caplog.text
    assert files() == []


def test_a_failed_build_leaves_nothing() -> None:
    own = Store()

    def make() -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        own.get("k", "e", make, Made, lambda made: b"")
    assert get(own)[1] == "compiled"


def test_threads_that_ask_for_one_key_get_one() -> None:
    own, made, found = Store(), list[Made](), list[Made]()

    def make() -> Made:
        time.sleep(0.05)
        made.append(Made())
        return made[-1]

    def work(_: int) -> None:
        result, _ = own.get("k", "e", make, None, None)
        found.append(result)  # type: ignore[arg-type]

    in_threads(work)
    assert len(made) == 1
    assert {id(each) for each in found} == {id(made[0])}


def test_the_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_ENGINE_CACHE_BYTES", str(3 * (64 + 1000)))
    for number in range(5):
        engine = f"e{number % 2}"
        Store().get(str(number), engine, lambda: Made(bytes(1000)), Made, lambda made: made.data)  # type: ignore[attr-defined]
        (path,) = folder().glob(f"*/{number}.bin")
        os.utime(path, (number, number))
    assert {path.stem for path in files()} == {"2", "3", "4"}
    # What is read is used; the one that was not goes.
    Store().get("2", "e0", Made, Made, None)
    Store().get("9", "e0", lambda: Made(bytes(1000)), Made, lambda made: made.data)  # type: ignore[attr-defined]
    assert {path.stem for path in files()} == {"2", "4", "9"}


def test_a_file_beyond_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "3"):
        monkeypatch.setenv("OMNICOMP_ENGINE_CACHE_BYTES", text)
        get(Store())
        assert files() == []


@pytest.mark.parametrize(("text", "expected"), [("", 2 * 2**30), ("100", 100), ("-5", 0), ("much", 2 * 2**30)])
def test_the_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, expected: int) -> None:
    monkeypatch.setenv("OMNICOMP_ENGINE_CACHE_BYTES", text)
    assert limit() == expected
    assert ("is no number of bytes" in caplog.text) == (text == "much")


def test_nothing_to_prune(tmp_path: Path) -> None:
    prune(tmp_path / "nothing", 0)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "other.txt").write_text("stays")
    prune(tmp_path, 0)
    assert (tmp_path / "e" / "other.txt").exists()


def test_every_part_changes_the_key() -> None:
    keys = {key_of("a", 1), key_of("a", 2), key_of("b", 1), key_of("a", [1]), key_of("a"), key_of()}
    assert len(keys) == 6
    assert all(len(key) == 64 for key in keys)
    assert key_of("a", 1) == key_of("a", 1)


# With an engine.


def run(model: Any, **values: Any) -> str:
    """Compile anew and call; where it came from."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    options: dict[str, Any] = {
        "lowerings": ["fake_disk", "eager"], "on_error": "raise", "engines": {"fake_disk": values},
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="omni", options=options)(X), model(X))
    (ran,) = [event for event in omnicomp.timeline.events() if isinstance(event, Ran)]
    return ran.evidence.partition("from ")[2].partition(";")[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fake.OnDisk, "loaded", [])
    return fake.installed(monkeypatch, fake.OnDisk)


def test_another_process_finds_it_on_disk(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(6, 3).eval()
    assert run(model) == "compiled"
    store.clear()
    assert run(model) == "disk"
    assert (len(engine.builds), len(engine.loaded)) == (1, 1)


def test_what_is_not_in_the_key_by_mistake_would_be_wrong(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = torch.nn.Linear(6, 3).eval()
    assert run(model) == "compiled"
    with torch.no_grad():
        model.weight.mul_(2)
    assert run(model) == "compiled"  # other contents
    assert run(model, workspace_bytes=100) == "compiled"  # another option
    monkeypatch.setattr(fake.OnDisk, "version", lambda self: "1.1")
    assert run(model) == "compiled"  # another version
    assert run(torch.nn.Sequential(model, torch.nn.ReLU())) == "compiled"  # another graph
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert run(model) == "compiled"  # other threads
    finally:
        torch.set_num_threads(threads)
    store.clear()
    assert run(model) == "disk"


def test_a_damaged_executable_gives_right_values(engine: Any) -> None:
    model = torch.nn.Linear(6, 3).eval()
    run(model)
    (path,) = files()
    path.write_bytes(path.read_bytes()[:100])
    store.clear()
    assert run(model) == "compiled"
