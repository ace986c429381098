"""What torch's compile caches hold, as bytes that its `load_cache_artifacts` reads: of this process, or of a folder.

They are pickles, and reading them runs code: who calls `fill` has to know where the bytes come from.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import torch
from torch._inductor.codecache import CacheBase
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager, _serialize_single_cache
from torch.utils._appending_byte_serializer import AppendingByteSerializer

from omnicomp.safety.privacy import logger

log = logger("omnicomp.artefacts")


def of_process() -> tuple[bytes, dict[str, int]]:
    """What this process built or found in the caches, and how many entries each cache has."""
    made = torch.compiler.save_cache_artifacts()
    if made is None:
        return b"", {}
    return made[0], {name: len(keys) for name, keys in made[1].artifacts.items()}


def of_folder() -> tuple[bytes, dict[str, int]]:
    """What Inductor's cache folder holds, likewise."""
    CacheArtifactManager._ensure_cache_artifacts_registered()
    found: dict[str, list[Any]] = {}
    for cache, key, path in _files(Path(cache_dir())):
        try:
            found.setdefault(cache, []).append(CacheArtifactFactory.create(cache, key, path.read_bytes()))
        except FileNotFoundError:
            continue  # another process cleans up
    serializer = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    serializer.extend(found.items())
    return serializer.to_bytes() if found else b"", {name: len(entries) for name, entries in found.items()}


def _files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Cache, key and file of each entry; a key may have several."""
    for path in sorted(chain(folder.glob("fxgraph/*/*/*"), folder.glob("aotautograd/*/*"))):
        if not path.name.startswith("."):
            graph = path.relative_to(folder).parts[0] == "fxgraph"
            yield "inductor" if graph else "aot_autograd", path.parent.name, path
    for path in sorted(folder.glob("dynamo/*/entry")):
        yield "precompile", path.parent.name, path
    for path in sorted(folder.glob("*/*.best_config")):
        yield "autotune", str(path.relative_to(folder)), path


def read(data: bytes) -> list[CacheArtifact]:
    """The entries that bytes hold; nothing is unpickled.

    Raises:
        ValueError: they are no entries of this torch, or a key leads out of its folder, which torch would follow.
    """
    found = CacheArtifactManager.deserialize(data)
    if found is None:
        raise ValueError("torch can't read its cache entries")
    entries = list(chain.from_iterable(found.values()))
    for entry in entries:
        if PurePath(entry.key).is_absolute() or ".." in PurePath(entry.key).parts:
            raise ValueError(f"{entry.key[:80]!r} is no key of an entry")
    return entries


def fill(entries: Sequence[CacheArtifact]) -> dict[str, int]:
    """Write entries into the caches of this machine; returns how many each cache took."""
    taken: Counter[str] = Counter()
    for entry in entries:
        try:
            entry.populate_cache()
        except Exception as error:  # noqa: BLE001 - what it was for is compiled, and the log says why
            log.warning(
                "omni: an entry of the cache %s can't be used: %s: %s", entry.type(), type(error).__name__, error
            )
        else:
            taken[entry.type()] += 1
    return dict(taken)


def hardware() -> str:
    """The accelerator that compiled code is for, as the keys of torch's caches have it; `cpu` without one."""
    system: Any = CacheBase.get_system()
    name = system.get("device", {}).get("name")
    if name:
        versions = (f"{key} {value}" for key, value in sorted(system["version"].items()) if key != "triton")
        return f"{name}, {', '.join(versions)}"
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
