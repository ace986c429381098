import gc
import itertools
from typing import Any

import pytest
import torch

MIB = 2**20


def test_what_a_tensor_takes_is_counted_and_given_back(sim: Any) -> None:
    gc.collect()
    before = sim.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device="sim")
    assert sim.memory_allocated() - before == MIB
    assert sim.memory_reserved() >= sim.memory_allocated()
    del x
    assert sim.memory_allocated() == before


def test_the_peak_is_the_most_since_it_was_reset(sim: Any) -> None:
    sim.reset_peak_memory_stats()
    before = sim.max_memory_allocated()
    for _ in range(3):
        torch.empty(MIB, dtype=torch.uint8, device="sim")
    assert sim.max_memory_allocated() - before == MIB
    sim.reset_peak_memory_stats()
    assert sim.max_memory_allocated() == sim.memory_allocated()


def test_each_device_has_memory_of_its_own(sim: Any) -> None:
    before = sim.memory_allocated(0), sim.memory_allocated("sim:1")
    x = torch.empty(MIB, dtype=torch.uint8, device="sim:1")
    assert (sim.memory_allocated(0), sim.memory_allocated(1)) == (before[0], before[1] + x.numel())


def test_allocations_are_counted(sim: Any) -> None:
    before = sim.memory_stats()["allocation.all.allocated"]
    kept = [torch.empty(3, device="sim") for _ in range(5)]
    assert sim.memory_stats()["allocation.all.allocated"] - before == len(kept)


def test_live_tensors_never_share_memory(sim: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    live: dict[int, torch.Tensor] = {}
    for step in range(300):
        if live and torch.rand((), generator=generator) < 0.4:
            live.pop(next(iter(live)))
        else:
            live[step] = torch.full((int(torch.randint(1, 5000, (), generator=generator)),), step, device="sim")
        spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(bool((x.cpu() == step).all()) for step, x in live.items())


def test_what_is_free_at_the_end_goes_back_to_the_device(sim: Any) -> None:
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="sim")
    reserved = sim.memory_reserved()
    del x
    sim.empty_cache()
    assert sim.memory_reserved() <= reserved - 62 * MIB
    assert torch.ones(8 * MIB, device="sim").sum().item() == 8 * MIB


def test_running_out_of_memory_is_torch_s_error_and_leaves_all_usable(sim: Any) -> None:
    free, total = sim.mem_get_info()
    assert free <= total
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total + 1, dtype=torch.uint8, device="sim")
    assert sim.memory_stats()["num_ooms"] >= 1
    assert torch.ones(2, device="sim").sum().item() == 2


def test_torch_accelerator_tells_the_same(sim: Any) -> None:
    x = torch.ones(MIB, device="sim")
    assert torch.accelerator.memory_allocated() == sim.memory_allocated() >= x.numel() * 4
    assert torch.accelerator.max_memory_allocated() == sim.max_memory_allocated()


def test_resizing_keeps_what_there_was(sim: Any) -> None:
    x = torch.arange(4.0, device="sim")
    x.resize_(2, 3000)
    assert x.shape == (2, 3000)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]
    x.untyped_storage().resize_(8)
    assert x.untyped_storage().nbytes() == 8


def test_pinned_memory_is_the_host_s_and_known(sim: Any) -> None:
    x = torch.arange(6.0).pin_memory()
    assert x.is_pinned()
    assert x[2:].is_pinned()
    assert not torch.arange(6.0).is_pinned()
    assert x.to("sim", non_blocking=True).tolist() == x.tolist()


def test_dtypes_that_the_device_is_declared_to_lack_can_t_be_made(sim: Any) -> None:
    kept = torch.ones(2, dtype=torch.float64, device="sim")
    sim.set_dtypes([torch.float32, torch.bool])
    assert torch.ones(2, device="sim").dtype == torch.float32
    with pytest.raises(TypeError, match=r"dtype Double"):
        torch.ones(2, dtype=torch.float64, device="sim")
    assert kept.cpu().tolist() == [1, 1]
