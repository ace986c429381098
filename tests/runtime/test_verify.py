"""Verification against a higher precision: what is right passes with its error, what is wrong is replaced by eager."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import omnicomp
from omnicomp.devices import resolve_device
from omnicomp.errors import LoweringError, OptionError
from omnicomp.lowerings import Executable, GraphRecord, LoweringContext
from omnicomp.options.policy import Policy, parse
from omnicomp.runtime.verify import Verifier, in_precision
from omnicomp.timeline import Ran, Retreat, Timeline, current


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    output = next(iter(reversed(module.graph.nodes)))
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
        module.recompile()
    return module


def verifier(function: Callable[..., Any], *inputs: Tensor, **policy: Any) -> tuple[Verifier, Timeline]:
    timeline = Timeline()
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=resolve_device("cpu"),
        policy=Policy(**{"verify": "first", **policy}),
        timeline=timeline,
    )
    module = traced(function, *inputs)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    made = Verifier(module=module, inputs=fakes, context=context, subgraph="g0.inference.0", lowering="inductor")
    return made, timeline


def program(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() @ x.T, x.argmax(-1)


X = torch.randn(5, 7)


def test_the_reference_is_computed_in_its_dtype_throughout() -> None:
    def mixed(x: Tensor) -> Tensor:
        return (x.to(torch.bfloat16).sin() + torch.zeros(7, dtype=torch.bfloat16)).float()

    wide = in_precision(traced(mixed, X), torch.float64)
    (found,) = wide(X.double())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, X.double().sin(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_says_how_right(dtype: torch.dtype, reference: str) -> None:
    x = X.to(dtype)
    made, timeline = verifier(program, x, reference=reference)
    call = made.around(lambda args: program(args[0]))
    assert torch.equal(call([x])[0], program(x)[0])
    assert made.verdict.startswith(f"verified against {reference.replace('fp', 'float')}: error ")
    assert not made.failed
    assert timeline.events() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: (program(x)[0] * 1.001, program(x)[1]),
        lambda x: (program(x)[0].masked_fill(torch.eye(5) > 0, torch.nan), program(x)[1]),
        lambda x: (program(x)[0], program(x)[1] + 1),
        lambda x: (program(x)[0].half(), program(x)[1]),
        lambda x: (program(x)[0][:, :3], program(x)[1]),
    ],
    ids=["value", "NaN", "index", "dtype", "shape"],
)
def test_what_is_wrong_is_replaced_by_eager(wrong: Callable[[Tensor], Any]) -> None:
    made, timeline = verifier(program, X)
    calls: list[int] = []

    def run(args: list[Any]) -> Any:
        calls.append(1)
        return wrong(args[0])

    call = made.around(run)
    for _ in range(3):
        for found, want in zip(call([X]), program(X), strict=True):
            assert torch.equal(found, want)
    assert made.failed
    assert len(calls) == 1
    (retreat,) = [e for e in timeline.events() if isinstance(e, Retreat)]
    assert retreat.reason.code == "verification_failed"
    assert (retreat.source_lowering, retreat.target_lowering) == ("inductor", "eager")
    assert [e.lowering for e in timeline.events() if isinstance(e, Ran)] == ["eager"]


def test_only_the_first_call_is_verified_unless_all_are_asked_for() -> None:
    for verify, wrong_later in (("first", True), ("always", False)):
        made, _ = verifier(program, X, verify=verify)
        calls: list[int] = []

        def run(args: list[Any], calls: list[int] = calls) -> Any:
            calls.append(1)
            result, index = program(args[0])
            return (result + 1 if len(calls) > 1 else result), index

        call = made.around(run)
        call([X])
        assert (not torch.equal(call([X])[0], program(X)[0])) is wrong_later


def test_an_input_that_is_written_to_is_verified_and_put_right() -> None:
    def counts(x: Tensor, steps: Tensor) -> Tensor:
        steps.add_(1)
        return x * steps

    def wrong(args: list[Any]) -> Any:
        args[1].add_(2)
        return (args[0] * (args[1] - 1),)

    steps = torch.zeros(())
    made, _ = verifier(counts, X, steps)
    call = made.around(wrong)
    assert torch.equal(call([X, steps])[0], X)
    assert made.failed
    assert steps == 1
    call([X, steps])
    assert steps == 2


def test_random_numbers_and_references_that_raise_are_no_verdict() -> None:
    made, timeline = verifier(lambda x: x + torch.rand_like(x), X)
    made.around(lambda args: (args[0] + 1,))([X])
    assert made.verdict == "not verified: aten.rand_like.default draws other numbers in eager"
    made, _ = verifier(torch.matmul, X, X.T)
    assert made.around(lambda args: (args[0].sum(),))([X, X]) == (X.sum(),)
    assert made.verdict.startswith("not verified: the reference raised")
    assert timeline.events() == ()


def test_an_error_is_raised_if_that_is_asked_for() -> None:
    made, _ = verifier(program, X, on_error="raise")
    with pytest.raises(LoweringError, match=r"g0\.inference\.0 is wrong on inductor"):
        made.around(lambda args: (program(args[0])[0] + 1, program(args[0])[1]))([X])


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(None, None).verify == "overrides"
    monkeypatch.setenv("OMNICOMP_VERIFY", "first")
    assert parse(None, None).verify == "first"
    assert parse(None, {"verify": "always", "reference": "fp32"}).reference == "fp32"
    with pytest.raises(OptionError, match="verify can't be True"):
        parse(None, {"verify": True})
    monkeypatch.setenv("OMNICOMP_VERIFY", "1")
    with pytest.raises(OptionError, match="OMNICOMP_VERIFY can't be '1'"):
        parse(None, None)


@pytest.fixture
def sine_is_cosine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor generates the wrong function, and says nothing."""
    from torch._inductor import lowering

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.sin.default, lowering.lowerings[torch.ops.aten.cos.default])
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.inductor
@pytest.mark.usefixtures("sine_is_cosine")
def test_code_that_is_generated_wrong_is_found_in_forward_and_backward() -> None:
    x = torch.randn(9, requires_grad=True)
    unverified = torch.compile(lambda x: x.sin() * 2, backend="omni")
    assert not torch.allclose(unverified(x), x.sin() * 2)
    compiled = torch.compile(lambda x: (x.cos() + 1) * 2, backend="omni", options={"verify": "first"})
    omnicomp.timeline.clear()
    for _ in range(2):
        out = compiled(x)
        torch.testing.assert_close(out, (x.cos() + 1) * 2)
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(grad, -2 * x.sin())
    retreats = [e for e in current() if isinstance(e, Retreat)]
    assert [(e.part, e.reason.code) for e in retreats] == [("backward", "verification_failed")]
    ran = [(e.part, e.lowering) for e in current() if isinstance(e, Ran)]
    assert ran == [("forward", "inductor"), ("backward", "eager")]
    assert "omnicomp bisect" in retreats[0].reason.lever
    assert omnicomp.audit().mismatches == ()


@pytest.mark.parametrize("right", [True, False])
def test_with_eagers_numerics_every_bit_counts(right: bool) -> None:
    made, timeline = verifier(lambda x: x * 2, X, numerics="eager")
    call = made.around(lambda args: (args[0] * 2 if right else torch.nextafter(args[0] * 2, torch.tensor(9.0)),))
    assert torch.equal(call([X])[0], X * 2)
    assert made.failed is not right
    sentences = [event.reason.sentence for event in timeline.events() if isinstance(event, Retreat)]
    assert sentences == ([] if right else ["result 0 is not eager's in every bit"])


@pytest.mark.parametrize("wrong", [False, True])
def test_what_two_runs_of_eager_differ_in_is_not_blamed_on_the_code(wrong: bool) -> None:
    """As sums by atomic additions on a GPU."""
    made, timeline = verifier(lambda x: (x.sin(), x * 2), X, numerics="eager")
    runs = iter(range(9))
    made.build = lambda: Executable(lowering="eager", call=lambda args: [args[0].sin() + next(runs), args[0] * 2])
    call = made.around(lambda args: (args[0].sin(), args[0] * (3 if wrong else 2)))
    found = call([X])
    assert torch.equal(found[1], X * 2)
    assert made.failed is wrong
    assert wrong or made.verdict.endswith("but for 1 in which two runs of eager differ")
    retreats = [event.reason.sentence for event in timeline.events() if isinstance(event, Retreat)]
    assert retreats == (["result 1 is not eager's in every bit"] if wrong else [])


def test_with_eagers_numerics_random_numbers_are_compared_from_the_same_state() -> None:
    made, _ = verifier(lambda x: x + torch.rand_like(x), X, numerics="eager")
    torch.manual_seed(0)
    expected, state = X + torch.rand_like(X), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(made.around(lambda args: (args[0] + torch.rand_like(args[0]),))([X])[0], expected)
    assert made.verdict == "verified: eager's results in every bit"
    assert torch.equal(torch.get_rng_state(), state)
