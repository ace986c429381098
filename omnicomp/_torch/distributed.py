"""torch.distributed: process groups, and the store that the ranks of a job share.

Nothing here communicates by a collective: a rank that restores from a cache what another one compiles would skip it.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from omnicomp import records
from omnicomp._torch.autograd.attention import SDPA

_UNSHARED: Final = ("fake", "threaded")  # process groups whose other ranks are no processes
_PREFIX: Final = "omnicomp"


@records.dataclass(frozen=True, kw_only=True)
class Job:
    """The processes of the default process group."""

    rank: int  # of this process
    size: int  # how many there are
    limit: float  # seconds that torch waits for a rank
    _store: Any

    def put(self, key: str, text: str) -> None:
        """Store a text under a key."""
        self._store.set(f"{_PREFIX}/{key}", text)

    def has(self, key: str) -> bool:
        """Whether there is a text under a key."""
        return bool(self._store.check([f"{_PREFIX}/{key}"]))

    def get(self, key: str) -> str | None:
        """The text of a key, or None; never waits."""
        return self._store.get(f"{_PREFIX}/{key}").decode() if self.has(key) else None

    def get_all(self, keys: Sequence[str]) -> list[str] | None:
        """The texts of all keys, or None while one is missing; never waits. Two messages, however many keys."""
        names = [f"{_PREFIX}/{key}" for key in keys]
        return [text.decode() for text in self._store.multi_get(names)] if self._store.check(names) else None

    def add(self, key: str) -> int:
        """Count one more under a key, which has no text beside; how many there are."""
        return int(self._store.add(f"{_PREFIX}/{key}", 1))

    def settle(self, key: str, text: str) -> str:
        """Store a text if there is none; the text that is there."""
        return self._store.compare_set(f"{_PREFIX}/{key}", "", text).decode()

    @property
    def ends_with_us(self) -> bool:
        """Whether the store ends with this process: it is rank 0's, unless an agent of torchrun keeps it."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def job() -> Job | None:
    """The job that this process belongs to, or None if it has no other process."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return None
    size = distributed.get_world_size()
    if size < 2 or distributed.get_backend() in _UNSHARED:
        return None
    store = distributed._get_default_store()
    return Job(rank=distributed.get_rank(), size=size, limit=store.timeout.total_seconds(), _store=store)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group, in order; none if there is no such group."""
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return tuple(sorted(torch.distributed.get_process_group_ranks(_resolve_process_group(group))))
    except (RuntimeError, KeyError, ValueError):
        return ()


def groups_of_values(values: Sequence[Any]) -> tuple[str, ...]:
    """The names of the process groups over which tensors among some values are spread (DTensor)."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    meshes: list[Any] = [getattr(tensor, "device_mesh", None) for tensor in tensors]
    groups = (group for mesh in meshes if mesh is not None for group in mesh.get_all_groups())
    return tuple(dict.fromkeys(group.group_name for group in groups))


def is_spread(value: Any) -> bool:
    """Whether a tensor is spread over the ranks of a mesh (DTensor)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole_on_ranks(values: Sequence[Any], dims: int) -> bool:
    """Whether distributed tensors are sharded evenly, all alike, and along no dimension but the first ones."""
    meshes = [value.device_mesh for value in values]
    placements = [value.placements for value in values]
    if any(mesh != meshes[0] for mesh in meshes) or any(each != placements[0] for each in placements):
        return False
    ways = dict.fromkeys(range(dims), 1)
    for size, placement in zip(meshes[0].shape, placements[0], strict=True):
        if type(placement).__name__ == "Shard" and placement.dim in ways:
            ways[placement.dim] *= size
        elif not placement.is_replicate():
            return False
    return all(value.shape[dim] % count == 0 for value in values for dim, count in ways.items())


def placements_of(value: Any) -> str:
    """How a distributed tensor is sharded, one word for each dimension of its mesh."""
    return " ".join(map(repr, value.placements))


def local_attention(query: Any, key: Any, value: Any, *, scale: float, is_causal: bool, enable_gqa: bool) -> Any:
    """`scaled_dot_product_attention` of each rank's own batches and heads, where `whole_on_ranks` holds.

    DTensor would look for a sharding of the kernel itself. It has no rule for the one of CPUs, and what it tries then
    takes minutes (torch 2.13).
    """
    shards = [each.to_local() for each in (query, key, value)]
    made = SDPA(*shards, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)
    return type(query).from_local(made, query.device_mesh, query.placements, run_check=False)


def identity() -> str:
    """Of this process, for `is_gone`."""
    return f"{socket.gethostname()} {os.getpid()}"


def is_gone(process: str) -> bool:
    """Whether a process of this host has ended; False for one of another host."""
    host, _, pid = process.rpartition(" ")
    if host != socket.gethostname() or not sys.platform.startswith("linux"):
        return False
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return os.path.exists("/proc/self/stat")
    except OSError:
        return False


class Pause:
    """The pauses between two looks at the store: from a millisecond to a fifth of a second, or 0.2 ms for each rank.

    So the ranks of a large group look no more than 5 000 times a second, all together.

    Attributes:
        limit: seconds after which there are no more looks.
        longest: seconds between two looks, at most.
    """

    def __init__(self, limit: float, ranks: int = 1) -> None:
        self._seconds, self._start, self.limit = 0.001, time.monotonic(), limit
        self.longest = max(0.2, ranks / 5000)

    @property
    def waited(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._start

    def sleep(self) -> None:
        """Wait a little."""
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.5, self.longest)
