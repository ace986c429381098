"""Programs that hold what recorded calls return, save or update, over many calls: their values are eager's."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.inductor.cuda_graphs import trees_of
from omnicomp.timeline import CudaGraph, events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS: Final = 24
Compile = Callable[..., Any]
Program = Callable[[Compile], list[Any]]

_programs: list[Any] = []


def program(*, recorded: bool = True, like: str = "eager") -> Callable[[Program], Program]:
    """A row of the table: whether some of its calls must be recorded, and what its values are compared with."""

    def add(function: Program) -> Program:
        _programs.append(pytest.param(function, recorded, like, id=function.__name__))
        return function

    return add


def draw(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=grad)


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32)).cuda()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@program()
def outputs_held(compile: Compile) -> list[Any]:
    run = compile(lambda x: (x.sin() * 2, x.cos() + 1))
    with torch.no_grad():
        return [run(draw(64, 32)) for _ in range(CALLS)]


@program()
def views_of_outputs_held(compile: Compile) -> list[Any]:
    run = compile(lambda x: x.sin() * 2)
    with torch.no_grad():
        return [run(draw(64, 32))[3:9, ::2] for _ in range(CALLS)]


@program()
def outputs_are_views_of_each_other(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor) -> Any:
        y = x.sin() * 2
        return y, y[2:], y.t(), y.view(-1)[::3]

    run, found = compile(function), []
    with torch.no_grad():
        for _ in range(CALLS):
            whole, part, turned, every = run(draw(16, 32))
            whole.add_(1)  # seen through all views
            found.append((whole, part, turned, every))
    return found


@program()
def outputs_alias_inputs(compile: Compile) -> list[Any]:
    run, found = compile(lambda x, y: (x[1:], y, x + y, x.view(-1))), []
    with torch.no_grad():
        for _ in range(CALLS):
            x, y = draw(8, 8), draw(8, 8)
            view, same, total, flat = run(x, y)
            x.mul_(2)
            found.append((view, same, total, flat))
    return found


@program()
def outputs_with_strides(compile: Compile) -> list[Any]:
    run = compile(lambda x: (x.sin().t(), (x * 2).expand(3, 16, 32), (x + 1).permute(1, 0)[::2]))
    with torch.no_grad():
        return [run(draw(16, 32)) for _ in range(CALLS)]


@program()
def output_written_by_the_program(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: x * 2), []
    with torch.no_grad():
        for _ in range(CALLS):
            y = run(draw(32, 32))
            y.add_(5)
            found.append(y)
    return found


@program()
def output_fed_back(compile: Compile) -> list[Any]:
    run, state, found = compile(lambda x, y: (x * 0.5 + y).tanh()), draw(16, 16), []
    with torch.no_grad():
        for _ in range(CALLS):
            state = run(state, draw(16, 16))
            found.append(state)
    return found


@program()
def layers_one_by_one(compile: Compile) -> list[Any]:
    layers = nn.ModuleList(mlp() for _ in range(20))
    runs, found = [compile(layer) for layer in layers], []
    with torch.no_grad():
        for _ in range(CALLS):
            x, kept = draw(8, 32), []
            for run in runs:
                x = run(x)
                kept.append(x)
            found.append(kept)
    return found


@program()
def training_step(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *gradients(model)]
        optimizer.zero_grad(set_to_none=True)
    return found


@program()
def gradients_held(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        run(draw(8, 32)).square().mean().backward()
        found += [p.grad for p in model.parameters()]  # held itself
        for p in model.parameters():
            p.grad = None
    return found


@program()
def gradients_accumulated(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        run(draw(8, 32)).square().mean().backward()
        if step % 3 == 2:
            found += gradients(model)
            model.zero_grad(set_to_none=step % 2 == 0)
    return found


@program()
def zero_grad_before_backward(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        model.zero_grad(set_to_none=False)
        loss.backward()
        found += gradients(model)
    return found


@program()
def gradient_of_inputs(compile: Compile) -> list[Any]:
    run, found = compile(lambda x, y: (x * y).sin() + x), []
    for _ in range(CALLS):
        x, y = draw(16, 16, grad=True), draw(16, 16, grad=True)
        run(x, y).sum().backward()
        found += [x.grad, y.grad]
    return found


@program()
def gradient_is_the_tangent(compile: Compile) -> list[Any]:
    run, found = compile(lambda x, y: x + y), []
    for _ in range(CALLS):
        x, y = draw(16, 16, grad=True), draw(16, 16, grad=True)
        (run(x, y) * draw(16, 16)).sum().backward()
        found += [x.grad, y.grad]
    return found


@program()
def graph_retained(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        if step % 4 == 3:
            loss.backward(retain_graph=True)
        loss.backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def retained_after_steps_without(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        loss.backward(retain_graph=step > 12)
        if step > 12:
            loss.backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def two_forwards_two_backwards(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        first, second = run(draw(8, 32)), run(draw(8, 32))
        losses = [first.square().mean(), second.sin().mean()]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        found += [first.detach(), second.detach(), *gradients(model)]
        model.zero_grad()
    return found


@program()
def loss_of_two_calls(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        (run(draw(8, 32)) * run(draw(8, 32))).mean().backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def layer_used_twice(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        run(run(draw(8, 32))).square().mean().backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def losses_kept(compile: Compile) -> list[Any]:
    model, kept = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        kept.append(run(draw(8, 32)).square().mean())  # with their graphs
    for loss in kept:
        loss.backward()
    return [*(loss.detach() for loss in kept), *gradients(model)]


@program()
def backward_left_out_at_times(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        if step % 3:
            loss.backward()
        found += [loss.detach(), *gradients(model)]
        model.zero_grad()
    return found


@program()
def exception_between_forward_and_backward(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        try:
            loss = run(draw(8, 32)).square().mean()
            if step % 5 == 4:
                raise ValueError("the program's own")
            loss.backward()
        except ValueError:
            continue
        found += [loss.detach(), *gradients(model)]
        model.zero_grad()
    return found


@program()
def layers_trained_one_by_one(compile: Compile) -> list[Any]:
    layers, found = nn.ModuleList(mlp() for _ in range(3)), []
    runs = [compile(layer) for layer in layers]
    for _ in range(CALLS):
        x = draw(8, 32)
        for run in runs:
            x = run(x)
        x.square().mean().backward()
        found += gradients(layers)
        layers.zero_grad()
    return found


@program()
def checkpointed(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(lambda x: checkpoint(model, x, use_reentrant=False).square())
    for _ in range(CALLS):
        run(draw(8, 32)).mean().backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program(recorded=False)
def checkpoint_around(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        x = draw(8, 32, grad=True)
        checkpoint(run, x, use_reentrant=step % 2 == 0).square().mean().backward()
        found += [x.grad, *gradients(model)]
        model.zero_grad()
    return found


@program(recorded=False)
def saved_tensors_on_the_host(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for _ in range(CALLS):
        with torch.autograd.graph.save_on_cpu():
            loss = run(draw(8, 32)).square().mean()
        loss.backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def saved_tensors_held_by_hooks(compile: Compile) -> list[Any]:
    model, found, kept = mlp(), [], []
    run = compile(model)
    for _ in range(CALLS):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            loss = run(draw(8, 32)).square().mean()
        loss.backward()
        found += gradients(model)
        model.zero_grad()
        del kept[:-8]
    return found


@program()
def cache_as_a_buffer(compile: Compile) -> list[Any]:
    class Cached(nn.Module):
        cache: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(64, 16, device="cuda"))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(0, at, x)
            return self.cache.sum(0) + x

    model, found = Cached(), []
    run = compile(model)
    with torch.no_grad():
        for step in range(CALLS):
            found += [run(draw(1, 16), torch.tensor([step], device="cuda")), model.cache.clone()]
    return found


@program(recorded=False)
def cache_as_an_input(compile: Compile) -> list[Any]:
    def function(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    run, cache, found = compile(function), torch.zeros(16, 16, device="cuda"), []
    with torch.no_grad():
        for step in range(CALLS):
            if step == 12:
                cache = cache.clone()
            found += [run(cache, draw(16, 16)), cache.clone()]
    return found


@program()
def cache_at_a_marked_address(compile: Compile) -> list[Any]:
    def function(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    run, cache, found = compile(function), torch.zeros(16, 16, device="cuda"), []
    torch._dynamo.mark_static_address(cache)
    with torch.no_grad():
        for _ in range(CALLS):
            found += [run(cache, draw(16, 16)), cache.clone()]
    return found


@program()
def batch_norm_in_training(compile: Compile) -> list[Any]:
    model, found = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).cuda(), []
    run = compile(model)
    for _ in range(CALLS):
        run(draw(32, 16)).square().mean().backward()
        found += [*gradients(model), *(b.clone() for b in model.buffers())]
        model.zero_grad()
    return found


@program()
def second_thread(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    inputs = [draw(8, 32) for _ in range(2 * CALLS)]

    def work(index: int, results: list[Any]) -> None:
        with torch.no_grad():
            results += [run(x) for x in inputs[index::2]]

    with torch.no_grad():
        found += [run(x) for x in inputs[:8]]
    results: tuple[list[Any], list[Any]] = ([], [])
    other = threading.Thread(target=work, args=(1, results[1]))
    other.start()
    work(0, results[0])
    other.join()
    return [*found, *results[0], *results[1]]


@program()
def training_in_a_second_thread(compile: Compile) -> list[Any]:
    models, found = (mlp(), mlp()), ([], [])
    runs = [compile(model) for model in models]
    inputs = [draw(8, 32) for _ in range(CALLS)]

    def work(index: int) -> None:
        for x in inputs:
            loss = runs[index](x).square().mean()
            loss.backward()
            found[index].extend([loss.detach(), *gradients(models[index])])
            models[index].zero_grad()

    for each in (lambda: runs[0](inputs[0]).sum().backward(), lambda: runs[1](inputs[0]).sum().backward()):
        each()
    for model in models:
        model.zero_grad()
    other = threading.Thread(target=work, args=(1,))
    other.start()
    work(0)
    other.join()
    torch.cuda.synchronize()
    return [*found[0], *found[1]]


@program()
def other_streams(compile: Compile) -> list[Any]:
    run, streams, found = compile(lambda x: (x @ x).sin()), [torch.cuda.Stream() for _ in range(2)], []
    with torch.no_grad():
        for step in range(CALLS):
            x = draw(64, 64)
            stream = streams[step % 2] if step > 8 and step % 3 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(run(x))
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
    return found


@program()
def captured_by_the_program(compile: Compile) -> list[Any]:
    run, found, x = compile(lambda x: (x @ x).sin()), [], draw(32, 32)
    with torch.no_grad():
        for _ in range(8):
            found.append(run(draw(32, 32)))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = run(x)
        for _ in range(4):
            x.copy_(draw(32, 32))
            graph.replay()
            found += [out.clone(), run(draw(32, 32))]
    return found


@program()
def weights_loaded(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    with torch.no_grad():
        for step in range(CALLS):
            if step % 6 == 5:
                model.load_state_dict({name: draw(*value.shape) for name, value in model.state_dict().items()})
            found.append(run(draw(8, 32)))
    return found


@program()
def weights_exchanged(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    with torch.no_grad():
        for step in range(CALLS):
            if step % 6 == 5:
                for p in model.parameters():
                    p.data = torch.randn_like(p)
            found.append(run(draw(8, 32)))
    return found


@program()
def parameters_exchanged(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    with torch.no_grad():
        for step in range(CALLS):
            if step % 8 == 7:
                model[0].weight = nn.Parameter(draw(64, 32))
            found.append(run(draw(8, 32)))
    return found


@program()
def moved_to_the_host_and_back(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    with torch.no_grad():
        for step in range(CALLS):
            if step == 10:
                model.cpu()
                model.cuda()
            found.append(run(draw(8, 32)))
    return found


@program()
def weights_written_in_place(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    with torch.no_grad():
        for _ in range(CALLS):
            for p in model.parameters():
                p.mul_(1.01)
            found.append(run(draw(8, 32)))
    return found


@program(like="plain")
def dropout(compile: Compile) -> list[Any]:
    run, found = compile(mlp(dropout=0.5)), []
    with torch.no_grad():
        for step in range(CALLS):
            if step == 12:
                torch.manual_seed(3)
            found += [run(draw(8, 32)), torch.rand(4, device="cuda")]
    return found


@program(like="plain")
def dropout_in_training(compile: Compile) -> list[Any]:
    model, found = mlp(dropout=0.5), []
    run = compile(model)
    for _ in range(CALLS):
        run(draw(8, 32)).square().mean().backward()
        found += [*gradients(model), torch.rand(4, device="cuda")]
        model.zero_grad()
    return found


@program(recorded=False, like="plain")
def dropout_in_attention(compile: Compile) -> list[Any]:
    def attention(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.5)

    run, found = compile(attention), []
    for step in range(CALLS):
        q = draw(2, 4, 32, 32, grad=True)
        y = run(q, draw(2, 4, 32, 32))
        if step % 3:
            y.sum().backward()
            found.append(q.grad)
    return found


@program(like="plain")
def generator_restored(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: x + torch.rand_like(x)), []
    with torch.no_grad():
        for _ in range(CALLS):
            state, x = torch.cuda.get_rng_state(), draw(8, 8)
            found.append(run(x))
            torch.cuda.set_rng_state(state)
            found.append(run(x))
    return found


@program()
def dynamic_sizes(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: (x.sin() * x.shape[0]).sum(0), dynamic=True), []
    with torch.no_grad():
        for step in range(3 * CALLS):
            found.append(run(draw(2 + step % 5, 32)))
    return found


@program()
def many_sizes(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: x.sin() + x.sum(0), dynamic=True), []
    with torch.no_grad():
        for step in range(4 * CALLS):
            found.append(run(draw(2 + step % 40, 32)))
    return found


@program()
def dynamic_training(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model, dynamic=True)
    for step in range(2 * CALLS):
        run(draw(4 + step % 3, 32)).square().mean().backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def grad_modes_mixed(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(2 * CALLS):
        mode = (torch.no_grad, torch.enable_grad, torch.inference_mode)[step % 3]
        with mode():
            y = run(draw(8, 32))
        if y.requires_grad:
            y.square().mean().backward()
            found += gradients(model)
            model.zero_grad()
        found.append(y.detach())
    return found


@program()
def inference_mode_first(compile: Compile) -> list[Any]:
    run, found = compile(mlp().requires_grad_(False)), []
    for step in range(CALLS):
        with torch.inference_mode(step < 8):
            found.append(run(draw(8, 32)))
    return found


@program()
def evaluated_between_forward_and_backward(compile: Compile) -> list[Any]:
    model, other, found = mlp(), mlp(), []
    run, teacher = compile(model), compile(other)
    for _ in range(CALLS):
        y = run(draw(8, 32))
        with torch.no_grad():
            target = teacher(draw(8, 32))
        (y - target).square().mean().backward()
        found += [target, *gradients(model)]
        model.zero_grad()
    return found


@program()
def hooks(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run, seen = compile(model), dict[int, torch.Tensor]()

    def accumulated(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen[id(p)] = p.grad.clone()

    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(accumulated)
    for _ in range(CALLS):
        y = run(draw(8, 32))
        y.register_hook(lambda g: found.append(g))
        y.square().mean().backward()
        found.extend([seen.pop(id(p)) for p in model.parameters()])  # in which order they are called is autograd's
        model.zero_grad()
    return found


@program()
def built_again(compile: Compile) -> list[Any]:
    found: list[Any] = []
    for _ in range(3):
        model = mlp()
        run = compile(model)
        for _ in range(8):
            run(draw(8, 32)).square().mean().backward()
            found += gradients(model)
            model.zero_grad()
        del model, run
        gc.collect()
        torch.cuda.empty_cache()
    return found


@program()
def function_dropped_before_backward(compile: Compile) -> list[Any]:
    model = mlp()
    run = compile(model)
    for _ in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        loss.backward()
        model.zero_grad()
    loss = run(draw(8, 32)).square().mean()
    del run
    gc.collect()
    torch.cuda.empty_cache()
    filler = [draw(64, 64) for _ in range(16)]
    loss.backward()
    return [*gradients(model), filler[0]]


@program()
def reset_before_backward(compile: Compile) -> list[Any]:
    model, found = mlp(), []
    run = compile(model)
    for step in range(CALLS):
        loss = run(draw(8, 32)).square().mean()
        if step == 12:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        loss.backward()
        found += gradients(model)
        model.zero_grad()
    return found


@program()
def deep_copies(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: {"a": x.sin(), "b": [x.cos()]}), []
    with torch.no_grad():
        for _ in range(CALLS):
            found.append(copy.deepcopy(run(draw(8, 8))))
    return [(each["a"], each["b"][0]) for each in found]


@program()
def work_of_the_host_between(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        return (y + scale.to("cuda")).cos() @ y  # `scale` is on the host

    run, found = compile(function), []
    with torch.no_grad():
        for step in range(CALLS):
            found.append(run(draw(16, 16), torch.tensor(float(step))))
    return found


@program()
def indices_from_the_host_that_a_backward_reads(compile: Compile) -> list[Any]:
    table, x = draw(16, 8, grad=True), draw(16, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(4)
        indices = (places[:, None] * 4 + places[None, :]).flatten()
        indices[0] = 3  # as Beit's class token
        return (table[indices].sin() * x).cos()

    run, found = compile(function), []
    for _ in range(CALLS):
        table.grad = None
        run(x).sum().backward()
        assert table.grad is not None
        found.append(table.grad.clone())
    return found


@program(recorded=False)
def results_on_the_host(compile: Compile) -> list[Any]:
    def function(x: torch.Tensor, scale: torch.Tensor) -> Any:
        places = torch.arange(8)
        return x[places] * 2, places + 1, x.new_zeros((2, 3), device="cpu"), x * scale, scale

    run, scale = compile(function), torch.tensor(3.0)
    with torch.no_grad():
        return [run(draw(8, 8), scale) for _ in range(CALLS)]


@torch.library.custom_op("omni_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """An operator that waits for the device."""
    return x * float(x.sum().item() > 0)


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@program(recorded=False)
def operator_that_waits(compile: Compile) -> list[Any]:
    run, found = compile(lambda x: torch.ops.omni_test.waits(x.sin()) + 1), []
    with torch.no_grad():
        for _ in range(CALLS):
            found.append(run(draw(8, 8)))
    return found


@program()
def cut_graph(compile: Compile) -> list[Any]:
    run = compile(lambda x: torch.topk(x.sin() * 2, 3)[0].cos() + 1, lowerings={"aten.topk": "eager"})
    with torch.no_grad():
        return [run(draw(16, 32)) for _ in range(CALLS)]


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def run(function: Program, how: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)

    def compiled(call: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
        if how == "eager":
            return call
        options["cudagraphs"] = "never" if how == "plain" else how
        return torch.compile(call, backend="omni", dynamic=dynamic, options=options)

    found = tensors(function(compiled))
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("how", ["always", "auto"])
@pytest.mark.parametrize(("function", "recorded", "like"), _programs)
def test_values_are_those_without_recordings(function: Program, recorded: bool, like: str, how: str) -> None:
    expected, found = run(function, like), run(function, how)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4, msg=lambda text, at=index: f"value {at}: {text}")
    states = [event for event in events() if isinstance(event, CudaGraph)]
    if how == "always" and recorded:
        assert any(event.state == "recorded" for event in states), [event.reason for event in states]


def test_the_call_that_is_recorded_draws_its_own_numbers_while_the_recording_stream_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is launched before a recording runs while its first replay multiplies, and has not reached the draw yet."""
    release = torch.cuda.empty_cache  # the last that torch does before it records
    trees = trees_of(torch.cuda.current_device())
    x = torch.randn(8192, 8192, device="cuda")

    def busy() -> None:
        release()
        with torch.cuda.stream(trees.stream):
            torch.cuda._sleep(500_000_000)

    def function(x: torch.Tensor) -> torch.Tensor:
        product = x
        for _ in range(24):
            product = (product @ x).tanh()
        return torch.bernoulli(product[0].sign().abs() * 0.5)

    monkeypatch.setattr(torch.cuda, "empty_cache", busy)
    drawn: list[list[torch.Tensor]] = []
    for how in ("never", "always"):
        torch.compiler.reset()
        torch.manual_seed(0)
        options = {"cudagraphs": how, "fallback_random": True}  # the generator's numbers, where they are drawn
        compiled = torch.compile(function, backend="omni", options=options)
        with torch.no_grad():
            drawn.append([compiled(x) for _ in range(4)])
    assert [event.state for event in events() if isinstance(event, CudaGraph)][-1] == "recorded"
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


def bytes_of_pools() -> int:
    """What the allocator keeps for the recordings of CUDA graphs, whoever made them."""
    torch.cuda.empty_cache()  # which frees the pools that nobody has any more
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("limit", [2**26, None])
def test_recordings_of_a_stream_of_lengths_stay_within_their_bound(limit: int | None, training: bool) -> None:
    model = encoder(512).train(training)
    lengths = torch.randint(16, 768, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    def peaks(**options: Any) -> list[int]:
        torch.compiler.reset()
        compiled, found = torch.compile(model, backend="omni", dynamic=True, options=options), list[int]()
        with torch.set_grad_enabled(training):
            for length in lengths:
                for _ in range(4):
                    output = compiled(draw(2, length, 512))
                    if training:
                        output.square().mean().backward()
                        model.zero_grad()
                    del output
                found.append(bytes_of_pools())
        return found

    torch.cuda.reset_peak_memory_stats()
    assert max(peaks(cudagraphs="never")) == 0
    needed = torch.cuda.max_memory_allocated()
    found = peaks(cudagraphs="always", **({} if limit is None else {"cudagraphs_bytes": limit}))
    more = max(needed // 10, torch.cuda.get_device_properties(0).total_memory // 100, 2**28)
    assert max(found) <= (limit or needed + more)
    assert max(found) > 0, [event.reason for event in events() if isinstance(event, CudaGraph)]


def encoder(width: int, layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()


def trained(model: nn.Module, x: torch.Tensor, calls: int = 8, **options: Any) -> list[torch.Tensor]:
    """The gradients of the last step."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="omni", options=options) if options else model
    for _ in range(calls):
        model.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()
    return gradients(model)


def test_the_recordings_of_a_step_need_little_more_memory_than_a_plain_one() -> None:
    """A backward's takes the memory of what its forward saved, as soon as that is not needed any more."""
    model, x = encoder(256, layers=8), draw(16, 256, 256)
    expected = trained(model, x, cudagraphs="never")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    trained(model, x, cudagraphs="never")
    needed = torch.cuda.max_memory_allocated() - base
    found = trained(model, x, cudagraphs="always")
    states = [event for event in events() if isinstance(event, CudaGraph)][-2:]
    assert [event.state for event in states] == ["recorded", "recorded"], [event.reason for event in states]
    assert bytes_of_pools() < 1.15 * needed
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_a_backward_that_cant_be_recorded_is_computed_from_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = encoder(64, layers=2), draw(4, 32, 64)
    expected, captures, leave = trained(model, x), list[int](), torch.cuda.graph.__exit__

    def fails(self: Any, *args: Any) -> None:
        leave(self, *args)
        captures.append(len(captures))
        if len(captures) == 2:
            raise RuntimeError("a launch was refused")

    # The first is that of the forward; where the trees make an empty one to have a pool, it comes before.
    trees_of(torch.cuda.current_device())
    monkeypatch.setattr(torch.cuda.graph, "__exit__", fails)
    for calls in range(1, 6):
        captures.clear()
        found = trained(model, x, calls=calls, cudagraphs="always")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    assert len(captures) >= 2
    assert any(
        "a launch was refused" in event.reason.sentence
        for event in events()
        if isinstance(event, CudaGraph) and event.reason
    )
