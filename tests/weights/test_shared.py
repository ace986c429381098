"""Low-precision copies of weights: shared, counted, freed, and out of the way of everything else."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from low_weights import ONCE, Model, compiled, expected, renewals
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import omnicomp
from omnicomp import weights
from omnicomp._torch import parameters
from omnicomp.timeline import Weights, current


@pytest.fixture(autouse=True)
def no_copies() -> Iterator[None]:
    weights.clear()
    yield
    weights.clear()


def test_functional_call_casts_what_it_is_given() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    with torch.no_grad():
        call(x)
        count = renewals()
        for seed in range(4):
            torch.manual_seed(seed)
            other = Model()
            values = {name: value.detach().clone() for name, value in other.named_parameters()}
            with torch.no_grad():
                got = torch.func.functional_call(call, values, (x,))  # type: ignore[arg-type]
            assert torch.equal(got, expected(other, x))
            assert torch.equal(call(x), expected(model, x))
    assert renewals() == count
    assert weights.count() == 3


def test_modules_of_one_code_keep_their_copies_side_by_side() -> None:
    layers = [Model() for _ in range(4)]
    for layer in layers:
        layer.compile(backend="omni", options=ONCE)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                assert torch.equal(layer(x), expected(layer, x))
    assert renewals() == [1] * 12


def test_modules_of_one_code_that_share_a_weight() -> None:
    layers = [Model() for _ in range(3)]
    for layer in layers:
        layer.first = layers[0].first
        layer.compile(backend="omni", options=ONCE)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            for layer in layers:
                assert torch.equal(layer(x), expected(layer, x))
    assert renewals() == [1] * 5


def test_graphs_share_a_copy() -> None:
    model = Model()
    first = compiled(model.second)
    second = torch.compile(lambda x: model.second(x) + 1, backend="omni", options=ONCE)
    with torch.no_grad():
        first(torch.randn(3, 8))
        second(torch.randn(3, 8))
        assert weights.count() == 1
        assert weights.bytes() == 8 * 8 * 2
        model.second.weight.data.mul_(-2)
        x = torch.randn(3, 8)
        low = F.linear(x.bfloat16(), model.second.weight.bfloat16()).float()
        assert torch.equal(second(x), low + 1)
        assert torch.equal(first(x), low)
    assert renewals() == [2]
    (_, last) = [event for event in current() if isinstance(event, Weights)]
    assert (last.copies, last.bytes, last.shared, last.total) == (1, 0, 128, 128)


def test_a_copy_dies_with_its_parameter() -> None:
    model, other = Model(), Model()
    call, other_call = compiled(model), compiled(other)
    with torch.no_grad():
        call(torch.randn(3, 8))
        other_call(torch.randn(3, 8))
    assert weights.count() == 6
    lows = [weakref.ref(low) for _, low in weights.copies()]
    del model, call, other, other_call
    torch._dynamo.reset()
    gc.collect()
    assert weights.count() == 0
    assert weights.bytes() == 0
    assert [low() for low in lows] == [None] * 6


def test_a_copy_dies_with_its_parameter_although_the_graph_lives() -> None:
    layers = [Model() for _ in range(2)]
    for layer in layers:
        layer.compile(backend="omni", options=ONCE)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for layer in layers:
            layer(x)
        assert weights.count() == 6
        del layers[0], layer
        gc.collect()
        assert weights.count() == 3
        assert torch.equal(layers[0](x), expected(layers[0], x))


def test_copies_die_with_their_graphs() -> None:
    model = Model()
    with torch.no_grad():
        compiled(model)(torch.randn(3, 8))
    assert weights.count() == 3
    torch.compiler.reset()
    assert weights.count() == 0
    assert not parameters.is_observed(), "nobody pays for what is not used"


def test_models_can_be_copied_pickled_and_saved() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    with torch.no_grad():
        call(x)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        for other in (twin, again, saved):
            assert type(other.second.weight) is nn.Parameter
            assert torch.equal(other.second.weight, model.second.weight)
            other.second.weight.mul_(-2)
            assert torch.equal(compiled(other)(x), expected(other, x))
        assert torch.equal(call(x), expected(model, x))


def test_what_replaces_data_behaves_like_it() -> None:
    model, x = Model(), torch.randn(3, 8)
    with torch.no_grad():
        compiled(model)(x)
    assert parameters.is_observed()
    weight = model.second.weight
    assert isinstance(weight, nn.Parameter)
    assert not weight.data.requires_grad
    assert weight.data.data_ptr() == weight.data_ptr()
    assert type(weight.data) is Tensor
    assert "data" in dir(weight)
    assert nn.Parameter.data.__doc__ == Tensor.data.__doc__
    with pytest.raises(TypeError):
        weight.data = 3  # type: ignore[assignment]

    class Special(nn.Parameter):
        pass

    assert torch.equal(Special(torch.ones(2)).data, torch.ones(2))
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(2, 4))
    assert lazy.weight.shape == (3, 4)

    # Dynamo traces it, and a write in a compiled graph is seen.
    scale = torch.compile(lambda p: p.data.mul_(-2), backend="eager", fullgraph=True)
    call = compiled(model)
    with torch.no_grad():
        call(x)
        scale(weight)
        assert torch.equal(call(x), expected(model, x))


def test_parametrizations() -> None:
    model, x = Model(), torch.randn(3, 8)
    parametrizations.weight_norm(model.second)
    call = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(call(x), expected(model, x))
            model.second.parametrizations.weight.original0.data.mul_(-3)
        remove_parametrizations(model.second, "weight")
        assert torch.equal(call(x), expected(model, x))
        model.second.weight.data.mul_(-3)
        assert torch.equal(call(x), expected(model, x))


def test_swapping_tensors_is_refused_as_for_every_compiled_model_and_works_afterwards() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    other = nn.Parameter(torch.randn(8, 8))
    with torch.no_grad():
        call(x)
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(model.second.weight, other)
        torch.compiler.reset()
        gc.collect()
        torch.utils.swap_tensors(model.second.weight, other)
        assert torch.equal(call(x), expected(model, x))


def test_parameters_of_inference_mode_are_cast_in_each_call() -> None:
    with torch.inference_mode():
        model, x = Model(), torch.randn(3, 8)
        call = compiled(model)
        for _ in range(3):
            assert torch.equal(call(x), expected(model, x))
            model.second.weight.mul_(-2)
    assert weights.count() == 0


def test_threads() -> None:
    model, x = Model(64), torch.randn(3, 64)
    call = compiled(model)
    with torch.no_grad():
        call(x)
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(30):
                    if barrier.wait() == 0:
                        model.second.weight.data.mul_(-1)
                    barrier.wait()
                    assert torch.equal(call(x), expected(model, x))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_training_keeps_no_copies() -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    call(x).sum().backward()
    assert weights.count() == 0
    with torch.no_grad():
        call(x)
    assert weights.count() == 3
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        call(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(call(x), expected(model, x))


def test_the_memory_is_reported() -> None:
    assert omnicomp.weights.bytes() == 0
    model = Model()
    with torch.no_grad():
        compiled(model)(torch.randn(3, 8))
    assert weights.bytes() == 2 * sum(p.numel() for p in model.parameters())
    (event,) = [event for event in current() if isinstance(event, Weights)]
    assert (event.copies, event.bytes, event.shared) == (3, weights.bytes(), 0)
    assert "copies of weights 0.0 MiB" in " ".join(omnicomp.audit().to_text().split())
    assert omnicomp.audit().graphs[0].weights == (event,)


def test_a_copy_that_can_not_be_made_is_made_in_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(3, 8)
    call = compiled(model)
    copy_ = torch._foreach_copy_

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    with torch.no_grad():
        call(x)
        model.second.weight.mul_(-2)
        monkeypatch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            call(x)
        monkeypatch.setattr(torch, "_foreach_copy_", copy_)
        assert torch.equal(call(x), expected(model, x))
