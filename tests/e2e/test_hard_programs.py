"""Hard programs give what eager gives: values, gradients, writes, strides, shared memory and errors."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import hard_features  # noqa: F401 - registers its programs
import hard_programs  # noqa: F401
import pytest
import torch
from concurrency import NO_GPU, ONE_THREAD, WIDE, behind_a_fork, in_threads, many_compilations
from outcomes import PROGRAMS, Outcome, Program, compare, outcome, prepared, run
from tiers import fast
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

# One of each kind of what threads could disturb: memory, writes, state, sizes; the first can be shared by threads.
UNDER_THREADS = (
    "writes_to_an_input_while_training",
    "branches_on_data",
    "autograd_function",
    "sizes_that_depend_on_data",
    "custom_operator_that_writes",
    "batch_norm_in_training",
    "changing_shapes",
    "an_optimiser_step",
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
        pytest.param({}, marks=[pytest.mark.inductor, pytest.mark.slow], id="inductor"),
        pytest.param(CUT, marks=[pytest.mark.inductor, pytest.mark.slow], id="cut"),
    ],
)


def named(names: tuple[str, ...]) -> list[Program]:
    return [program for program in PROGRAMS if program.name in names]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_without_a_compiler(program: Program) -> None:
    check(program, EAGER)


def tiers(program: Program) -> tuple[pytest.MarkDecorator, ...]:
    """Of a program that is one graph of Inductor's; the thousands of nodes take half a minute."""
    if program.name in UNDER_THREADS:
        return ()
    in_pieces = program.name in WHERE_PIECES_MEET  # which Inductor compiles, too
    return (pytest.mark.slow, *[pytest.mark.long] * (in_pieces or program.name == "thousands_of_nodes"))


@pytest.mark.inductor
@pytest.mark.parametrize("program", [pytest.param(p, marks=tiers(p)) for p in PROGRAMS], ids=lambda p: p.name)
def test_with_inductor(program: Program) -> None:
    check(program, INDUCTOR)
    assert omnicomp.audit().mismatches == ()


@pytest.mark.inductor
@pytest.mark.parametrize("program", named(WHERE_PIECES_MEET), ids=lambda p: p.name)
def test_in_pieces(program: Program) -> None:
    check(program, CUT)
    assert omnicomp.audit().mismatches == ()


def test_every_name_is_a_program() -> None:
    for names in (WHERE_PIECES_MEET, UNDER_THREADS):
        assert {program.name for program in named(names)} == set(names)


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


def without_much_code(programs: list[Program]) -> list[Program]:
    """All that compile in a moment; each thread compiles for itself, one after the other."""
    return [program for program in programs if WIDE or program.name != "thousands_of_nodes"]


# Numbers that all threads draw from one generator are not the same twice, in eager neither.
CALM = without_much_code([program for program in PROGRAMS if not program.draws])


def shareable() -> list[Program]:
    """Of a module, eager itself lets threads race for the gradients of its parameters."""
    if not WIDE:
        return named(UNDER_THREADS[:5])
    return [p for p in CALM if not p.keeps and not isinstance(prepared(p)[0], nn.Module)]


def under_threads(program: Program, options: dict[str, Any], *, shared: bool) -> None:
    """Eight threads compile a program, or share one that is compiled, and call it twice on inputs of their own."""
    wanted = expected(program)
    torch.compiler.reset()
    made = [prepared(program) for _ in range(8)]
    common = torch.compile(made[0][0], backend="omni", options=options)

    def work(index: int) -> None:
        function, inputs = made[index]
        compiled = common if shared else torch.compile(function, backend="omni", options=options)
        compare(run(compiled, function, inputs), wanted, program.tolerance)

    with many_compilations():
        in_threads(work)
    assert omnicomp.audit().mismatches == ()


@pytest.mark.parametrize(
    "program",
    fast(CALM if WIDE else named(UNDER_THREADS), lambda p: p.name in UNDER_THREADS[:3]),
    ids=lambda p: p.name,
)
def test_eight_threads_with_one_each(program: Program) -> None:
    under_threads(program, EAGER, shared=False)


@pytest.mark.parametrize("program", fast(shareable(), lambda p: p.name in UNDER_THREADS[:3]), ids=lambda p: p.name)
def test_eight_threads_that_share_one(program: Program) -> None:
    under_threads(program, EAGER, shared=True)


@pytest.mark.inductor
@pytest.mark.parametrize("program", CALM if WIDE else named(UNDER_THREADS[:2]), ids=lambda p: p.name)
@pytest.mark.slow
def test_eight_threads_with_one_of_inductors_each(program: Program) -> None:
    under_threads(program, INDUCTOR, shared=False)


def in_a_worker(program: Program, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    check(program, options)


@NO_GPU
@pytest.mark.parametrize(
    "programs",
    fast([named(UNDER_THREADS), without_much_code(PROGRAMS)], lambda programs: len(programs) == len(UNDER_THREADS)),
    ids=["some", "all"],
)
def test_programs_in_a_forked_worker(programs: list[Program]) -> None:
    behind_a_fork([functools.partial(in_a_worker, program, EAGER) for program in programs])


@NO_GPU
@pytest.mark.inductor
@pytest.mark.slow
def test_programs_of_inductors_in_a_forked_worker() -> None:
    options = {**INDUCTOR, **ONE_THREAD}
    programs = without_much_code(PROGRAMS) if WIDE else named(UNDER_THREADS[:2])
    behind_a_fork([functools.partial(in_a_worker, program, options) for program in programs])


def test_programs_that_were_compiled_before_the_fork() -> None:
    """In the parent, which calls them too; functions alone, as what calls change in a module is the parent's."""

    def compiled(program: Program) -> Callable[[], None]:
        wanted, (function, inputs) = expected(program), prepared(program)
        call = torch.compile(function, backend="omni", options=EAGER)
        run(call, function, inputs)

        def work() -> None:
            compare(run(call, *prepared_again(program, function)), wanted, program.tolerance)

        return work

    behind_a_fork([compiled(program) for program in shareable()])


def prepared_again(program: Program, function: Any) -> tuple[Any, list[Any]]:
    """The function that was compiled, with inputs that nothing was written to."""
    return function, prepared(program)[1]


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


@pytest.mark.parametrize("where", ["parent", pytest.param("worker", marks=NO_GPU)])
@SETTINGS
def test_in_a_forked_worker(options: dict[str, Any], where: str) -> None:
    """What was compiled before the fork is called behind it, or the worker compiles for itself."""
    options = options if options is EAGER else {**options, **ONE_THREAD}
    compiled = None
    if where == "parent":
        compiled = torch.compile(transform, backend="omni", options=options)
        compiled(torch.zeros(64, 64))
    loader = DataLoader(
        Compiled(compiled, options), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120
    )
    for index, item in enumerate(loader):
        torch.testing.assert_close(item, transform(torch.full((64, 64), float(index))))
