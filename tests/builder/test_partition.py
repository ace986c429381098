"""Programs that change their inputs in place get eager's gradients, and keep their inputs, whatever is recomputed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn import examples
from functorch.compile import min_cut_rematerialization_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

import omnicomp
from omnicomp._torch.autograd import aot_autograd as aot
from omnicomp._torch.autograd import mutations, partitioner

EAGER: dict[str, Any] = {"lowerings": ["eager"], "on_error": "raise"}
INDUCTOR: dict[str, Any] = {"lowerings": ["inductor"], "on_error": "raise"}
Program = Callable[..., Any]


@torch.library.custom_op("omnicomp_test::bump", mutates_args=("b",))
def bump(b: Tensor) -> None:
    b.add_(1)


def then_added_to(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b.add_(1)
    return y


def then_changed_through_a_view(x: Tensor, b: Tensor) -> Tensor:
    y = (x * b.t().cos().t()).sin()
    b[0].mul_(2)
    return y


def read_through_a_view(x: Tensor, b: Tensor) -> Tensor:
    y = x * b[0].expand(8, 8).sin()
    b.view(-1)[::2].zero_()
    return y


def split_and_read(x: Tensor, b: Tensor) -> Tensor:
    upper, lower = b.chunk(2)
    y = x[:4] * upper.sin() * lower.cos()
    b.neg_().add_(0.3)
    return y


def read_with_strides(x: Tensor, b: Tensor) -> Tensor:
    y = x[:4, :4] * torch.as_strided(b, (4, 4), (3, 1), 1).sin()
    b.add_(1)
    return y


def overwritten_by_what_was_computed(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.exp()
    b.copy_(y.detach())
    return y.sin()


def statistics(x: Tensor, b: Tensor) -> Tensor:
    y = (x - b * 0.9) * (b * b + 1).rsqrt()
    with torch.no_grad():
        b.mul_(0.9).add_(0.1 * x)
    return y.tanh()


def read_again_when_changed(x: Tensor, b: Tensor) -> Tensor:
    y = x * (b.sin() * b.cos() + b.exp())
    b.add_(1)
    z = y * b.sin()
    b.mul_(2)
    return z


def changed_past_autograd(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b.data.add_(1)
    return y


def changed_in_a_list(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    torch._foreach_add_([b], 1.0)
    return y


def changed_by_index(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b[torch.tensor([0, 2])] = 0.0
    return y


def changed_by_an_operator(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    bump(b)
    return y


def returned_as_a_view(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b.add_(1)
    return y + b.view(-1)[0]


def input_with_gradient_changed(x: Tensor, b: Tensor) -> Tensor:
    y = x.exp()
    x.mul_(b.sin())
    b.add_(1)
    return y * x.sin()


PROGRAMS: tuple[Program, ...] = (
    *(then_added_to, then_changed_through_a_view, read_through_a_view, split_and_read, read_with_strides),
    *(overwritten_by_what_was_computed, statistics, read_again_when_changed, changed_past_autograd, changed_in_a_list),
    *(changed_by_index, changed_by_an_operator, returned_as_a_view, input_with_gradient_changed),
)


def results(program: Program, *, calls: int = 1, shape: tuple[int, int] = (8, 8)) -> list[Tensor]:
    """Outputs of all calls, then one backward through all of them: the gradient, and what the buffer became."""
    torch.manual_seed(0)
    x, b = torch.randn(shape, requires_grad=True), torch.randn(shape)
    outputs = [program(x * (i + 1), b) for i in range(calls)]
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    assert x.grad is not None
    return [*(output.detach() for output in outputs), x.grad, b]


def compiled(program: Program, options: dict[str, Any], **kwargs: Any) -> Program:
    return torch.compile(program, backend="omni", fullgraph=True, options=options, **kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_eagers_when_an_input_is_changed_after_it_was_read(program: Program, dynamic: bool) -> None:
    torch.testing.assert_close(results(compiled(program, EAGER, dynamic=dynamic)), results(program))


@pytest.mark.parametrize("program", [then_added_to, statistics, read_again_when_changed])
def test_calls_between_forward_and_backward_do_not_change_what_was_saved(program: Program) -> None:
    torch.testing.assert_close(results(compiled(program, EAGER), calls=3), results(program, calls=3))


@pytest.mark.parametrize("program", [then_added_to, split_and_read, read_with_strides])
@pytest.mark.parametrize("budget", [0.0, 0.4])
def test_a_budget_that_saves_only_inputs_saves_what_they_were(program: Program, budget: float) -> None:
    with functorch_config.patch(activation_memory_budget=budget):
        torch.testing.assert_close(results(compiled(program, EAGER)), results(program))


def test_plain_partitioning_gets_these_gradients_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "partition", min_cut_rematerialization_partition)
    wrong = compiled(then_added_to, EAGER)
    got, expected = results(wrong), results(then_added_to)
    if torch.allclose(got[1], expected[1]):
        pytest.skip(f"torch {torch.__version__} partitions this program rightly by itself")
    torch.testing.assert_close(got[0], expected[0])


def test_a_checkpointed_region_reads_what_eager_would_read_in_it() -> None:
    # Eager runs the region again in the backward, and what it closes over has changed by then.
    def program(x: Tensor, b: Tensor) -> Tensor:
        y = checkpoint(lambda x: (x * b.sin()).sin(), x, use_reentrant=False)
        z = x * b.cos()
        b.add_(1)
        return y + z

    torch.testing.assert_close(results(compiled(program, EAGER)), results(program))


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sin": lambda x, b, y: y * b.sin(),
    "sigmoid of a view": lambda x, b, y: y + x * b.t().sigmoid().t(),
    "row": lambda x, b, y: y * b[1].cos(),
    "mask": lambda x, b, y: torch.where(b > 0, y * 2, y.sin()),
    "square": lambda x, b, y: y.tanh() * (b * b + 1).rsqrt(),
    "sum": lambda x, b, y: y * b.sum(0, keepdim=True).sin(),
}
CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add": lambda x, b, y: b.add_(0.5),
    "average": lambda x, b, y: b.mul_(0.9).add_(y.detach().tanh() * 0.1),
    "copy": lambda x, b, y: b.copy_(y.detach().sin()),
    "row": lambda x, b, y: b[1].neg_(),
    "rows": lambda x, b, y: b[1:3].copy_(x[1:3].detach().sin()),
    "index": lambda x, b, y: b.index_put_((torch.tensor([0, 2]),), torch.tensor(0.7)),
    "none": lambda x, b, y: None,
}


@settings(max_examples=examples(8))
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(sorted(CHANGES))), min_size=1, max_size=4),
    calls=st.integers(1, 2),
    dynamic=st.booleans(),
)
def test_reads_and_changes_in_any_order_give_eagers_gradients(
    steps: list[tuple[str, str]], calls: int, dynamic: bool
) -> None:
    def program(x: Tensor, b: Tensor) -> Tensor:
        y = x * 1
        for step, change in steps:
            y = STEPS[step](x, b, y)
            CHANGES[change](x, b, y)
        return y

    torch.compiler.reset()
    expected = results(program, calls=calls, shape=(4, 8))
    got = results(compiled(program, EAGER, dynamic=dynamic), calls=calls, shape=(4, 8))
    torch.testing.assert_close(got, expected)


@pytest.mark.inductor
def test_inductor_gets_what_the_forward_read() -> None:
    for program in (statistics, then_changed_through_a_view):
        torch.testing.assert_close(results(compiled(program, INDUCTOR), calls=2), results(program, calls=2))


@pytest.mark.inductor
def test_a_backward_of_inductor_leaves_the_changed_input_alone() -> None:
    # What the forward wrote into the input, it also saves, and the backward takes it for memory of its own.
    def program(x: Tensor, b: Tensor) -> Tensor:
        b[2:4].copy_(x[2:4].detach())
        return (x * b.cos()).sin()

    torch.testing.assert_close(results(compiled(program, INDUCTOR)), results(program))


@pytest.mark.inductor
def test_an_output_of_inductor_is_not_changed_by_the_next_write() -> None:
    def program(b: Tensor) -> Tensor:
        b[0:2] = 1.0
        before = b.clone()
        b[1:6] = 2.0
        return before

    mine, theirs = torch.zeros(8, 8), torch.zeros(8, 8)
    with torch.no_grad():
        got = compiled(program, INDUCTOR)(mine)
    torch.testing.assert_close([got, mine], [program(theirs), theirs])
    assert got.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()


@pytest.mark.inductor
def test_inductor_keeps_a_nan_that_is_multiplied_by_an_integer_zero() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, -2.0])
    with torch.no_grad():
        got = compiled(lambda x: x * 0, INDUCTOR)(values)
    torch.testing.assert_close(got, values * 0, equal_nan=True)
    assert torch.equal(torch.signbit(got[2:]), torch.tensor([True, True]))


def test_a_graph_without_writes_is_split_as_it_is() -> None:
    seen: list[list[str]] = []

    def inner(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        seen.append([node.name for node in gm.graph.nodes])
        return gm, gm

    graph = Graph()
    x = graph.placeholder("primals_1")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    names = [node.name for node in graph.nodes]
    partitioner.partition(GraphModule({}, graph), [], num_fwd_outputs=1, inner=inner)
    assert seen == [names]
    assert mutations.separate_outputs(graph) == 0


class _Mine(CustomPartitionerFn):
    """A partitioner of the user's."""

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.calls = 0

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        self.calls += 1
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any | None:
        return self.key


def test_cache_keys_follow_a_partitioner_of_the_users() -> None:
    plain = partitioner.config_patches({})["custom_partitioner_fn"]
    assert plain.uuid() == partitioner.KeepWritten().uuid()
    keys = [partitioner.config_patches({"custom_partitioner_fn": _Mine(key)})["custom_partitioner_fn"] for key in "ab"]
    assert len({plain.uuid(), *(key.uuid() for key in keys)}) == 3
    assert partitioner.KeepWritten(_Mine(None)).uuid() is None, "the user's partitioner asks for no caching"
    assert partitioner.config_patches({"custom_partitioner_fn": plain})["custom_partitioner_fn"] is plain


@pytest.mark.inductor
def test_a_partitioner_of_the_users_is_called_and_made_right() -> None:
    for _ in range(2):
        torch.compiler.reset()
        mine = _Mine(None)
        got = results(compiled(then_added_to, {**INDUCTOR, "custom_partitioner_fn": mine}))
        torch.testing.assert_close(got, results(then_added_to))
        assert mine.calls == 1, "it gives no key, so nothing is restored in its place"
    assert not [event for event in omnicomp.timeline.events() if event.type == "retreat"]
