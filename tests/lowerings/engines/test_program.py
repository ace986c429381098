"""Weights, sizes and threads: nothing stale, and nothing of another thread's."""

import os
import threading
from collections.abc import Callable
from typing import Any

import fake_engines as fake
import numpy as np
import pytest
import torch
from concurrency import in_threads

import omnicomp
from omnicomp.timeline import Ran, Retreat


def compiled(model: Any, name: str = "fake", *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    options = {"lowerings": [name, "eager"], "on_error": "raise", **options}
    return torch.compile(model, backend="omni", dynamic=dynamic, options=options)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> fake.Fake:
    return fake.installed(monkeypatch, fake.Fake)  # type: ignore[return-value]


def evidence() -> list[str]:
    return [event.evidence for event in omnicomp.timeline.events() if isinstance(event, Ran)]


def codes() -> list[str]:
    return [event.reason.code for event in omnicomp.timeline.events() if isinstance(event, Retreat)]


X = torch.randn(4, 6)


def mul(model: Any) -> None:
    model[0].weight.mul_(-2)


def data(model: Any) -> None:
    model[0].weight.data.mul_(-2)


def data_that_is_set(model: Any) -> None:
    model[0].weight.data = torch.randn(8, 6)


def part(model: Any) -> None:
    model[0].weight[0].fill_(3)
    model[0].weight[1].sub_(3)


def copy(model: Any) -> None:
    model[2].bias.copy_(torch.ones(3))


def state_dict(model: Any) -> None:
    model.load_state_dict(network().state_dict())


def assigned_state_dict(model: Any) -> None:
    model.load_state_dict(network().state_dict(), assign=True)


def another_object(model: Any) -> None:
    model[0].weight = torch.nn.Parameter(torch.randn(8, 6))


def swapped(model: Any) -> None:
    model[0].weight, model[0].bias = (
        torch.nn.Parameter(model[0].weight.detach().clone() * 3),
        torch.nn.Parameter(model[0].bias.detach().clone() + 1),
    )


def foreach(model: Any) -> None:
    torch._foreach_mul_([model[0].weight, model[2].weight], -1.5)


def optimizer(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        stepping = make(model.parameters())
        with torch.enable_grad():
            model(X).square().sum().backward()
        stepping.step()
        model.zero_grad()

    change.__name__ = make.__name__
    return change


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1, fused=True)


CHANGES = [
    mul, data, data_that_is_set, part, copy, state_dict, assigned_state_dict, another_object, swapped, foreach,
    optimizer(sgd), optimizer(fused_adam),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_weight_that_changes_is_never_passed_by(engine: fake.Fake, change: Callable[[Any], None]) -> None:
    model = network()
    call = compiled(model)
    with torch.no_grad():
        before = call(X)
        torch.testing.assert_close(before, model(X))
        assert len(engine.builds[0].constants) == 4
        for _ in range(2):
            change(model)
            found = call(X)
            torch.testing.assert_close(found, model(X), rtol=0, atol=0)
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
        assert not torch.allclose(found, before)
    assert "4 weights built in" in evidence()[0]


def test_memory_that_numpy_shares_is_an_input(engine: fake.Fake) -> None:
    model, array = network(), np.ones((8, 6), dtype=np.float32)
    model[0].weight = torch.nn.Parameter(torch.from_numpy(array))  # type: ignore[index]
    call = compiled(model)
    with torch.no_grad():
        for number in range(3):
            array[number] = number - 5
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
    assert all(0 not in build.constants for build in engine.builds)


def test_a_weight_that_numpy_comes_to_share_is_an_input_from_then_on(engine: fake.Fake) -> None:
    model = network()
    call = compiled(model)
    with torch.no_grad():
        call(X)
        array = model[0].weight.numpy()  # type: ignore[index,operator]
        for number in range(3):
            array[number] = number - 5
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
    assert len(engine.builds[0].constants) == 4
    assert len(engine.builds[-1].constants) < 4


def test_a_tied_weight_is_an_input(engine: fake.Fake) -> None:
    """Two parameters of one memory: a write through one is not counted by the other."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)).eval()
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
            model[1].weight.mul_(2)


def test_functional_call_with_other_weights(engine: fake.Fake) -> None:
    model = network()

    def function(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    call = compiled(function)
    with torch.no_grad():
        for _ in range(3):
            weights = {name: torch.randn_like(value) for name, value in model.named_parameters()}
            torch.testing.assert_close(call(weights, X), function(weights, X), rtol=0, atol=0)


def test_buffers(engine: fake.Fake) -> None:
    """They are compared by value, so that it does not matter how they are written."""
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    call = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
        assert len(engine.builds[0].constants) >= 6
        model[1].running_mean.add_(1)
        torch.testing.assert_close(call(x), model(x))
        model[1].running_var.data.mul_(4)
        torch.testing.assert_close(call(x), model(x))
        model[1].running_mean.numpy()[0] = 7
        torch.testing.assert_close(call(x), model(x))
        model.train()(x)  # eager training counts on
        model.eval()
        torch.testing.assert_close(call(x), model(x))


def test_weights_that_go_on_changing_become_inputs(engine: fake.Fake) -> None:
    model: Any = network()
    call = compiled(model)
    with torch.no_grad():
        for _ in range(8):
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
            model[0].weight.add_(0.5)
    assert [bool(build.constants) for build in engine.builds] == [True, True, True, True, False]
    assert codes() == ["weights_changed"]


def test_data_that_is_only_read_builds_nothing_anew(engine: fake.Fake) -> None:
    model: Any = network()
    call = compiled(model)
    with torch.no_grad():
        call(X)
        for _ in range(3):
            float(model[0].weight.data.sum())
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
    # What was built without a hash of its contents is built once more.
    assert len(engine.builds) <= 4


def test_nothing_is_built_in_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = fake.installed(monkeypatch, fake.Training)
    model = network().train()
    call = compiled(model, "fake_training")
    stepping = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        expected = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
        call(X).square().sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
        stepping.step()
        model.zero_grad()
    assert all(build.constants == [] for build in engine.builds)


def test_an_engine_that_bakes_nothing(monkeypatch: pytest.MonkeyPatch, engine: fake.Fake) -> None:
    monkeypatch.setattr(fake.Fake, "bakes", False)
    model: Any = network()
    call = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
            model[0].weight.mul_(2)
    assert [build.constants for build in engine.builds] == [[]]


def test_no_weight_is_kept_alive(engine: fake.Fake) -> None:
    import gc
    import weakref

    model = network()
    call = compiled(model)
    with torch.no_grad():
        call(X)
    gone = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, call
    torch.compiler.reset()
    omnicomp.timeline.clear()
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_equal_layers_share_one_build_where_nothing_is_built_in(engine: fake.Fake) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) + torch.sin(x)

    first, second = compiled(layer), compiled(lambda x: torch.exp(x) + torch.sin(x))
    torch.testing.assert_close(first(X), layer(X))
    torch.testing.assert_close(second(X), layer(X))
    assert len(engine.builds) == 1
    assert ["from compiled" in text for text in evidence()] == [True, False]
    assert "from memory" in evidence()[1]


def test_equal_modules_share_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that can serialise, by the contents of the weights; other contents are another build."""
    engine: Any = fake.installed(monkeypatch, fake.OnDisk)
    models = [network(), network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        for model in models:
            torch.compiler.reset()
            torch.testing.assert_close(compiled(model, "fake_disk")(X), model(X), rtol=0, atol=0)
    assert len(engine.builds) == 2
    with torch.no_grad():
        mul(models[1])
    with torch.no_grad():
        torch.compiler.reset()
        torch.testing.assert_close(compiled(models[1], "fake_disk")(X), models[1](X), rtol=0, atol=0)
        torch.testing.assert_close(compiled(models[0], "fake_disk")(X), models[0](X), rtol=0, atol=0)


class Native(fake.Fake):
    """A library with threads of its own."""

    name = "fake_native"
    native = True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_was_forked_runs_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads are gone there, and a call would wait for them for good."""
    fake.installed(monkeypatch, Native)
    model = network()
    call = compiled(model, "fake_native", on_error="retreat")
    with torch.no_grad():
        call(X)
        child = os.fork()
        if not child:
            status = 3
            try:
                same = torch.equal(call(X), model(X))
                status = 0 if same and codes() == ["call_failed"] else 1
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
    assert not codes()


# Sizes.


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_that_change(engine: fake.Fake, dynamic: bool | None) -> None:
    model = network()
    call = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for size in (4, 7, 1, 7, 4, 12):
            x = torch.randn(size, 6)
            torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)
    assert not any(build.subgraph.dynamic for build in engine.builds)


def test_weights_and_shapes_change(engine: fake.Fake) -> None:
    model: Any = network()
    call = compiled(model, dynamic=True)
    with torch.no_grad():
        for size in (4, 7, 4, 7):
            x = torch.randn(size, 6)
            torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)
            model[0].weight.mul_(1.5)
            torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)


def test_sizes_that_are_returned(engine: fake.Fake) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.exp(x) * x.shape[0], x.shape[0] * 2

    call = compiled(function, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 6)
        found, expected = call(x), function(x)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]


def test_other_strides_are_made_contiguous(engine: fake.Fake) -> None:
    seen: list[bool] = []
    run = fake.Kept.run

    def spy(self: fake.Kept, inputs: Any) -> Any:
        seen.extend(value.is_contiguous() for value in inputs)
        return run(self, inputs)

    fake.Kept.run = spy  # type: ignore[method-assign]
    try:
        x = torch.randn(6, 4).t()
        torch.testing.assert_close(compiled(lambda x: torch.exp(x) + 1)(x), torch.exp(x) + 1)
    finally:
        fake.Kept.run = run  # type: ignore[method-assign]
    assert seen
    assert all(seen)


def test_conjugates_and_negatives(engine: fake.Fake) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    call = compiled(lambda x: x * 2)
    torch.testing.assert_close(call(x.conj()), x.conj() * 2)
    torch.testing.assert_close(call(x.conj().imag), x.conj().imag * 2)


# Threads.


@pytest.mark.parametrize("dynamic", [False, True])
def test_eight_threads(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    fake.installed(monkeypatch, fake.Stateful)
    model, wrong = network(), []
    call, first = compiled(model, "fake_stateful"), torch.randn(4, 6)
    if dynamic:  # torch.compile(dynamic=True) leaves torch 2.11's settings changed behind threads
        torch._dynamo.mark_dynamic(first, 0)
    with torch.no_grad():
        call(first)

    def work(seed: int) -> None:
        with torch.no_grad():
            for number in range(15):
                x = torch.randn(4 + (seed + number) % 3 if dynamic else 4, 6)
                if not torch.equal(call(x), model(x)):
                    wrong.append(seed)

    in_threads(work)
    assert wrong == []


def test_a_thread_that_changes_weights(engine: fake.Fake) -> None:
    """Each result is that of one state of the weights or the next, and the last call has the last weights."""
    model: Any = torch.nn.Linear(6, 3).eval()
    call, stop = compiled(model), threading.Event()
    failed: list[BaseException] = []
    with torch.no_grad():
        call(X)

    def read() -> None:
        try:
            with torch.no_grad():
                while not stop.is_set():
                    call(X)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for _ in range(20):
            model.weight.mul_(1.01)
            torch.testing.assert_close(call(X), model(X), rtol=0, atol=0)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_session_is_made_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch, engine: fake.Fake) -> None:
    modes: list[bool] = []
    session = fake.Kept.session

    def spy(self: fake.Kept) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return session(self)

    monkeypatch.setattr(fake.Kept, "session", spy)
    call = compiled(lambda x: torch.exp(x) + 1)
    with torch.inference_mode():
        call(X)
    torch.testing.assert_close(call(X), torch.exp(X) + 1)
    assert modes
    assert not any(modes)
