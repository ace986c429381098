import functools
import itertools
from typing import Any

import pytest
import torch
from torch._inductor.cudagraph_trees import StorageWeakRefWrapper

from omnicomp._torch.inductor import cuda_graphs
from omnicomp._torch.inductor.cuda_graphs import all_are_dead, held_once
from omnicomp._torch.inductor.recordable import Piece


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def test_a_tensor_that_autograd_alone_saves_is_held() -> None:
    tensors = [torch.ones(3)]
    assert held_once(tensors, 0)
    result = Saves.apply(torch.ones(3, requires_grad=True), tensors[0])
    assert not held_once(tensors, 0)
    result.sum().backward()
    assert held_once(tensors, 0)
    also = tensors[0]
    assert not held_once(tensors, 0)
    del also
    assert held_once(tensors, 0)


@pytest.mark.parametrize("known", [True, False])
def test_all_are_dead_once_nobody_holds_a_tensor_a_view_or_what_autograd_saved(known: bool) -> None:
    tensors: list[Any] = [torch.ones(3) for _ in range(3)]
    storages = [tensor.untyped_storage() for tensor in tensors]  # torch's nodes have them in Python, too
    checks = [functools.partial(held_once, tensors, at) if known else None for at in range(3)]
    references = [None, *map(StorageWeakRefWrapper, tensors, checks)]
    if not known:
        del storages
        held = tensors.pop()
        tensors.clear()
        assert not all_are_dead(references)
        del held
        assert all_are_dead(references)
        return
    assert all_are_dead(references)
    also = tensors[1]
    assert not all_are_dead(references)
    also = also[1:]
    assert not all_are_dead(references)
    del also
    result = Saves.apply(torch.ones(3, requires_grad=True), tensors[2])
    assert not all_are_dead(references)
    result.sum().backward()
    assert all_are_dead(references)
    assert all(reference is None or reference.expired() for reference in references)


class Dropped:
    def __init__(self) -> None:
        self.held, self.shut_down = True, False

    def live(self) -> bool:
        return self.held

    def shutdown(self) -> None:
        self.shut_down = True


def test_a_dropped_pool_is_freed_once_nothing_of_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [Dropped(), Dropped()]
    monkeypatch.setattr(cuda_graphs, "_retired", list(pools))
    monkeypatch.setattr(cuda_graphs, "capturing", lambda: False)
    pools[1].held = False
    cuda_graphs.release_retired()
    assert [pool.shut_down for pool in pools] == [False, True]
    pools[0].held = False
    monkeypatch.setattr(cuda_graphs, "capturing", lambda: True)
    cuda_graphs.release_retired()
    assert not pools[0].shut_down  # in the middle of a capture of the program's own
    monkeypatch.setattr(cuda_graphs, "capturing", lambda: False)
    cuda_graphs.release_retired()
    assert pools[0].shut_down
    assert not cuda_graphs._retired


class Bookkeeping(cuda_graphs.Trees):
    """Trees whose first call ends in an error of torch's own check of the pool, behind the model or in front of it."""

    def __init__(self, *, behind: bool = True) -> None:
        self.behind = behind
        self.failure, self.plain, self._recording, self._ran = "", 0, False, False
        self.ids_to_stack_traces, self.ids_to_funcs, self.id_to_mode, self.id_to_compile_id = {}, {}, {}, {}
        self.func_counter = itertools.count()

    def run(self, new_inputs: list[Any], function_id: Any) -> Any:
        if self.behind:
            self.ids_to_funcs[function_id].model(new_inputs)
        raise RuntimeError("Detected 1 tensor(s) in the cudagraph pool not tracked as outputs.\nDebugging: ...")


@pytest.mark.parametrize("behind", [True, False])
def test_a_failed_check_of_the_pool_gives_the_pool_up_and_keeps_the_results(
    behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_set_cached_tensors_enabled", lambda _: None)
    trees, calls = Bookkeeping(behind=behind), itertools.count()
    piece = Piece(part="inference", static=(), mutated=(), constants=(), placeholders=())
    call = trees.recorded(piece, lambda inputs: [next(calls), *inputs])
    assert call([7]) == [0, 7]
    assert trees.failure == "recording failed: Detected 1 tensor(s) in the cudagraph pool not tracked as outputs."
    assert call([8]) == [1, 8]  # plainly


def test_an_error_of_the_program_in_a_warm_up_is_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_set_cached_tensors_enabled", lambda _: None)
    trees = Bookkeeping()
    piece = Piece(part="inference", static=(), mutated=(), constants=(), placeholders=())

    def fails(inputs: list[Any]) -> Any:
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="the program's own"):
        trees.recorded(piece, fails)([7])
    assert not trees.failure


def test_an_error_of_a_replay_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_set_cached_tensors_enabled", lambda _: None)
    trees = Bookkeeping(behind=False)
    piece = Piece(part="inference", static=(), mutated=(), constants=(), placeholders=())
    node = Node()
    monkeypatch.setattr(trees, "run", lambda inputs, function_id: trees.execute_node(node, inputs))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the device is lost"):
        trees.recorded(piece, lambda inputs: [])([7])
    assert not trees.failure


class Node:
    def run(self, inputs: list[Any]) -> Any:
        raise RuntimeError("the device is lost")


class Memory:
    """What torch says of a device's memory, in MiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = self.pool_allocated = self.allocated = self.peak = self.reserved = 0
        self.free, self.total = 100_000, 100_000
        self.trees = cuda_graphs.Trees.__new__(cuda_graphs.Trees)
        self.trees.device_index, self.trees.cuda_graphs_thread_pool = 0, (0, 1)
        segments = lambda _: [{"total_size": self.pool << 20, "allocated_size": self.pool_allocated << 20}]  # noqa: E731
        monkeypatch.setattr(cuda_graphs, "get_cudagraph_segments", segments)
        monkeypatch.setattr(cuda_graphs, "_needs", {})
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _memory_allocated(self, _: int) -> int:
        return self.allocated << 20

    def _max_memory_allocated(self, _: int) -> int:
        return self.peak << 20

    def _memory_reserved(self, _: int) -> int:
        return self.reserved << 20

    def _mem_get_info(self, _: int) -> tuple[int, int]:
        return self.free << 20, self.total << 20

    def over_budget(self, expected: int, limit: int | None = None) -> str:
        return self.trees.over_budget(expected << 20, None if limit is None else limit << 20)


def test_recordings_may_hold_what_calls_need_anyway_and_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.allocated, memory.peak = 2_000, 22_000  # weights, and what a step saved
    assert not memory.over_budget(20_000)
    memory.pool, memory.pool_allocated, memory.allocated = 22_000, 21_000, 23_000
    assert not memory.over_budget(0)
    memory.pool = 22_300
    assert "would need 2411724800 bytes more than it did, and may need 2306867200 more" in memory.over_budget(0)
    # A small program may need 256 MiB more, or a hundredth of the device.
    small = Memory(monkeypatch)
    small.peak = small.allocated = 10
    small.total = small.free = 8_000
    assert not small.over_budget(256)
    assert "more than it did" in small.over_budget(257)


def test_what_a_step_that_is_half_recorded_saves_outside_of_the_pool_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(monkeypatch)
    memory.allocated, memory.peak = 12_000, 22_000  # half of the layers ran plainly
    assert not memory.over_budget(10_000)
    memory.pool, memory.allocated = 20_000, 2_000
    assert not memory.over_budget(0)
    memory.allocated = 12_000
    assert not memory.over_budget(0)


def test_what_was_needed_before_recordings_is_known_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.allocated, memory.peak = 2_000, 22_000
    assert not memory.over_budget(20_000)
    memory.trees = cuda_graphs.Trees.__new__(cuda_graphs.Trees)
    memory.trees.device_index, memory.trees.cuda_graphs_thread_pool = 0, (0, 2)
    memory.pool, memory.peak = 20_000, 42_000  # with the recordings themselves
    assert not memory.over_budget(0)
    memory.pool = 23_000
    assert "more than it did" in memory.over_budget(0)
    assert "more than it did" in memory.over_budget(20_000)


def test_what_was_needed_must_fit_beside_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.allocated, memory.reserved, memory.peak = 2_000, 22_000, 22_000
    memory.free = 19_999
    assert "do not fit beside" in memory.over_budget(20_000)
    memory.free = 20_000
    assert not memory.over_budget(20_000)


def test_a_limit_of_the_program_is_one_of_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.peak = 50_000
    assert not memory.over_budget(100, limit=100)
    assert memory.over_budget(101, limit=100) == f"recordings would hold {101 << 20} bytes, and may hold {100 << 20}"
    memory.pool = 101
    assert not memory.over_budget(100, limit=100)
    assert memory.over_budget(0, limit=100)
