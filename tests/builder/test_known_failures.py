"""What an earlier process found to fail is known before the first build; nothing kept can break a compilation."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

import omnicomp
from omnicomp._torch.inductor import compile_fx as inductor
from omnicomp._torch.inductor.store import folder, prune, write_whole
from omnicomp.builder import known_failures as verdicts
from omnicomp.builder.known_failures import CACHE, Entry, entries, forget, wrong_code
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering
from omnicomp.timeline import Reason


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What an Inductor that fails on `aten.sin` was asked to build; it computes by eager."""
    asked: list[set[str]] = []

    def planted(module) -> None:
        asked.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        if "aten.sin.default" in asked[-1]:
            raise RuntimeError("planted in sin")

    def whole(module, *rest, **kwargs):
        planted(module)
        raise NotImplementedError("only pieces are built here")

    def lower(lowering, module, inputs, context):
        planted(module)
        built = EagerLowering().lower(module, inputs, context)
        built.lowering = "inductor"
        return built

    monkeypatch.setattr(inductor, "compile_part", whole)
    monkeypatch.setattr(InductorLowering, "lower", lower)
    return asked


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.cos() + 1).sin() * 2


def compile_again(monkeypatch: pytest.MonkeyPatch | None = None, **options) -> None:
    """As another process would: a verdict of this one counts as an earlier one's."""
    if monkeypatch is not None:
        monkeypatch.setattr(verdicts, "_PROCESS", os.urandom(8).hex())
    torch.compiler.reset()
    omnicomp.timeline.clear()
    x = torch.randn(5)
    compiled = torch.compile(program, backend="omni", options={"summary": False, "verify": "off", **options})
    torch.testing.assert_close(compiled(x), program(x))


def events(kind: str) -> list:
    return [e for e in omnicomp.timeline.events() if e.type == kind and getattr(e, "cache", CACHE) == CACHE]


def stored() -> Path:
    (path,) = (folder() / CACHE).glob("*.json")
    return path


def test_the_next_process_does_not_build_what_is_known_to_fail(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again()
    assert any("aten.sin.default" in ops for ops in builds)
    builds.clear()
    compile_again(monkeypatch)
    assert builds == [{"aten.cos.default", "aten.add.Tensor"}, {"aten.mul.Tensor"}]
    (hit,) = events("cache")
    assert (hit.verdict, hit.key) == ("hit", stored().stem)
    (retreat,) = events("retreat")
    assert "planted in sin (known from an earlier process)" in retreat.reason.sentence
    failed = [e for e in events("attempt") if e.lowering == "inductor" and not e.ok and e.reason]
    assert ["known from an earlier process" in e.reason.sentence for e in failed] == [True]


def test_the_same_process_looks_again(builds) -> None:
    compile_again()
    builds.clear()
    compile_again()
    assert any("aten.sin.default" in ops for ops in builds)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 1}', '{"schema": 2, "key": "x"}', "\0\xff", '{"schema": 2, "key": 3}']
)
def test_a_damaged_file_is_a_reason_and_is_found_out_afresh(builds, monkeypatch, text: str) -> None:
    compile_again()
    good = stored().read_text()
    stored().write_text(text)
    compile_again(monkeypatch)
    (event,) = events("cache")
    assert event.verdict == "bypass"
    assert (event.reason.code, event.reason.by) == ("verdict_unusable", "verdicts")
    assert ("damaged" if '"schema": 1' not in text else "another version") in event.note
    assert json.loads(stored().read_text())["value"]["cut"] == json.loads(good)["value"]["cut"]


def test_another_graphs_file_is_damage(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again()
    stored().write_text(stored().read_text().replace(stored().stem, "0" * 40))
    compile_again(monkeypatch)
    assert [e.verdict for e in events("cache")] == ["bypass"]


def test_a_folder_that_is_a_file_costs_only_the_verdict(builds) -> None:
    folder().write_text("in the way")
    compile_again()
    notes = [e.note for e in events("cache")]
    assert any("can't be read" in note for note in notes)
    assert any("not kept" in note for note in notes)
    assert any("no script was written" in note for note in notes)


@pytest.mark.parametrize("options", [{"fx_graph_cache": False}, {"verdicts": "off"}])
def test_disabled_caches_keep_nothing(builds, options: dict) -> None:
    compile_again(**options)
    assert not (folder() / CACHE).exists()


def test_caches_that_are_disabled_as_a_whole_keep_nothing(builds) -> None:
    with torch.compiler.config.patch(force_disable_caches=True):
        compile_again()
    assert not (folder() / CACHE).exists()


def test_it_can_be_found_out_again(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again()
    builds.clear()
    monkeypatch.setenv("OMNICOMP_VERDICTS", "forget")
    compile_again(monkeypatch)
    assert any("aten.sin.default" in ops for ops in builds)


def test_an_error_that_shall_be_raised_is_raised_again(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again()
    with pytest.raises(Exception, match="planted in sin"):
        compile_again(monkeypatch, on_error="raise")


def test_other_shapes_dtypes_and_settings_are_other_graphs(builds) -> None:
    keys = []
    for x, options in [
        (torch.randn(5), {}),
        (torch.randn(6), {}),
        (torch.randn(5).double(), {}),
        (torch.randn(10)[::2], {}),
        (torch.randn(5), {"max_autotune": True}),
        (torch.randn(5), {"disable_passes": ["dtype_policy"]}),
    ]:
        before = {path.stem for path, _ in entries()}
        torch.compiler.reset()
        torch.compile(program, backend="omni", dynamic=False, options={"summary": False, "verify": "off", **options})(x)
        keys += [path.stem for path, _ in entries() if path.stem not in before]
    assert len(set(keys)) == 6


def test_a_replaced_lowering_is_another_inductor(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    compile_again()
    for _ in range(2):
        monkeypatch.setitem(lowering.lowerings, torch.ops.aten.cos.default, lambda x: x)
        compile_again(monkeypatch)
        assert len(entries()) == 2


def test_other_compilers_and_more_builds_find_out_afresh(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(max_builds=0)
    assert json.loads(stored().read_text())["value"]["builds"] == 0
    compile_again(monkeypatch, max_builds=0)
    assert [e.verdict for e in events("cache")] == ["hit"]
    compile_again(monkeypatch)
    assert [(e.verdict, "more are allowed" in e.note) for e in events("cache")] == [("miss", True)]
    monkeypatch.setattr(verdicts, "compilers", lambda device: "another")
    compile_again(monkeypatch)
    assert [(e.verdict, "other compilers" in e.note) for e in events("cache")] == [("miss", True)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tuning"), OSError(28, "no space"), TimeoutError("slow")])
def test_what_depends_on_the_moment_or_machine_is_not_kept(monkeypatch, error: Exception) -> None:
    def whole(*rest, **kwargs):
        raise error

    def lower(lowering, module, inputs, context):
        if any(str(node.target) == "aten.sin.default" for node in module.graph.nodes):
            raise error
        return EagerLowering().lower(module, inputs, context)

    monkeypatch.setattr(inductor, "compile_part", whole)
    monkeypatch.setattr(InductorLowering, "lower", lower)
    compile_again()
    assert entries() == []


def _write_often(path: Path, letter: str) -> None:
    for _ in range(100):
        write_whole(path, letter * 20000)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(path, letter)) for letter in "ab"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            seen.add(path.read_text())
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {"a" * 20000, "b" * 20000}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    for index in range(6):
        path = tmp_path / f"{index}.json"
        path.write_text("")
        os.utime(path, (index, index))
    prune(tmp_path, ".json", keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["4.json", "5.json"]


def test_what_is_too_large_is_not_kept(builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts.STORE, "_size", 10)
    compile_again()
    assert entries() == []
    assert any("too many" in e.note for e in events("cache"))


def test_an_entry_survives_its_text() -> None:
    entry = Entry(
        key="k",
        graph="g0.forward",
        writer="w",
        time=1.5,
        compilers="c",
        builds=3,
        cut={"sin": Reason(code="cut_out", sentence="s", lever="l")},
        boundaries=frozenset({"cos"}),
        values=True,
        scripts=("a.py",),
    )
    assert Entry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry


def test_forgetting_removes_what_is_chosen_and_the_mark_of_wrong_code(tmp_path: Path) -> None:
    for key, values in (("a", True), ("b", False)):
        assert verdicts.STORE.write(key, Entry(key=key, values=values)) == ""
    verdicts._mark_wrong("a")
    assert wrong_code()
    assert forget(lambda entry: entry.key == "b") == 1
    assert wrong_code()
    assert forget() == 1
    assert (entries(), wrong_code()) == ([], "")
