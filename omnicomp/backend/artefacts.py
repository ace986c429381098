"""A file of artefacts: all that this machine, or this process, keeps of compilations, for another one of the same kind.

The file is two lines and a body. The first line names the format, the second has the SHA-256 of the body and its HMAC
by a key, or `-`. The body is a manifest in JSON, behind its length, and the contents of the entries, one after another.
Nothing of the body is read before the hash is right, and nothing is unpickled before the manifest says that it was made
for this machine, these versions and these sources. Torch's entries are pickles (docs/security.md).
"""

import dataclasses
import hashlib
import hmac
import json
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import omnicomp
from omnicomp import records
from omnicomp._torch.inductor import compile_caches, libraries, store, versions
from omnicomp.backend.capture import attach_all
from omnicomp.errors import SaveError, first_line
from omnicomp.options.digest import package_digest
from omnicomp.options.policy import parse
from omnicomp.timeline import Artefacts, Reason, current

KEY: Final = "OMNICOMP_ARTEFACT_KEY"
_MAGIC: Final = b"omnicomp artefacts 1\n"
_SECOND: Final = re.compile(rb"([0-9a-f]{64}) ([0-9a-f]{64}|-)\n")
_MOST_OF_HEAD: Final = len(_MAGIC) + 130
_LENGTH: Final = struct.Struct(">Q")
_MOST_BYTES: Final = 4 * 2**30
_MOST_OF_MANIFEST: Final = 64 * 2**20
# Of omnicomp's own folder: what a file is allowed to bring, by where it goes.
_OWN: Final = re.compile(
    r"(?:[a-z_]+/){1,2}[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,200}\.json|engines/[\w-]+/[0-9a-f]{64}\.bin"
)
_MOST_OF_OWN: Final = 2**20
_LOCAL: Final = ("key_components", "libraries")
_WRONG: Final = "wrong"
# Instructions that a compiler may use by itself where it builds for the machine at hand.
_INSTRUCTIONS: Final = re.compile(r"avx|sse|ssse|fma|f16c|bmi|adx|popcnt|movbe|abm|lzcnt|gfni|asimd|sve|fp|crc|atomics")


@records.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a file of artefacts says of itself."""

    made_for: dict[str, str]  # versions, sources, device and machine; all of it has to be the same where it is loaded
    instructions: tuple[str, ...]  # of the processor; where it is loaded, it needs all of them
    compiler: str  # that built what it holds; for people
    entries: tuple[tuple[str, str, int], ...]  # kind, name and size of each, in the order of their contents
    signed: bool = False  # whether the file has a signature


def save(path: str | os.PathLike[str], *, key: str | bytes | None = None) -> Artefacts:
    """Write all that this process compiled, decided and measured to one file, for `load`.

    Args:
        path: of the file.
        key: signs the file; by default that of the environment variable `OMNICOMP_ARTEFACT_KEY`, if there is one.

    Returns:
        What was written.

    Raises:
        SaveError: the file can't be written.
    """
    return _write(Path(path), key, compile_caches.of_process(), libraries.used(), store.used())


def export(path: str | os.PathLike[str], *, key: str | bytes | None = None) -> Artefacts:
    """Write all that the cache folders of this machine hold to one file, as `save` does for a process."""
    return _write(Path(path), key, compile_caches.of_folder(), libraries.kept(), own_files())


def load(path: str | os.PathLike[str], *, key: str | bytes | None = None) -> Artefacts:
    """Fill the caches of this machine from a file that `save` wrote; call it before the first compilation.

    A file for other versions, sources, devices or machines is a miss: nothing is taken from it, and the timeline has
    the reason. What this machine has decided or measured itself stays.

    Args:
        path: of the file.
        key: what the file has to be signed with; by default that of the environment variable `OMNICOMP_ARTEFACT_KEY`.
            Without one, the file must belong to this user or to root, and others must not be able to write to it.

    Returns:
        What was taken, or the reason of the miss.

    Raises:
        SaveError: the file is damaged, not signed as it has to be, or not trusted; or a cache can't be written to.
    """
    path = Path(path)
    manifest, body = _read(path, key)
    reason = _difference(manifest)
    counts: Counter[str] = Counter()
    if reason is None:
        try:
            counts.update(_fill(manifest, body))
        except (OSError, ValueError) as error:
            raise SaveError(f"the artefacts of {path} can't be used: {first_line(error)}") from error
    state = "loaded" if reason is None else "missed"
    size = path.stat().st_size
    return _told(Artefacts(path=str(path), state=state, counts=dict(counts), bytes=size, reason=reason))


def describe(path: str | os.PathLike[str], *, key: str | bytes | None = None) -> tuple[Manifest, Reason | None]:
    """What a file holds, and why it is a miss here, if it is; nothing is taken from it.

    Raises:
        SaveError: as `load` does.
    """
    manifest, _ = _read(Path(path), key)
    return manifest, _difference(manifest)


def own_files() -> list[Path]:
    """The files of omnicomp's folder that a file of artefacts has room for."""
    folder = store.folder()
    found = [folder / _WRONG, *sorted(folder.rglob("*.json")), *sorted(folder.glob("engines/*/*.bin"))]
    return [path for path in found if path.is_file()]


def _write(
    path: Path,
    key: str | bytes | None,
    compiled: tuple[bytes, dict[str, int]],
    built: dict[str, Path],
    own: list[Path],
) -> Artefacts:
    contents: list[tuple[str, str, bytes]] = [("torch", "caches", compiled[0])] if compiled[0] else []
    counts = Counter(compiled[1])
    for kind, name, file in [*_named(own), *(("library", name, file) for name, file in sorted(built.items()))]:
        try:
            content = file.read_bytes() if kind == "library" else store.read_trusted(file)
        except OSError:
            continue  # it is gone, or not to be trusted
        contents.append((kind, name, content))
        counts[kind] += 1
    manifest = Manifest(
        made_for=fingerprint(),
        instructions=instructions(),
        compiler=versions.compilers("cuda" if torch.version.cuda else "cpu"),
        entries=tuple((kind, name, len(content)) for kind, name, content in contents),
    )
    said = json.dumps({k: v for k, v in dataclasses.asdict(manifest).items() if k != "signed"}).encode()
    body = b"".join([_LENGTH.pack(len(said)), said, *(content for _, _, content in contents)])
    if len(body) > _MOST_BYTES:
        raise SaveError(
            f"{path} is not written: its {len(body)} bytes are more than {_MOST_BYTES}, which is what load reads; "
            "prune the cache folder first"
        )
    secret = _secret(key)
    signature = b"-" if secret is None else hmac.new(secret, body, "sha256").hexdigest().encode()
    head = _MAGIC + hashlib.sha256(body).hexdigest().encode() + b" " + signature + b"\n"
    try:
        store.write_whole(path.absolute(), head + body, files=None)
    except OSError as error:
        raise SaveError(f"{path} can't be written: {error}") from error
    return _told(Artefacts(path=str(path), state="saved", counts=dict(counts), bytes=len(head) + len(body)))


def _named(files: list[Path]) -> Iterator[tuple[str, str, Path]]:
    """Kind and name of the files of omnicomp's folder, as far as they are of use elsewhere."""
    folder = store.folder()
    for file in dict.fromkeys(files):
        name = file.relative_to(folder).as_posix() if file.is_relative_to(folder) else ""
        if name == _WRONG or (_OWN.fullmatch(name) and name.split("/")[0] not in _LOCAL):
            yield "engine" if name.endswith(".bin") else "decision", name, file


def _read(path: Path, key: str | bytes | None) -> tuple[Manifest, memoryview]:
    """The manifest and the contents of a file whose hash and signature are right.

    Raises:
        SaveError: they are not, or the file is not trusted.
    """
    secret = _secret(key)
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if secret is None:
                store.check_trusted(state, path, group=False)
            if state.st_size > _MOST_BYTES + _MOST_OF_HEAD:
                raise SaveError(f"{path} is refused: its {state.st_size} bytes are more than {_MOST_BYTES}")
            magic, second = file.read(len(_MAGIC)), file.readline(200)
            if magic != _MAGIC:
                raise SaveError(f"{path} is no file of artefacts of this version; omnicomp.save writes one")
            match = _SECOND.fullmatch(second)
            body = file.read(_MOST_BYTES + 1)
    except PermissionError as error:
        raise SaveError(f"{path} is refused: {error}; sign it, and give the key to save and load") from error
    except OSError as error:
        raise SaveError(f"{path} can't be read: {error}") from error
    if match is None or len(body) > _MOST_BYTES or hashlib.sha256(body).hexdigest().encode() != match[1]:
        raise SaveError(f"{path} is damaged, and nothing was taken from it: save it again")
    if secret is not None:
        signature = hmac.new(secret, body, "sha256").hexdigest().encode()
        if not hmac.compare_digest(signature, match[2]):
            why = "has no signature" if match[2] == b"-" else "is signed with another key"
            raise SaveError(f"{path} is refused: it {why}; save it with the key that load is given")
    try:
        manifest, begin = _manifest(body, signed=match[2] != b"-")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise SaveError(f"{path} is refused: its manifest can't be read ({first_line(error)})") from error
    return manifest, memoryview(body)[begin:]


def _manifest(body: bytes, *, signed: bool) -> tuple[Manifest, int]:
    (length,) = _LENGTH.unpack_from(body)
    begin = _LENGTH.size + length
    if length > _MOST_OF_MANIFEST or begin > len(body):
        raise ValueError("its length is wrong")
    data: dict[str, Any] = json.loads(body[_LENGTH.size : begin])
    entries = tuple((str(kind), str(name), int(size)) for kind, name, size in data["entries"])
    if any(size < 0 for _, _, size in entries) or sum(size for _, _, size in entries) != len(body) - begin:
        raise ValueError("the sizes of its entries are wrong")
    for kind, name, size in entries:
        own = kind in ("decision", "engine") and name != _WRONG
        if (own and not _OWN.fullmatch(name)) or (kind == "library" and not libraries.IDENTITY.fullmatch(name)):
            raise ValueError(f"{name[:80]!r} is no name of an entry")
        if kind == "decision" and size > _MOST_OF_OWN:
            raise ValueError(f"{name} is too large")
    manifest = Manifest(
        made_for={str(name): str(value) for name, value in data["made_for"].items()},
        instructions=tuple(map(str, data["instructions"])),
        compiler=str(data["compiler"]),
        entries=entries,
        signed=signed,
    )
    return manifest, begin


def _fill(manifest: Manifest, body: memoryview) -> dict[str, int]:
    contents: list[tuple[str, str, bytes]] = []
    begin = 0
    for kind, name, size in manifest.entries:
        contents.append((kind, name, bytes(body[begin : begin + size])))
        begin += size
    compiled = [entry for kind, _, content in contents if kind == "torch" for entry in compile_caches.read(content)]
    counts: Counter[str] = Counter()
    take: dict[str, Callable[[str, bytes], None]] = {"library": libraries.put, "decision": _put, "engine": _put}
    for kind, name, content in contents:
        if kind in take:
            take[kind](name, content)
            counts[kind] += 1
    counts.update(compile_caches.fill(compiled))  # last: what it holds calls the rest
    return dict(counts)


def _put(name: str, content: bytes) -> None:
    """Write a file into omnicomp's folder, unless this machine has one: what it found out itself stays."""
    path = store.folder() / name
    if name == _WRONG:
        known = store.read_trusted(path) if path.exists() else b""
        more = [line for line in content.splitlines(keepends=True) if line not in known.splitlines(keepends=True)]
        content = known + b"".join(more)
    elif path.exists():
        return
    store.write_whole(path, content, files=None)


def _difference(manifest: Manifest) -> Reason | None:
    """Why a file was made for something else than this process; None if it was not."""
    here = fingerprint()
    for name in dict.fromkeys((*here, *manifest.made_for)):
        theirs, ours = manifest.made_for.get(name, "unknown"), here.get(name, "unknown")
        if theirs != ours:
            return _miss(f"they were made for {name} {theirs}, and this process has {ours}", theirs, ours)
    lacking = sorted(set(manifest.instructions) - set(instructions()))
    if lacking:
        listed = ", ".join(lacking[:8])
        return _miss(f"they were made for a processor that has {listed}, and this one lacks them", listed, "")
    return None


def _miss(sentence: str, observed: str, needed: str) -> Reason:
    return Reason(
        code="artefacts_differ",
        by="artefacts",
        sentence=f"nothing was taken from the file of artefacts: {sentence}",
        observed=observed,
        needed=needed,
        lever="save them with the versions and on the kind of machine that they are loaded on",
    )


def fingerprint() -> dict[str, str]:
    """What artefacts have to be made for, to be of use in this process."""
    return {
        "torch": f"{torch.__version__} ({(torch.version.git_version or '')[:12]})",
        "omnicomp": f"{omnicomp.__version__} ({package_digest()[:12]})",
        "device": compile_caches.hardware(),
        **libraries.machine(),
    }


def instructions() -> tuple[str, ...]:
    """The vector instructions of this machine's processor; none where they can't be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return tuple(sorted(word for word in line[1].split() if _INSTRUCTIONS.match(word))) if line else ()


def _secret(key: str | bytes | None) -> bytes | None:
    key = key or os.environ.get(KEY) or None
    return key.encode() if isinstance(key, str) else key


def _told(event: Artefacts) -> Artefacts:
    timeline = current()
    attach_all(timeline, parse(None, None))
    timeline.append(event)
    return event


libraries.watch()
