"""The option `background`: calls run eager until another process has built the graph, and right at every moment.

Most of it in one process: `Desk` takes the place of the pool, and builds when a test says so.
"""

import dataclasses
import importlib
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded import events
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import omnicomp
from omnicomp.backend import background, worker
from omnicomp.options.policy import parse
from omnicomp.timeline import Background, Candidate, Option, PassRun, Ran, Speculation

OPTIONS: dict[str, Any] = {"background": True, "lowerings": ["eager"]}


class Desk:
    """A pool that builds in this process, when it is told to."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def submit(self, order: Any) -> None:
        self.orders.append(order)

    def work(self) -> None:
        """Build what was ordered."""
        while self.orders:
            order = self.orders.pop(0)
            order.done(worker.build(order.data))

    def fail(self, why: str) -> None:
        """End without a reply."""
        while self.orders:
            self.orders.pop(0).failed(why)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    made = Desk()
    monkeypatch.setattr(background, "pool", lambda: made)
    yield made
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    dynamic = more.pop("dynamic", None)
    return torch.compile(function, backend="omni", dynamic=dynamic, options={**OPTIONS, **more})


def states() -> list[str]:
    return [event.state for event in events(Background)]


def gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ x.T).sum(-1)


def test_calls_run_eager_until_the_graph_is_built_and_the_audit_says_after_how_many(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(4, 4)
    for _ in range(3):
        torch.testing.assert_close(call(x), gelu(x))
    assert not events(Ran)
    assert not omnicomp.wait(0)
    desk.work()
    assert omnicomp.wait(0)
    assert states() == ["started", "eager", "eager"]
    torch.testing.assert_close(call(x), gelu(x))
    assert states() == ["started", "eager", "eager", "swapped"]
    assert [event.lowering for event in events(Ran)] == ["eager"]
    graph = omnicomp.audit().graphs[0]
    assert graph.background is not None
    assert graph.background.calls == 3
    assert "built in the background after 3 eager calls" in " ".join(omnicomp.audit().to_text().split())


def test_the_report_of_the_build_is_that_of_the_foreground(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    desk.work()
    call(x)
    behind = told()
    torch.compiler.reset()
    omnicomp.timeline.clear()
    compiled(gelu, background=False)(x)
    assert behind == told()


def told() -> Any:
    """What the report says of the only graph, whatever its number."""
    (graph,) = omnicomp.audit().stable()["graphs"]
    left = {key: value for key, value in graph.items() if key not in ("options", "settings", "identity")}
    return json.loads(json.dumps(left).replace(f'"{graph["id"]}', '"g'))


def test_a_forward_that_ran_eager_has_eagers_backward_and_the_next_step_is_compiled(desk: Desk) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    call, x = compiled(model), torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    loss = call(x).square().sum()
    desk.work()
    call(x)  # a backward is still to come
    assert states()[-1] != "swapped"
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)
    loss = call(x).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)
    loss = call(x).square().sum()
    assert states()[-1] == "swapped"
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)
    assert {event.part for event in events(Ran)} == {"forward", "backward"}


def test_results_that_are_kept_without_a_backward_delay_the_exchange_for_some_calls_only(desk: Desk) -> None:
    model = nn.Linear(4, 4)
    call, x, kept = compiled(model), torch.randn(3, 4), []
    kept.append(call(x))
    desk.work()
    for _ in range(background._PATIENCE + 2):
        kept.append(call(x))
    assert states()[-1] == "swapped"
    for result in kept:
        torch.testing.assert_close(result, model(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_not_cut_in_two(desk: Desk, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.GELU())
    call, x = compiled(model), torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), x)
    for moment in range(4):
        results = checkpoint(call, x, use_reentrant=reentrant)
        if moment == 1:
            desk.work()
        x.grad = None
        results.square().sum().backward()
        torch.testing.assert_close((x.grad,), expected)
        desk.work()


def test_a_graph_of_other_sizes_runs_eager_until_it_is_built(desk: Desk) -> None:
    call = compiled(gelu)
    for size in (4, 5, 6, 7):
        x = torch.randn(size, 4)
        torch.testing.assert_close(call(x), gelu(x))
    assert states().count("started") == 2
    desk.work()
    for size in (4, 5, 6, 7, 9):
        x = torch.randn(size, 4)
        torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "swapped"


@pytest.mark.parametrize("training", [False, True])
def test_a_size_that_is_compiled_stays_compiled_while_a_graph_for_any_size_is_built(desk: Desk, training: bool) -> None:
    """The last batch of an epoch is smaller: Dynamo then gives the calls of all batches to one graph for any size."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Unflatten(1, (2, 4)), nn.Flatten())
    call, weights = compiled(model), list(model.parameters())

    def step(size: int) -> None:
        x = torch.randn(size, 4)
        with torch.set_grad_enabled(training):
            found, expected = call(x), model(x)
        torch.testing.assert_close(found, expected)
        if training:
            gradients = torch.autograd.grad(found.square().sum(), weights)
            torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), weights))

    step(6)
    (first,) = background._building
    desk.work()
    step(6)
    step(5)
    (second,) = background._building
    for size in (6, 6, 5, 6):
        with torch.no_grad():
            weights[0].mul_(0.5)
        step(size)
    assert (first._calls, second._calls) == (1, 2)
    assert states()[-4:] == ["started", "eager", "earlier", "eager"]
    desk.work()
    for size in (6, 5, 7):
        step(size)
    assert (first._calls, second._calls) == (1, 2)
    assert states()[-1] == "swapped"


def test_activation_checkpointing_is_not_cut_in_two_where_an_earlier_graph_takes_the_call(desk: Desk) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.GELU())
    call = compiled(model)
    for size, work in ((6, False), (5, False), (6, True), (6, False), (5, True), (6, False)):
        x = torch.randn(size, 4, requires_grad=True)
        expected = torch.autograd.grad(model(x).square().sum(), x)
        results = checkpoint(call, x, use_reentrant=False)
        if work:
            desk.work()
        torch.testing.assert_close(torch.autograd.grad(results.square().sum(), x), expected)


@pytest.mark.parametrize("differs", ["constant", "zero", "type", "weight", "write", "gradients", "autocast", "gone"])
def test_an_earlier_graph_that_computes_something_else_is_not_used(desk: Desk, differs: str) -> None:
    class Model(nn.Module):
        number: Any = 2
        weight = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            if differs == "write":
                x.mul_(2)
            return (x @ x.T).sum(0) + x[:, 0] * self.number + self.weight.sum()

    model = Model()
    call = compiled(model)
    if differs == "gradients":
        with torch.no_grad():
            call(torch.randn(6, 4))
    else:
        model.number = 0.0 if differs == "zero" else 2
        call(torch.randn(6, 4))
    desk.work()
    if differs == "constant":
        model.number = 3
    elif differs == "zero":
        model.number = -0.0
    elif differs == "type":
        model.number = 2.0
    elif differs == "weight":
        model.weight = torch.full((4,), 3.0, dtype=torch.float64)
    elif differs == "gone":
        torch.compiler.reset()
    for size in (5, 6, 6):
        x = torch.randn(size, 4, requires_grad=differs == "gradients")
        with torch.autocast("cpu", enabled=differs == "autocast"):
            found, expected = call(x.clone()), model(x.clone())
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
        if differs == "gradients":
            found.sum().backward()
    assert "earlier" not in states()


@pytest.mark.parametrize("training", [False, True])
def test_a_graph_that_is_right_for_some_sizes_only_is_built_again_for_others(
    training: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, built = worker.compile_graph, list[bool]()

    def specialising(gm: Any, plain: Any, graph: Any, inputs: Any, **more: Any) -> Any:
        size = next(value for value in inputs if isinstance(value, torch.SymInt))
        built.append(bool(size < 10))  # the compiled graph is for such sizes from here on
        return real(gm, plain, graph, inputs, **more)

    monkeypatch.setattr(worker, "compile_graph", specialising)
    call = compiled(gelu, dynamic=True)

    def right(*sizes: int) -> None:
        for size in sizes:
            x = torch.randn(size, 4, requires_grad=training)
            found, expected = call(x), gelu(x)
            torch.testing.assert_close(found, expected)
            if training:
                grads = [torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)]
                torch.testing.assert_close(*grads)

    def runs() -> list[str]:
        return [event.graph for event in events(Ran) if event.subgraph == event.graph]

    right(8)
    desk.work()
    right(8, 9, 12, 8)
    (graph,) = runs()
    desk.work()
    right(12, 8, 16)
    assert built == [True, False]
    assert states().count("swapped") == 2
    assert runs() == [graph]
    assert f"{graph}:sizes1" in omnicomp.audit().to_text()


@pytest.mark.parametrize("reply", ["", "raises"])
def test_sizes_for_which_no_build_succeeds_stay_eager_after_three(
    reply: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = worker.compile_graph

    def specialising(gm: Any, plain: Any, graph: Any, inputs: Any, **more: Any) -> Any:
        size = next(value for value in inputs if isinstance(value, torch.SymInt))
        hint = size.node.hint
        if hint != 8 and reply:
            raise RuntimeError("no")
        assert size == hint
        return real(gm, plain, graph, inputs, **more)

    monkeypatch.setattr(worker, "compile_graph", specialising)
    call = compiled(gelu, dynamic=True)
    for size in (8, 8, *range(9, 16), 8):
        x = torch.randn(size, 4)
        torch.testing.assert_close(call(x), gelu(x))
        desk.work()
    assert states().count("kept" if reply else "swapped") == (3 if reply else 4)


def test_what_writes_to_its_inputs_writes_once_in_either_tier(desk: Desk) -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    call, total = compiled(step), torch.zeros(4)
    x = torch.ones(4)
    for number in range(1, 5):
        torch.testing.assert_close(call(x, total), torch.full((4,), 2.0 * number))
        desk.work()
    assert "swapped" in states()


def test_inputs_that_overlap_in_one_call_and_not_in_another_are_right_in_either_tier(desk: Desk) -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    call = compiled(step)
    for apart in (0, 0, 4, 0, 4):
        mine, theirs = torch.arange(12.0), torch.arange(12.0)
        result = call(mine[:6], mine[2 + apart : 8 + apart])
        torch.testing.assert_close(result, step(theirs[:6], theirs[2 + apart : 8 + apart]))
        torch.testing.assert_close(mine, theirs)
        desk.work()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x).float()


@pytest.mark.parametrize(
    "function", [lambda x: Cubed.apply(x).sin(), conditional, in_half], ids=["autograd", "cond", "autocast"]
)
def test_graphs_that_autograds_cache_has_no_key_for_are_built_elsewhere_too(
    desk: Desk, function: Callable[..., Any]
) -> None:
    call, x = compiled(function), torch.rand(4, 4, requires_grad=True)
    expected = function(x), *torch.autograd.grad(function(x).square().sum(), x)
    for _ in range(3):
        found = call(x)
        bound: Any = {"rtol": 2**-7, "atol": 1e-5} if function is in_half else {}  # one rounding to bfloat16
        torch.testing.assert_close((found, *torch.autograd.grad(found.square().sum(), x)), expected, **bound)
        random.seed(0)  # torch draws a key for the graph
        before = random.getstate()
        desk.work()
        assert random.getstate() == before
    assert states()[-1] == "swapped"


def test_buffers_parameters_and_views_are_those_of_the_program(desk: Desk) -> None:
    model, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    call, base = compiled(model), torch.randn(6, 9)
    for number in range(4):
        view = base[:, number : number + 4]
        torch.testing.assert_close(call(view), twin(view))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        with torch.no_grad():
            model.weight.mul_(2)
            twin.weight.mul_(2)
        desk.work()
    assert "swapped" in states()


def test_autocast_around_the_call_is_in_force_where_the_graph_is_built(desk: Desk) -> None:
    call, x = compiled(lambda a: a @ a), torch.randn(4, 4)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call(x).dtype == torch.bfloat16
        desk.work()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(x).dtype == torch.bfloat16
    assert "swapped" in states()


def test_passes_run_in_the_other_process_and_are_reported(desk: Desk) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 4.0).softmax(-1) @ v

    call = compiled(attention)
    q, k, v = torch.randn(3, 2, 4, 32, 16).unbind()
    with torch.no_grad():
        torch.testing.assert_close(call(q, k, v), attention(q, k, v))
        assert not events(PassRun)
        desk.work()
        torch.testing.assert_close(call(q, k, v), attention(q, k, v))
    assert any(event.name == "attention_fusion" and event.rewrites for event in events(PassRun))


def test_a_mask_is_right_whatever_the_calls_bring(desk: Desk) -> None:
    def attention(q: Tensor, mask: Tensor) -> Tensor:
        return (q @ q.transpose(-1, -2)).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ q

    call, q = compiled(attention), torch.randn(2, 4, 32, 16)
    full, padded = torch.ones(2, 32), torch.ones(2, 32)
    padded[:, 20:] = 0
    with torch.no_grad():
        for mask in (full, padded, full):
            torch.testing.assert_close(call(q, mask), attention(q, mask))
        desk.work()
        for mask in (full, padded, full, padded):
            torch.testing.assert_close(call(q, mask), attention(q, mask))
    assert states()[-1] == "swapped"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"on_error": "raise"}, "ask for errors"),
        ({"fallback": {"max_nodes": 99}}, "ask for errors"),
        ({"lowerings": ["toy", "eager"]}, "the engine 'toy'"),
    ],
)
def test_what_can_not_be_built_elsewhere_is_built_here_with_a_reason(
    desk: Desk, option: dict[str, Any], named: str
) -> None:
    call, x = compiled(gelu, **option), torch.randn(4, 4)
    torch.testing.assert_close(call(x), gelu(x))
    assert not desk.orders
    (event,) = events(Background)
    assert event.state == "foreground"
    assert event.reason.code == "not_in_background"
    assert named in event.reason.sentence
    assert [(each.key, each.effective) for each in events(Option)] == [("background", "False")]
    assert events(Ran)


def test_an_operator_that_the_other_process_lacks_makes_the_program_build_the_graph(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any) -> Any:
        raise AttributeError("'_OpNamespace' 'mine' object has no attribute 'f'")

    monkeypatch.setattr("omnicomp._torch.dynamo.shipping.GraphPickler.loads", lacking)
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    desk.work()
    torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "foreground"
    assert "mine" in events(Background)[-1].reason.sentence
    assert events(Ran)


def test_what_can_not_leave_the_other_process_is_built_here(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Any) -> Any:
        raise ValueError("its weights are constants of the code")

    monkeypatch.setattr(worker, "state_of", refused)
    model = nn.Linear(4, 4)
    call, x = compiled(model), torch.randn(3, 4)
    call(x).sum().backward()
    (behind,) = background._building
    desk.work()
    build, interrupts = behind._build_here, iter([KeyboardInterrupt])

    def interrupted() -> Any:
        raise next(interrupts)

    monkeypatch.setattr(behind, "_build_here", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(x)
    monkeypatch.setattr(behind, "_build_here", build)
    torch.testing.assert_close(call(x), model(x))
    assert states()[-1] == "foreground"
    assert {event.part for event in events(Ran)} == {"forward"}


def test_a_build_that_fails_leaves_the_graph_eager_and_is_not_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(worker, "compile_graph", failing)
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    desk.work()
    for _ in range(3):
        torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "failed"
    assert "no room" in events(Background)[-1].reason.sentence
    assert [event.lowering for event in events(Ran)] == ["eager"]
    assert not desk.orders


def test_a_worker_that_dies_leaves_the_graph_eager(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    desk.fail("the process that built the graph ended with signal 9")
    torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "failed"
    assert omnicomp.wait(0)


def test_a_reply_that_can_not_be_read_leaves_the_graph_eager(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    desk.orders.pop().done(b"garbage")
    torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "failed"


def test_the_graph_is_not_built_for_a_program_that_has_forgotten_it(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    del call
    torch.compiler.reset()
    import gc

    waiting = threading.Thread(target=omnicomp.wait, daemon=True)
    waiting.start()
    gc.collect()
    assert not desk.orders[0].is_wanted()
    assert omnicomp.wait(0)
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_waits_for_no_build_of_its_parent(desk: Desk) -> None:
    compiled(gelu)(torch.randn(4, 4))
    child = os.fork()
    if child == 0:
        os._exit(0 if omnicomp.wait(0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not omnicomp.wait(0)


def test_calls_get_the_interpreter_at_once_while_a_graph_is_restored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, x, seen, read = compiled(gelu), torch.randn(4, 4), [], background.Behind._read
    monkeypatch.setattr(background.Behind, "_read", lambda *args: seen.append(sys.getswitchinterval()) or read(*args))
    before = sys.getswitchinterval()
    call(x)
    desk.work()
    assert seen == [pytest.approx(background._SWITCH_SECONDS)]
    assert sys.getswitchinterval() == before


def test_threads_that_call_while_the_graph_is_exchanged_all_get_eagers_values(desk: Desk) -> None:
    call, x = compiled(gelu), torch.randn(8, 8)
    expected, wrong, ends = gelu(x), [], threading.Event()
    call(x)

    def caller() -> None:
        while not ends.is_set():
            if not torch.allclose(call(x), expected, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    for thread in threads:
        thread.start()
    desk.work()
    call(x)
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert states().count("swapped") == 1


def test_the_variable_asks_for_it_and_the_option_decides(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_BACKGROUND", "1")
    x = torch.randn(4, 4)
    compiled(gelu, background=False)(x)
    assert not desk.orders
    torch.compiler.reset()
    asked: dict[str, Any] = {"lowerings": ["eager"]}
    torch.compile(gelu, backend="omni", options=asked)(x)
    assert len(desk.orders) == 1


def test_second_derivatives_come_from_eagers_autograd_behind_the_exchange_as_well(desk: Desk) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    call, x = compiled(model), torch.randn(2, 3, requires_grad=True)

    def second(function: Callable[..., Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    expected = second(model)
    torch.testing.assert_close(second(call), expected)
    desk.work()
    for _ in range(2):
        torch.testing.assert_close(second(call), expected)
    assert "swapped" in states()


def second(desk: Desk, monkeypatch: pytest.MonkeyPatch, better: dict[str, Any]) -> Desk:
    """The pool for better builds, with options that they are to have."""
    made = Desk()
    monkeypatch.setattr(background, "improving", lambda: made)
    monkeypatch.setattr(background, "_tiers", lambda *_, **__: ({}, better))
    return made


@pytest.mark.parametrize("training", [False, True])
def test_a_better_build_is_made_of_a_hot_graph_and_takes_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    improved = second(desk, monkeypatch, {"verdicts": "off"})
    call, x = compiled(gelu), torch.randn(4, 4, requires_grad=training)
    call(x)
    desk.work()
    waiting = call(x)
    for _ in range(background._HOT - 1):
        assert not improved.orders
        call(x)
    assert len(improved.orders) == 1
    assert states()[-1] == "improving"
    kept = call(x)
    improved.work()
    assert omnicomp.wait(0)
    torch.testing.assert_close(call(x), gelu(x))
    assert (states()[-1] == "improved") != training  # a backward is still to come
    for each in (waiting, kept) if training else ():
        torch.testing.assert_close(torch.autograd.grad(each.sum(), x), torch.autograd.grad(gelu(x).sum(), x))
    for _ in range(background._PATIENCE + 2):
        torch.testing.assert_close(call(x), gelu(x))
    assert states()[-1] == "improved"
    assert {event.lowering for event in events(Ran)} == {"eager"}
    assert "once more for speed" in " ".join(omnicomp.audit().to_text().split())


def test_a_better_build_is_not_ordered_while_a_graph_is_recorded_or_another_build_is_under_way(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    improved, recording = second(desk, monkeypatch, {"verdicts": "off"}), [False]
    monkeypatch.setattr(background, "_recording", lambda: recording[0])
    call, x = compiled(gelu), torch.randn(4, 4)
    call(x)
    (behind,) = background._building
    desk.work()
    call(x)
    recording[0] = True
    for _ in range(background._HOT + 1):
        call(x)
    recording[0] = False
    assert behind._begin()
    call(x)  # another thread is about to order a build for other sizes
    assert not improved.orders
    behind._over()
    call(x)
    assert len(improved.orders) == 1
    assert not behind._begin()


def test_a_better_build_that_fails_or_dies_leaves_what_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    improved = second(desk, monkeypatch, {"choose": "measure"})
    for moment in ("fails", "dies"):
        torch.compiler.reset()
        call, x = compiled(gelu), torch.randn(4, 4)
        call(x)
        desk.work()
        for _ in range(background._HOT + 1):
            call(x)
        if moment == "fails":
            improved.orders.pop().done(b"garbage")
        else:
            improved.fail("the process that built the graph ended with signal 9")
        torch.testing.assert_close(call(x), gelu(x))
        assert states()[-1] == "kept"
        assert omnicomp.wait(0)
        assert moment == "fails" or "signal 9" in events(Background)[-1].reason.sentence


def test_what_takes_time_for_speed_is_left_to_the_second_build() -> None:
    def tiers(device: str = "cpu", training: bool = False, **options: Any) -> Any:
        return background._tiers(parse(options.pop("mode", None), options), device, training=training)

    first, better = tiers()
    assert (first, better["choose"]) == ({}, "measure")
    assert tiers(training=True) == tiers("cuda") == tiers(lowerings=["eager"]) == ({}, None)
    assert tiers(lowerings="measure") == ({"choose": "off"}, {"choose": "measure"})
    first, better = tiers(mode="max-autotune-no-cudagraphs", training=True)
    assert "max_autotune" not in first["inductor"]
    assert better["inductor"]["max_autotune"]
    assert tiers(lowerings="tuned") == ({}, None)


def test_settings_are_measured_on_the_values_of_a_call_and_engines_are_refused_by_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    better = {"choose": "measure", "lowerings": ("override", "inductor", "eager")}
    improved, seen = second(desk, monkeypatch, better), []

    class Contest:
        def __init__(self, gm: Any, inputs: Any, graph: Any, values: Any) -> None:
            seen.extend(values)
            self.events = (Candidate(graph=graph.id, candidate="inductor", lowerings=("inductor",), selected=True),)

        def run(self, candidates: Any, refused: dict[str, str]) -> Any:
            assert "frozen" in refused
            assert {"inductor", "inductor, tanh decomposed"} <= {each.name for each in candidates}
            return dataclasses.replace(candidates[0], lowerings=("eager",))

    monkeypatch.setattr(importlib.import_module("omnicomp.backend.select.choose"), "Contest", Contest)
    call, x = compiled(lambda a: a.tanh().sum(-1), verdicts="off"), torch.randn(4, 4)
    with torch.no_grad():
        call(x)
        desk.work()
        for _ in range(background._HOT + 1):
            call(x)
        improved.work()
        torch.testing.assert_close(call(x), x.tanh().sum(-1))
    assert torch.equal(seen[0], x)
    assert states()[-1] == "kept"
    assert [event.candidate for event in events(Candidate)] == ["inductor"]


def test_variants_for_masks_of_other_classes_are_built_behind_the_program(desk: Desk) -> None:
    def attention(q: Tensor, mask: Tensor) -> Tensor:
        return (q @ q.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1) @ q

    call, q = compiled(attention), torch.randn(2, 4, 512, 64)
    full = torch.ones(512, 512, dtype=torch.bool)
    masks = [full, full.tril(), full]
    with torch.no_grad():
        for mask in masks:
            torch.testing.assert_close(call(q, mask), attention(q, mask))
        desk.work()
        call(q, full)
        assert {event.variant for event in events(Speculation) if event.state == "held"} == {"assumed"}
        torch.testing.assert_close(call(q, full.tril()), attention(q, full.tril()))  # by the general one
        assert len(desk.orders) == 1
        desk.work()
        torch.testing.assert_close(call(q, full.tril()), attention(q, full.tril()))
        call(q, full.tril())
    assert not desk.orders
    assert {event.variant for event in events(Speculation) if event.state == "held"} == {"assumed", "assumed2"}
