"""Files of artefacts: what was compiled is not compiled again, and what does not fit or is not trusted is left alone.

Parts whose operators are all on eager are kept by Inductor's cache, and no compiler builds them.
"""

import hashlib
import json
import os
import pickle
import struct
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from torch import Tensor
from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager, _serialize_single_cache
from torch.utils._appending_byte_serializer import AppendingByteSerializer

import omnicomp
from omnicomp._torch.inductor import libraries, store
from omnicomp._torch.inductor.store import JsonStore
from omnicomp.backend import artefacts
from omnicomp.errors import SaveError
from omnicomp.timeline import Artefacts, Cache, current

NUMBERS = JsonStore[int]("numbers", int, int)
EAGER = {"aten.sin": "eager", "aten.mm": "eager"}
Use = Callable[[str], Path]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Go to a machine: its folders are its own, and nothing of another one is in memory."""
    monkeypatch.setattr(store, "_used", {})
    monkeypatch.setattr(libraries, "_used", {})
    monkeypatch.delenv(artefacts.KEY, raising=False)

    def go(name: str) -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path / name / "omnicomp"))
        store._used.clear()
        CacheArtifactManager.clear()
        torch.compiler.reset()
        omnicomp.timeline.clear()
        return tmp_path / name

    return go


def compiled(**options: Any) -> tuple[Tensor, list[str]]:
    """What a function gives, and what the caches said."""
    torch.compiler.reset()
    function = torch.compile(
        lambda x: torch.sin(x) @ x, backend="omni", options={"lowerings": EAGER, "summary": False, **options}
    )
    x = torch.arange(9.0).reshape(3, 3)
    found = function(x)
    torch.testing.assert_close(found, torch.sin(x) @ x)
    return found, [event.verdict for event in current() if isinstance(event, Cache) and event.cache == "aot_autograd"]


def ran() -> list[tuple[str, Any, str]]:
    return [(row.lowering, row.ran, row.identity) for row in omnicomp.audit().subgraphs]


def told() -> list[str]:
    return [event.state for event in current() if isinstance(event, Artefacts)]


def forged(path: Path, contents: list[tuple[str, str, bytes]], **changes: Any) -> None:
    """A file with a right hash, as anybody can make one."""
    manifest = {
        "made_for": artefacts.fingerprint(),
        "instructions": (),
        "compiler": "",
        "entries": [(kind, name, len(content)) for kind, name, content in contents],
        **changes,
    }
    said = json.dumps(manifest).encode()
    body = struct.pack(">Q", len(said)) + said + b"".join(content for _, _, content in contents)
    path.write_bytes(b"omnicomp artefacts 1\n" + hashlib.sha256(body).hexdigest().encode() + b" -\n" + body)


def test_another_machine_compiles_nothing_and_says_what_it_loaded(use: Use, tmp_path: Path) -> None:
    use("one")
    assert compiled()[1] == ["miss"]
    NUMBERS.write("seven", 7)
    saved = omnicomp.save(tmp_path / "file")
    rows = ran()
    use("two")
    loaded = omnicomp.load(tmp_path / "file")
    assert (loaded.state, loaded.counts, loaded.bytes) == ("loaded", saved.counts, saved.bytes)
    assert loaded.counts == {"inductor": 1, "aot_autograd": 1, "decision": 1}
    assert compiled()[1] == ["hit"]
    assert NUMBERS.read("seven") == (7, "")
    audit = omnicomp.audit()
    assert [each.path for each in audit.artefacts] == [str(tmp_path / "file")]
    assert "artefacts loaded:" in " ".join(str(audit).split())
    assert audit.mismatches == ()
    assert ran() == rows


def test_what_a_machine_found_out_itself_stays(use: Use, tmp_path: Path) -> None:
    use("one")
    NUMBERS.write("seven", 7)
    NUMBERS.write("eight", 8)
    omnicomp.save(tmp_path / "file")
    use("two")
    NUMBERS.write("seven", 0)
    omnicomp.load(tmp_path / "file")
    assert [NUMBERS.read(key)[0] for key in ("seven", "eight")] == [0, 8]


def test_a_process_saves_what_it_used_and_an_export_all_that_there_is(use: Use, tmp_path: Path) -> None:
    use("one")
    compiled()
    NUMBERS.write("seven", 7)
    store._used.clear()
    CacheArtifactManager.clear()
    assert omnicomp.save(tmp_path / "file").counts == {}
    assert artefacts.export(tmp_path / "all").counts == {"inductor": 1, "aot_autograd": 1, "decision": 1}
    use("two")
    omnicomp.load(tmp_path / "all")
    assert compiled()[1] == ["hit"]


def test_what_dynamo_keeps_in_a_folder_travels_with_it(use: Use, tmp_path: Path) -> None:
    entry = Path("dynamo", "0" * 64, "entry")
    one = use("one") / entry
    one.parent.mkdir(parents=True)
    one.write_bytes(b"a function")
    assert artefacts.export(tmp_path / "all").counts == {"precompile": 1}
    two = use("two") / entry
    assert omnicomp.load(tmp_path / "all").counts == {"precompile": 1}
    assert two.read_bytes() == b"a function"


@pytest.mark.parametrize("name", ["torch", "omnicomp", "device", "python", "triton", "platform", "instructions"])
def test_a_file_for_something_else_is_a_miss_with_a_reason(
    name: str, use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use("one")
    forged(tmp_path / "file", [("torch", "caches", b"\x80")], made_for={**artefacts.fingerprint(), name: "another"})
    found = omnicomp.load(tmp_path / "file")
    assert (found.state, told(), found.counts) == ("missed", ["missed"], {})
    assert found.reason is not None
    assert f"they were made for {name} another, and this process has" in found.reason.sentence
    assert "artefacts missed:" in str(omnicomp.audit())
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_processor_that_lacks_instructions_is_a_miss(use: Use, tmp_path: Path) -> None:
    use("one")
    forged(tmp_path / "file", [], instructions=("avx9000",))
    reason = omnicomp.load(tmp_path / "file").reason
    assert reason is not None
    assert "a processor that has avx9000" in reason.sentence


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "hash", "empty", "text"])
def test_a_damaged_file_is_refused_and_nothing_of_it_runs(damage: str, use: Use, tmp_path: Path) -> None:
    folder = use("one")
    file, trap = tmp_path / "file", tmp_path / "trap"
    forged(file, [("torch", "caches", pickle.dumps(Planted(trap))), ("decision", "numbers/a.json", b"{}")])
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-4] ^= 1
    elif damage == "hash":
        data[25] ^= 1
    changed = {"cut": data[:-1], "longer": data + b" ", "empty": b"", "text": b"hello\n" * 99}.get(damage, data)
    file.write_bytes(changed)
    with pytest.raises(SaveError, match=r"damaged|no file of artefacts"):
        omnicomp.load(file)
    assert not trap.exists()
    assert not [path for path in folder.rglob("*") if path.is_file()]


HOSTILE: dict[str, dict[str, Any]] = {
    "above": {"entries": [("decision", "../../stolen.json", 1)]},
    "absolute": {"entries": [("decision", "/tmp/stolen.json", 1)]},
    "hidden": {"entries": [("decision", "numbers/..json", 1)]},
    "code": {"entries": [("decision", "numbers/stolen.py", 1)]},
    "engine": {"entries": [("engine", "engines/../stolen.bin", 1)]},
    "size": {"entries": [("decision", "numbers/a.json", 2)]},
    "negative": {"entries": [("decision", "numbers/a.json", -1), ("decision", "numbers/b.json", 2)]},
    "shape": {"entries": 7},
    "library": {"entries": [("library", "../stolen", 1)]},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(changes: dict[str, Any], use: Use, tmp_path: Path) -> None:
    folder = use("one")
    forged(tmp_path / "file", [("decision", "numbers/a.json", b"x")], **changes)
    with pytest.raises(SaveError):
        omnicomp.load(tmp_path / "file")
    assert not list(tmp_path.rglob("*stolen*"))
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_key_is_asked_for_where_one_is_given(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("one")
    NUMBERS.write("seven", 7)
    omnicomp.save(tmp_path / "plain")
    omnicomp.save(tmp_path / "signed", key="secret")
    use("two")
    assert omnicomp.load(tmp_path / "signed", key=b"secret").state == "loaded"
    assert omnicomp.load(tmp_path / "signed").state == "loaded"
    with pytest.raises(SaveError, match="signed with another key"):
        omnicomp.load(tmp_path / "signed", key="other")
    monkeypatch.setenv(artefacts.KEY, "secret")
    with pytest.raises(SaveError, match="has no signature"):
        omnicomp.load(tmp_path / "plain")
    assert omnicomp.load(tmp_path / "signed").state == "loaded"


def test_a_file_that_others_may_write_to_needs_a_signature(use: Use, tmp_path: Path) -> None:
    use("one")
    file = tmp_path / "file"
    omnicomp.save(file, key="secret")
    file.chmod(0o666)
    with pytest.raises(SaveError, match=r"other users may write to .* sign it"):
        omnicomp.load(file)
    assert omnicomp.load(file, key="secret").state == "loaded"


def test_a_missing_file_and_a_full_disk_say_what_is_wrong(use: Use, tmp_path: Path) -> None:
    use("one")
    with pytest.raises(SaveError, match=r"can't be read: .*No such file"):
        omnicomp.load(tmp_path / "none")
    (tmp_path / "text").write_text("")
    with pytest.raises(SaveError, match="can't be written"):
        omnicomp.save(tmp_path / "text" / "file")


def test_known_failures_are_merged(use: Use, tmp_path: Path) -> None:
    folder = use("one") / "omnicomp"
    folder.mkdir(parents=True)
    (folder / "wrong").write_text("a\nb\n")
    artefacts.export(tmp_path / "file")
    folder = use("two") / "omnicomp"
    folder.mkdir(parents=True)
    (folder / "wrong").write_text("b\nc\n")
    omnicomp.load(tmp_path / "file")
    assert (folder / "wrong").read_text() == "b\nc\na\n"


def test_an_entry_that_torch_can_not_use_costs_that_entry_alone(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use("one")
    compiled()
    omnicomp.save(tmp_path / "file")
    use("two")
    from torch._inductor.codecache import InductorCacheArtifact

    def fail(self: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(InductorCacheArtifact, "populate_cache", fail)
    assert omnicomp.load(tmp_path / "file").counts == {"aot_autograd": 1}
    assert "can't be used: OSError: no room" in caplog.text
    compiled()


PROGRAM = """
import sys, torch, omnicomp
torch.manual_seed(0)
how, file = sys.argv[1:]
if how == "load": assert omnicomp.load(file).state == "loaded"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))
def attention(x): return (x @ x.mT / 3).softmax(-1) @ torch.digamma(x.abs() + 1)
f, g = (torch.compile(each, backend="omni", options={"summary": False}) for each in (model, attention))
h = torch.compile(attention, backend="omni", options={"summary": False, "lowerings": {"aten.digamma": "eager"}})
def step():
    model.zero_grad()
    loss = f(torch.ones(4, 8)).square().sum()
    loss.backward()
    return loss, *(each.grad for each in model.parameters())
expected = model(torch.ones(4, 8)).square().sum()
torch.testing.assert_close(step()[0], expected)
x = torch.randn(2, 4, 8)
for each in (g, h): torch.testing.assert_close(each(x), attention(x))
audit = omnicomp.audit()
assert not audit.mismatches
lowerings = {row.ran for row in audit.subgraphs}
assert lowerings == {"inductor", "eager"}, lowerings
verdicts = {(e.cache, e.verdict) for e in omnicomp.timeline.events() if e.type == "cache"}
if how == "load":
    assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    assert {verdict for _, verdict in verdicts} == {"hit"}, verdicts
else:
    print(omnicomp.save(file).counts)
assert len(audit.sites.fused) == 2
"""


def environment_in(folder: Path) -> Path:
    """The interpreter of another virtual environment, in whose folder everything of this one can be found."""
    venv.create(folder, symlinks=True, with_pip=False)
    own = Path(sysconfig.get_path("purelib"))
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in own.iterdir():
        (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.inductor
def test_a_container_without_a_compiler_runs_what_another_one_built(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", tmp_path / "bin"
    empty.mkdir()

    def machine(name: str, **more: str) -> dict[str, str]:
        (tmp_path / name).mkdir()
        return {"HOME": str(tmp_path / name), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name / "cache"), **more}

    python("-c", PROGRAM, "save", file, environment=machine("one"), fresh=True, check=True)
    other = environment_in(tmp_path / "environment")
    where = python("-c", "import torch; print(torch.__file__)", interpreter=other, check=True).stdout
    assert where.startswith(str(tmp_path / "environment"))
    python("-c", PROGRAM, "load", file, environment=machine("two", PATH=str(empty)), interpreter=other, check=True)
    assert not list((tmp_path / "two").rglob("*.cpp"))


@pytest.mark.inductor
def test_a_library_is_found_by_its_identity_before_a_compiler_is_asked(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = use("one")
    name = libraries.identity(libraries.CppCodeCache, "code", None, "cpu", ())
    libraries.put(name, b"a library")
    asked: list[str] = []
    monkeypatch.setattr(libraries.CppCodeCache, "_load_library", lambda path, key: asked.append(path) or "loaded")
    assert libraries.CppCodeCache.load("code") == "loaded"
    assert asked == [str(folder / "omnicomp" / "libraries" / f"{name}.so")]
    os.chmod(asked[0], 0o666)
    assert libraries._known(libraries.CppCodeCache, name) is None
    with torch._inductor.config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        assert libraries.identity(libraries.CppCodeCache, "code", None, "cpu", ()) != name


@pytest.mark.parametrize("kind", ["inductor", "aot_autograd", "autotune", "precompile", ""])
def test_entries_of_torch_that_lead_elsewhere_or_are_none_are_refused_whole(
    kind: str, use: Use, tmp_path: Path
) -> None:
    folder, trap = use("one"), tmp_path / "trap"
    written: Any = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    hostile = pickle.dumps(Planted(trap))
    if kind:
        written.append((kind, [CacheArtifactFactory.create(kind, "../../stolen", hostile)]))
    content = written.to_bytes() if kind else hostile
    forged(tmp_path / "file", [("decision", "numbers/a.json", b"{}"), ("torch", "caches", content)])
    with pytest.raises(SaveError, match=r"no key of an entry|torch can't read"):
        omnicomp.load(tmp_path / "file")
    assert not trap.exists()
    assert not list(tmp_path.rglob("*stolen*"))
    assert not [path for path in folder.rglob("*") if path.is_file()]
