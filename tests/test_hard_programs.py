"""Hard programs give what eager gives: values, gradients, writes, strides, shared memory and errors."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import hard_features  # noqa: F401 - registers its programs
import hard_programs  # noqa: F401
import pytest
import torch
from outcomes import PROGRAMS, Outcome, Program, compare, outcome
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import omnicomp

EAGER = {"lowerings": ["eager"]}
# Eager's random numbers, so that they can be compared.
INDUCTOR = {"fallback_random": True}
CUT = {**INDUCTOR, "lowerings": {"*": ["inductor", "eager"], "aten.mul.Tensor": "eager", "aten.add.Tensor": "eager"}}
# Where pieces of a graph could come to disagree: on memory, on what was written, on what was drawn, on sizes.
WHERE_PIECES_MEET = (
    "writes_to_an_input_while_training",
    "writes_to_a_view_of_an_input",
    "writes_to_two_inputs_that_overlap",
    "returns_its_input_and_views_of_it",
    "returns_views_of_a_result",
    "buffers_that_count",
    "dropout",
    "random_numbers_of_many_kinds",
    "strided_inputs",
    "channels_last",
    "float64",
    "custom_operator_that_writes",
    "checkpointed_dropout",
    "jagged_tensors",
    "in_place_chain",
    "sizes_that_depend_on_data",
    "changing_shapes",
    "an_optimiser_step",
    "control_flow_operators",
)


def expected(program: Program) -> Outcome:
    """Eager's outcome, or Dynamo's own where no backend is ever asked."""
    return outcome(program, (lambda f: f) if program.traced else lambda f: torch.compile(f, backend="eager"))


def check(program: Program, options: dict[str, Any]) -> None:
    compare(
        outcome(program, lambda f: torch.compile(f, backend="omni", options=options)),
        expected(program),
        program.tolerance,
    )


SETTINGS = pytest.mark.parametrize(
    "options",
    [
        pytest.param(EAGER, id="eager"),
        pytest.param({}, marks=pytest.mark.inductor, id="inductor"),
        pytest.param(CUT, marks=pytest.mark.inductor, id="cut"),
    ],
)


def named(names: tuple[str, ...]) -> list[Program]:
    return [program for program in PROGRAMS if program.name in names]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_without_a_compiler(program: Program) -> None:
    check(program, EAGER)


@pytest.mark.inductor
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_with_inductor(program: Program) -> None:
    check(program, INDUCTOR)
    assert omnicomp.audit().mismatches == ()


@pytest.mark.inductor
@pytest.mark.parametrize("program", named(WHERE_PIECES_MEET), ids=lambda p: p.name)
def test_in_pieces(program: Program) -> None:
    check(program, CUT)
    assert omnicomp.audit().mismatches == ()


def test_every_name_is_a_program() -> None:
    assert {program.name for program in named(WHERE_PIECES_MEET)} == set(WHERE_PIECES_MEET)


def model_and_step() -> tuple[nn.Module, Callable[[nn.Module, Tensor], list[Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def step(module: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = module(x)
        (grad,) = torch.autograd.grad(y.sin().sum(), x)
        return [y.detach(), grad]

    return model, step


@SETTINGS
def test_eight_threads(options: dict[str, Any]) -> None:
    """Threads compile and call one model together, forward and backward, and others of their own."""
    model, step = model_and_step()
    shared = torch.compile(model, backend="omni", options=options)
    inputs = [torch.randn(4, 6) for _ in range(8)]

    def work(index: int) -> bool:
        x, fine = inputs[index], True
        own = torch.compile(lambda a: (a * index).sin() @ a.mT, backend="omni", options=options)
        for _ in range(3):
            pairs = zip(step(shared, x), step(model, x), strict=True)
            fine &= all(torch.allclose(got, want, atol=1e-5) for got, want in pairs)
            fine &= torch.allclose(own(x), (x * index).sin() @ x.mT, atol=1e-5)
        return fine

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert omnicomp.audit().mismatches == ()


class Compiled(Dataset[Tensor]):
    """A data set whose items are computed by a compiled function; where one is None, it is compiled in the worker."""

    def __init__(self, function: Callable[[Tensor], Tensor] | None, options: dict[str, Any]) -> None:
        self.function, self.options = function, options

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        if self.function is None:
            self.function = torch.compile(transform, backend="omni", options=self.options)
        return self.function(torch.full((64, 64), float(index)))


def transform(x: Tensor) -> Tensor:
    return (x.sin() + 1).cumsum(0) * x.cos().mean(1)


# Dynamo asks for the state of the GPU's generator when it compiles, which a forked process may not.
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process can't compile beside a GPU")


@pytest.mark.parametrize("where", ["parent", pytest.param("worker", marks=NO_GPU)])
@SETTINGS
def test_in_a_forked_worker(options: dict[str, Any], where: str) -> None:
    """What was compiled before the fork is called behind it, or the worker compiles for itself.

    With one thread: GNU's OpenMP has no threads left behind a fork, and code for several waits for them for ever.
    """
    options = options if options is EAGER else {**options, "cpp.threads": 1}
    compiled = None
    if where == "parent":
        compiled = torch.compile(transform, backend="omni", options=options)
        compiled(torch.zeros(64, 64))
    loader = DataLoader(
        Compiled(compiled, options), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120
    )
    for index, item in enumerate(loader):
        torch.testing.assert_close(item, transform(torch.full((64, 64), float(index))))
