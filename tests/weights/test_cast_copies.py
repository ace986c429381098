"""Low-precision copies of weights: made once, and never stale."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from low_weights import CALL, Model, compiled, expected, renewals
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from omnicomp import weights
from omnicomp._torch import parameters
from omnicomp.timeline import Cache, Retreat, current
from omnicomp.weights.cast_copies import Form


@pytest.fixture(autouse=True)
def no_copies() -> Iterator[None]:
    weights.clear()
    yield
    weights.clear()


def in_place(model: Model) -> None:
    model.second.weight.mul_(-2)


def through_data(model: Model) -> None:
    model.second.weight.data.mul_(-2)


def through_data_copy(model: Model) -> None:
    model.second.weight.data.copy_(torch.randn(8, 8))


def data_view(model: Model) -> None:
    model.second.weight.data.view(-1)[3:5] += 1000


def lora_merge(model: Model) -> None:
    model.second.weight.data += torch.randn(8, 2) @ torch.randn(2, 8)


def data_array(model: Model) -> None:
    model.second.weight.data.numpy()[:] *= -2


def detached_copy(model: Model) -> None:
    model.second.weight.detach().copy_(torch.randn(8, 8))


def other_data(model: Model) -> None:
    model.second.weight.data = torch.randn(8, 8)


def other_parameter(model: Model) -> None:
    model.second.weight = nn.Parameter(torch.randn(8, 8))


def other_set(model: Model) -> None:
    model.second.weight.set_(torch.randn(8, 8))


def swapped_data(model: Model) -> None:
    first, second = model.first.weight, model.second.weight
    first.data, second.data = second.data, first.data


def loaded(model: Model) -> None:
    model.load_state_dict(Model().state_dict())


def assigned(model: Model) -> None:
    model.load_state_dict(Model().state_dict(), assign=True)


def from_vector(model: Model) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * -2, model.parameters())


def averaged(model: Model) -> None:
    with torch.no_grad():
        for mine, other in zip(model.parameters(), Model().parameters(), strict=True):
            mine.lerp_(other, 0.5)


def foreach(model: Model) -> None:
    torch._foreach_mul_(list(model.parameters()), -2.0)


def initialised(model: Model) -> None:
    nn.init.normal_(model.second.weight)


def optimised(model: Model, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0, **options)
    with torch.enable_grad():
        model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimised_foreach(model: Model) -> None:
    optimised(model, foreach=True)


def optimised_fused(model: Model) -> None:
    optimised(model, fused=True)


def optimised_compiled(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0, fused=True)
    with torch.enable_grad():
        model(torch.ones(2, 8)).square().sum().backward()
    torch.compile(optimizer.step, backend="aot_eager")()
    optimizer.zero_grad()


def double_and_back(model: Model) -> None:
    model.double()
    model.float()
    model.second.weight.mul_(-2)


def exchanged_shards(model: Model) -> None:
    shard = torch.randn(64)
    weight = model.second.weight
    weight.data = torch.empty(0)
    weight.data = shard.view(8, 8)


CHANGES = [
    *(in_place, through_data, through_data_copy, data_view, lora_merge, data_array, detached_copy, other_data),
    *(other_parameter, other_set, swapped_data, loaded, assigned, from_vector, averaged, foreach, initialised),
    *(optimised, optimised_foreach, optimised_fused, optimised_compiled, double_and_back, exchanged_shards),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_no_change_of_a_weight_is_missed(change: Callable[[Model], None], mode: Callable[[], Any]) -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    for _ in range(2):
        with mode():
            assert torch.equal(call(x), expected(model, x))
        with torch.no_grad():
            before = expected(model, x)
            change(model)
            assert not torch.equal(before, expected(model, x)), "the change must be one that shows"
        with mode():
            assert torch.equal(call(x), expected(model, x))
            assert torch.equal(call(x), expected(model, x))
    assert not [event for event in current() if isinstance(event, Retreat)]


@pytest.mark.parametrize("change", [in_place, through_data, lora_merge], ids=lambda change: change.__name__)
def test_changes_inside_of_inference_mode(change: Callable[[Model], None]) -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(call(x), expected(model, x))
            change(model)
    assert renewals() == [1, 1, 3]


def test_a_copy_is_made_once() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    with torch.no_grad():
        for rows in (3, 3, 5, 7):
            call(torch.randn(rows, 8))
    assert renewals() == [1, 1, 1]
    addresses = {low.data_ptr() for _, low in weights.copies()}
    with torch.no_grad():
        model.second.weight.mul_(2)
        call(x)
        call(x)
    assert renewals() == [1, 1, 2], "only what changed is renewed"
    assert {low.data_ptr() for _, low in weights.copies()} == addresses, "in place"


def test_what_the_lever_switches_off() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model, CALL)
    with torch.no_grad():
        assert torch.equal(call(x), expected(model, x))
    assert weights.count() == 0
    assert not parameters.is_observed()


def test_a_tensor_that_shares_the_memory_makes_the_copy_be_renewed_in_each_call() -> None:
    model, x = Model(), torch.randn(3, 8)
    before = model.second.weight.data  # before anything is observed
    call = compiled(model)
    with torch.no_grad():
        for factor in (2, -3, 0.5):
            before.mul_(factor)
            assert torch.equal(call(x), expected(model, x))
        before.mul_(-2)
        del before
        assert torch.equal(call(x), expected(model, x)), "a write of a tensor that is gone since"
        count = renewals()
        call(x)
        call(x)
        assert renewals() == count, "the parameter has its memory for itself again"


@pytest.mark.parametrize("kind", ["array", "dlpack", "storage of a view"])
def test_foreign_views_that_live_are_seen(kind: str) -> None:
    model, x = Model(), torch.randn(3, 8)
    weight = model.second.weight
    call = compiled(model)
    with torch.no_grad():
        call(x)
        if kind == "array":
            view: Any = weight.detach().numpy()
        elif kind == "dlpack":
            view = np.from_dlpack(weight.detach())
        else:
            view = torch.empty(0).set_(weight.untyped_storage(), 0, (8, 8))
        for factor in (2, -3, 0.5):
            if view is not None and getattr(view, "flags", None) is not None and not view.flags.writeable:
                pytest.skip("this NumPy gives arrays that can't be written to")
            view *= factor
            assert torch.equal(call(x), expected(model, x))


def test_parameters_that_are_views_of_one_buffer() -> None:
    model, x = Model(), torch.randn(3, 8)
    flat = torch.randn(128)
    model.first.weight, model.second.weight = (nn.Parameter(part.view(8, 8)) for part in flat.chunk(2))
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(call(x), expected(model, x))
            flat.mul_(-2)
        flat.mul_(-2)
        del flat
        assert torch.equal(call(x), expected(model, x))
        model.first.weight.data.view(-1)[0] = 3  # each parameter is the other's alias
        assert torch.equal(call(x), expected(model, x))


def test_memory_of_an_array_or_another_process_is_cast_in_each_call() -> None:
    model, x, array = Model(), torch.randn(3, 8), np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    model.first.weight = nn.Parameter(torch.from_numpy(array))
    model.second.share_memory()
    alias = torch.multiprocessing.reductions.reduce_tensor(model.second.weight.detach())  # as another process gets it
    there = alias[0](*alias[1])
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(call(x), expected(model, x))
            array *= -2
            assert torch.equal(call(x), expected(model, x))
            there.mul_(-2)
            assert torch.equal(call(x), expected(model, x))


def test_what_can_not_be_seen_can_be_said() -> None:
    model, x = Model(), torch.randn(3, 8)
    weight = model.second.weight
    call = compiled(model)
    with torch.no_grad():
        for said in ([weight], model.parameters(), None):
            call(x)
            with torch.autograd._unsafe_preserve_version_counter(weight):
                weight.mul_(-2)
            assert not torch.equal(call(x), expected(model, x)), "nothing tells of this"
            weights.changed(said)
            assert torch.equal(call(x), expected(model, x))


def test_a_state_dict_that_is_kept_is_right_and_let_go_is_fast_again() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    with torch.no_grad():
        call(x)
        state = model.state_dict()
        state["second.weight"].data.mul_(-2)
        assert torch.equal(call(x), expected(model, x))
        del state
        call(x)
        count = renewals()
        call(x)
    assert renewals() == count


def test_a_copy_may_have_another_layout_than_its_parameter() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 5, 5))
    form = Form(torch.bfloat16, layout=torch.channels_last)
    copies = weights.Copies([form], [weight.device])
    with torch.no_grad():
        for _ in range(2):
            (low,) = copies((weight,))
            assert torch.equal(low, weight.bfloat16())
            assert low.is_contiguous(memory_format=torch.channels_last)
            assert copies((weight,))[0] is low
            weight.mul_(-2)
        (cast,) = copies((weight.detach(),))
        assert torch.equal(cast, weight.bfloat16()), "of no parameter, none is kept"
        assert cast.stride() == low.stride()


@pytest.mark.inductor
def test_inductor_cold_and_from_its_caches() -> None:
    model, x = Model(), torch.randn(3, 8)
    options = {"dtype_policy": "bf16"}
    verdicts: list[str] = []
    for _ in range(2):
        torch.compiler.reset()
        call = compiled(model, options)
        with torch.no_grad():
            torch.testing.assert_close(call(x), expected(model, x), rtol=1e-2, atol=1e-2)
            first = call(x)
            for change in (in_place, through_data, other_data):
                change(model)
                torch.testing.assert_close(call(x), expected(model, x), rtol=1e-2, atol=1e-2)
                assert not torch.equal(call(x), first)
        assert {tensor.dtype for _, tensor in weights.copies()} == {torch.bfloat16}
        verdicts.append([e.verdict for e in current() if isinstance(e, Cache) and e.cache == "aot_autograd"][-1])
    assert verdicts[1] == "hit", verdicts
    assert not [event for event in current() if isinstance(event, Retreat)]


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["inductor", "omni"])
def test_compiled_steps_are_seen(backend: str) -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)

    @torch.compile(backend=backend)
    def step(weight: Tensor) -> None:
        weight.data.mul_(-2)

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(call(x), expected(model, x))
            step(model.second.weight)
            assert torch.equal(call(x), expected(model, x))
