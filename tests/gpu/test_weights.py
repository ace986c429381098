"""Low-precision copies of weights on a CUDA device: recorded graphs, streams, memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreach_versions import uncounted
from torch import Tensor, nn

from omnicomp import weights
from omnicomp.timeline import Retreat, Weights, current

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZE = 256


@pytest.fixture(autouse=True)
def no_copies() -> Iterator[None]:
    weights.clear()
    yield
    weights.clear()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def expected(model: Any, x: Tensor) -> Tensor:
    """What the policy computes, with casts of what the weights are now."""
    low = F.linear(x.bfloat16(), model.first.weight.bfloat16(), model.first.bias.bfloat16()).relu()
    return F.linear(low, model.second.weight.bfloat16()).float()


def check(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    torch.testing.assert_close(call(x), expected(model, x), rtol=2e-2, atol=2e-2)


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="omni", options={"dtype_policy": "bf16", **options})


def retreats() -> list[Any]:
    return [event for event in current() if isinstance(event, Retreat)]


def in_place(model: Model) -> None:
    model.second.weight.mul_(-2)


def through_data(model: Model) -> None:
    model.second.weight.data.mul_(-2)


def other_data(model: Model) -> None:
    model.second.weight.data = torch.randn(SIZE, SIZE, device="cuda") / 16


def loaded(model: Model) -> None:
    model.load_state_dict(Model().state_dict())


def other_parameter(model: Model) -> None:
    model.second.weight = nn.Parameter(torch.randn(SIZE, SIZE, device="cuda") / 16)


def averaged(model: Model) -> None:
    torch._foreach_lerp_(list(model.parameters()), list(Model().parameters()), 0.9)


def optimised(model: Model, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    with torch.enable_grad():
        model(torch.ones(2, SIZE, device="cuda")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimised_fused(model: Model) -> None:
    optimised(model, fused=True)


CHANGES = [in_place, through_data, other_data, loaded, other_parameter, averaged, optimised, optimised_fused]


def test_only_functions_that_are_counted_for_do_not_count_what_they_write() -> None:
    assert uncounted("cuda") <= {"_foreach_lerp_", "_foreach_zero_"}


@pytest.mark.inductor
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_seen_by_recorded_graphs(change: Callable[[Model], None]) -> None:
    model, x = Model(), torch.randn(8, SIZE, device="cuda")
    call = compiled(model, **{"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(4):
            check(call, model, x)
        for _ in range(3):
            before = expected(model, x)
            change(model)
            assert not torch.equal(before, expected(model, x))
            for _ in range(3):
                check(call, model, x)
    assert not retreats()


@pytest.mark.inductor
def test_recorded_graphs_read_the_copies_where_they_are() -> None:
    """A change of values does not record anew: the copies are static inputs, renewed in place."""
    from torch._inductor import cudagraph_trees

    model, x = Model(), torch.randn(8, SIZE, device="cuda")
    call = compiled(model, **{"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(4):
            check(call, model, x)
        addresses = {low.data_ptr() for _, low in weights.copies()}
        manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        assert manager is not None
        recorded = manager.new_graph_id().id
        for _ in range(3):
            model.second.weight.data.mul_(-1)
            check(call, model, x)
        assert manager.new_graph_id().id == recorded + 1, "nothing was recorded in between"
    assert {low.data_ptr() for _, low in weights.copies()} == addresses


def test_a_graph_that_the_user_records_casts_in_each_replay() -> None:
    model, x = Model(), torch.randn(8, SIZE, device="cuda")
    call = compiled(model, lowerings=["eager"])
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(x)
        for _ in range(3):
            model.second.weight.data.mul_(-2)
            graph.replay()
            assert torch.equal(result, expected(model, x))
            assert torch.equal(call(x), expected(model, x))


def test_a_copy_that_another_stream_made_is_waited_for() -> None:
    model, x = Model(), torch.randn(8, SIZE, device="cuda")
    call = compiled(model, lowerings=["eager"])
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(20):
            model.second.weight.data.mul_(-1)
            wanted = expected(model, x)
            torch.cuda.synchronize()
            with torch.cuda.stream(first):
                torch.cuda._sleep(20_000_000)  # what follows on this stream is late, the renewal among it
                call(x)
            with torch.cuda.stream(second):
                result = call(x)
            torch.cuda.synchronize()
            assert torch.equal(result, wanted)


def test_memory_is_counted_and_freed() -> None:
    model, x = Model(), torch.randn(8, SIZE, device="cuda")
    call = compiled(model, lowerings=["eager"])
    with torch.no_grad():
        call(x)
        torch.cuda.synchronize()
        (event,) = [event for event in current() if isinstance(event, Weights)]
        assert event.bytes == weights.bytes() == 2 * sum(p.numel() for p in model.parameters())
        before = torch.cuda.memory_allocated()
        weights.clear()
        assert before - torch.cuda.memory_allocated() >= event.bytes


def test_a_model_that_moves_between_devices() -> None:
    model = Model()
    call = compiled(model, lowerings=["eager"])
    with torch.no_grad():
        for device in ("cuda", "cpu", "cuda"):
            model.to(device)
            x = torch.randn(8, SIZE, device=device)
            torch.testing.assert_close(call(x), expected(model, x), rtol=2e-2, atol=2e-2)
            assert {low.device.type for _, low in weights.copies()} == {device}
