"""The order of the lowerings is the user's: each operator runs on the first that takes it, and the others say why not.

Drawn programs and drawn orders are compared with what the order means, operator by operator; the forms of overrides,
which enter a graph at different moments, are each put before and behind another compiler.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import rival_engines
import torch
from recorded import events as of
from tiers import fast
from torch import Tensor, nn
from torch.fx import GraphModule

import omnicomp
from omnicomp.analysis.nodes import insert_call, op_name
from omnicomp.devices.cpu import CpuDevice
from omnicomp.lowerings.engines import Operators, resolve_engine
from omnicomp.lowerings.overrides.search import Found
from omnicomp.timeline import Attempt, NodePlacement, Placement, Ran, Retreat, Subgraph

aten = torch.ops.aten
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("sin", "exp", "relu", "tanh", "neg", "sigmoid", "abs", "atan")
}
REFUSED: set[str] = set()  # by the compiler of the device
CALLS: list[str] = []


class Program:
    """What the compiler of the device makes."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        return torch.fx.Interpreter(self.module).run(*arguments)


def compile_subgraph(self: Any, module: GraphModule, inputs: Sequence[Any]) -> Program:
    operators = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert all(target.namespace == "aten" for target in operators), operators
    for target in operators:
        if target._schema.name.removeprefix("aten::") in REFUSED:
            raise KeyError(f"no kernel for {target}")
    return Program(module)


@pytest.fixture(autouse=True)
def everything_is_put_back(monkeypatch: pytest.MonkeyPatch, own_overrides: None) -> Iterator[None]:
    monkeypatch.setattr(CpuDevice, "compile_subgraph", compile_subgraph)
    monkeypatch.setattr(CpuDevice, "lowerings", ("override", "device", "inductor", "eager"))
    REFUSED.clear()
    CALLS.clear()
    with rival_engines.declared():
        yield


def takes(names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine `rival` takes these operators and no others."""
    operators = Operators()
    operators.add(*(getattr(aten, name).default for name in names))
    monkeypatch.setattr(rival_engines.Rival, "operators", operators)


def override_operator(name: str) -> None:
    function = UNARY[name]

    @omnicomp.override(op=getattr(aten, name).default, name=f"own_{name}")
    def own(x: Tensor) -> Tensor:
        CALLS.append(name)
        return function(x)


def refusals() -> list[NodePlacement]:
    return [declined for event in of(Placement) for declined in event.declined]


def plain_name(operator: str) -> str:
    """`sin` of `aten.sin.default`, and of an override of it, which has a number if the name was taken before."""
    return re.sub(r"^(aten\.|omnicomp_override\.own_)|(_\d+)?\.default$", "", operator)


def ran() -> Counter[tuple[str, str]]:
    """How many operators of each name ran on each lowering."""
    where = {event.subgraph: event.lowering for event in of(Ran)}
    found: Counter[tuple[str, str]] = Counter()
    for row in of(Subgraph):
        for operator, count in row.ops.items():
            found[plain_name(operator), where[row.subgraph]] += count
    return found


def drawn(draw: random.Random) -> tuple[list[str], Callable[[Tensor], Tensor]]:
    names = draw.choices(list(UNARY), k=draw.randint(2, 7))

    def program(x: Tensor) -> Tensor:
        for name in names:
            x = UNARY[name](x)
        return x

    return names, program


@pytest.mark.parametrize("seed", fast(range(24), chosen=lambda seed: seed < 5))
def test_drawn_orders_mean_what_they_say(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    names, program = drawn(draw)
    order = draw.sample(["override", "device", "toy", "rival"], k=draw.randint(2, 4))
    order.insert(draw.randint(2, len(order)), "eager")
    overridden, taken = (draw.sample(list(UNARY), k=draw.randint(1, 5)) for _ in range(2))
    REFUSED.update(draw.sample(list(UNARY), k=draw.randint(0, 3)))
    takes(taken, monkeypatch)
    for name in overridden:
        override_operator(name)
    toy = resolve_engine("toy").operators
    serves: dict[str, Callable[[str], bool]] = {
        "override": lambda name: name in overridden,
        "device": lambda name: name not in REFUSED,
        "toy": lambda name: toy.get(getattr(aten, name).default) is not None,
        "rival": lambda name: name in taken,
        "eager": lambda name: True,
    }
    x = torch.rand(3, 4)
    with torch.no_grad():
        got = torch.compile(program, backend="omni", options={"lowerings": order, "verify": "off"})(x)
    torch.testing.assert_close(got, program(x))

    first = {name: next(lowering for lowering in order if serves[lowering](name)) for name in names}
    assert ran() == Counter((name, first[name]) for name in names), order
    assert Counter(CALLS) == Counter(name for name in names if first[name] == "override")
    expected = Counter[tuple[str, str, tuple[str, ...]]]()
    for name in names:
        before = tuple(lowering for lowering in order[: order.index(first[name])] if lowering != "override")
        if before:
            expected[name, first[name], before] += 1
    seen = Counter((plain_name(node.op), node.lowering, tuple(r.by for r in node.chain)) for node in refusals())
    assert seen == expected, order
    for node in refusals():
        for reason in node.chain:
            assert reason.code == ("cut_out" if reason.by == "device" else "unsupported_op"), reason
            assert plain_name(node.op) in reason.node


# ---- the forms of overrides ------------------------------------------------------------------------------------------


def sine_of_exponential(x: Tensor) -> Tensor:
    return x.exp().sin()


class Block(nn.Module):
    """What the overrides take."""

    def forward(self, x: Tensor) -> Tensor:
        return sine_of_exponential(x)


class Model(nn.Module):
    """A block between other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.relu()).neg()


@torch.library.custom_op("omnicomp_test_order::block", mutates_args=())
def block_kernel(x: Tensor) -> Tensor:
    CALLS.append("block")
    return sine_of_exponential(x)


block_kernel.register_fake(torch.empty_like)
block_kernel.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].exp().cos() * ctx.saved_tensors[0].exp(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
KERNEL = torch.ops.omnicomp_test_order.block.default


def search(module: GraphModule) -> Iterator[Found]:
    for node in module.graph.nodes:
        if op_name(node).endswith(".sin"):
            inner: Any = node.args[0]
            x = inner.args[0]
            yield Found(
                output=node,
                steps=(inner,),
                arguments={"x": x},
                write=lambda node=node, x=x: insert_call(node, KERNEL, (x,)),
            )


def override_of_two(form: str, **others: Any) -> None:
    declared: dict[str, dict[str, Any]] = {
        "pattern": {
            "reference": sine_of_exponential,
            "example": lambda: (torch.rand(3, 4),),
            "operators": (KERNEL,),
        },
        "module": {"module": Block},
        "search": {"search": search, "reference": sine_of_exponential, "operators": (KERNEL,)},
    }
    decorate = omnicomp.override(name="own_block", **declared[form], **others)
    if form == "pattern":
        decorate(lambda x: KERNEL(x))
    else:
        decorate(block_kernel)


FORMS = ("pattern", "module", "search")


def run(order: list[str], x: Tensor, model: Callable[[Tensor], Tensor] | None = None) -> None:
    model = Model() if model is None else model
    compiled = torch.compile(model, backend="omni", options={"lowerings": order, "verdicts": "off"})
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("form", FORMS)
def test_before_an_engine_an_override_wins(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "sin", "relu", "neg"], monkeypatch)
    override_of_two(form)
    run(["override", "rival", "eager"], torch.rand(3, 4))
    assert "block" in CALLS
    assert {event.lowering for event in of(Ran)} == {"override", "rival"}


@pytest.mark.parametrize("form", FORMS)
def test_behind_an_engine_that_takes_all_of_it_an_override_is_not_asked(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(["exp", "sin", "relu", "neg"], monkeypatch)
    override_of_two(form)
    run(["rival", "override", "eager"], torch.rand(3, 4))
    assert CALLS == []
    assert {event.lowering for event in of(Ran)} == {"rival"}
    assert refusals() == []


@pytest.mark.parametrize("failing", ["exp", "sin"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compiler", ["rival", "device"])
def test_behind_a_compiler_an_override_takes_what_that_refuses(
    form: str, failing: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes([name for name in ("exp", "sin", "relu", "neg") if name != failing], monkeypatch)
    REFUSED.add(failing)
    override_of_two(form)
    run([compiler, "override", "eager"], torch.rand(3, 4))
    assert "block" in CALLS
    assert [event.lowering for event in of(Ran)] == [compiler, "override", compiler]
    (node,) = refusals()
    (reason,) = node.chain
    assert (node.lowering, reason.by) == ("override", compiler)
    assert f"aten.{failing}" in reason.node
    assert reason.code == ("cut_out" if compiler == "device" else "unsupported_op")
    assert bool(of(Retreat)) == (compiler == "device")
    assert not omnicomp.audit().mismatches


@pytest.mark.parametrize("form", ["module", "search"])
def test_behind_a_compiler_in_training(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "relu", "neg"], monkeypatch)
    override_of_two(form)
    x = torch.rand(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(Model()(x).sum(), x)
    compiled = torch.compile(Model(), backend="omni", options={"lowerings": ["rival", "override", "eager"]})
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, expected)
    assert "block" in CALLS
    (forward,) = (event for event in of(Placement) if event.part == "forward")
    assert forward.nodes.get("override") == 1


def test_what_only_a_backward_fails_on_says_why_the_override_does_not_take_it() -> None:
    REFUSED.add("cos")
    override_of_two("module")
    x = torch.rand(3, 4, requires_grad=True)
    torch.compile(Model(), backend="omni", options={"lowerings": ["device", "override", "eager"]})(x).sum().backward()
    assert CALLS == []
    assert [(node.op, node.lowering, [reason.by for reason in node.chain]) for node in refusals()] == [
        ("aten.cos.default", "eager", ["own_block"]),
        ("aten.cos.default", "eager", ["device"]),
    ]
    said = next(reason for node in refusals() for reason in node.chain if reason.by == "own_block")
    assert "before autograd" in said.sentence


@pytest.mark.parametrize("form", FORMS)
def test_an_override_that_refuses_says_so_when_it_is_asked(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "relu", "neg"], monkeypatch)
    override_of_two(form, dtypes=(torch.float16,))
    run(["rival", "override", "eager"], torch.rand(3, 4))
    assert CALLS == []
    said = {reason.by: reason for node in refusals() for reason in node.chain}
    assert set(said) == {"rival", "own_block"}
    assert said["own_block"].code == "override_refused"


@pytest.mark.parametrize("form", FORMS)
def test_an_override_that_is_not_asked_refuses_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "sin", "relu", "neg"], monkeypatch)
    override_of_two(form, dtypes=(torch.float16,))
    run(["rival", "override", "eager"], torch.rand(3, 4))
    assert refusals() == []


def test_rules_have_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "sin", "relu", "neg"], monkeypatch)
    for name in ("sin", "exp", "relu"):
        override_operator(name)
    rules = {"*": ["rival", "override", "eager"], "aten.sin": ["override", "eager"], "aten.exp": ["eager"]}
    model = Model()
    compiled = torch.compile(model, backend="omni", options={"lowerings": rules})
    x = torch.rand(3, 4)
    torch.testing.assert_close(compiled(x), model(x))
    assert CALLS == ["sin"]
    assert ran() == Counter({("relu", "rival"): 1, ("exp", "eager"): 1, ("sin", "override"): 1, ("neg", "rival"): 1})


def test_a_module_whose_compilation_fails_as_a_whole_goes_to_its_override(monkeypatch: pytest.MonkeyPatch) -> None:
    from omnicomp.backend import pipeline

    original, tried = pipeline.compile_parts, []

    def failing(gm: GraphModule, *others: Any) -> Any:
        tried.append(gm)
        if any(op_name(node).endswith(".sin") for node in gm.graph.nodes):
            raise RuntimeError("planted: autograd can't trace it")
        return original(gm, *others)

    monkeypatch.setattr(pipeline, "compile_parts", failing)
    override_of_two("module")
    run(["device", "override", "eager"], torch.rand(3, 4))
    assert (CALLS, len(tried)) == (["block"], 2)
    assert "can't trace it" in str(refusals()[0].chain[0])


class Twice(nn.Module):
    """Two blocks, of which one has what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x.abs())


def test_each_block_is_taken_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(["exp", "abs"], monkeypatch)
    override_of_two("module")
    run(["rival", "override", "eager"], torch.rand(3, 4), Twice())
    assert CALLS == ["block", "block"]


@pytest.fixture
def no_cumsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor can't build `cumsum`."""
    import torch._inductor.compile_fx  # noqa: F401 - fills the table
    from torch._inductor.lowering import lowerings

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted: no lowering")

    monkeypatch.setattr(CpuDevice, "lowerings", ("override", "inductor", "eager"))
    for key in (aten.cumsum.default, aten.cumsum):
        if key in lowerings:
            monkeypatch.setitem(lowerings, key, broken)


def test_behind_inductor_an_override_serves_what_that_cannot_build(no_cumsum: None) -> None:
    @omnicomp.override(op=aten.cumsum.default, name="own_cumsum")
    def own(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        CALLS.append("cumsum")
        return torch.cumsum(x, dim)

    with torch.no_grad():
        run(["inductor", "override", "eager"], torch.rand(3, 4), lambda x: x.exp().cumsum(-1).relu())
    assert CALLS == ["cumsum"]
    assert [event.lowering for event in of(Ran)] == ["inductor", "override", "inductor"]
    (node,) = refusals()
    assert (node.op, node.lowering) == ("aten.cumsum.default", "override")
    assert "planted" in node.chain[0].sentence
    attempts = {event.lowering: event for event in of(Attempt) if event.subgraph.endswith(".inference.1")}
    assert attempts["override"].selected
    assert "planted" in str(attempts["inductor"].reason)


class Summed(nn.Module):
    """A block with the operator that Inductor can't build."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp().cumsum(-1).relu()


@pytest.mark.slow
@pytest.mark.parametrize("order", [["inductor", "override"], ["override", "inductor"], ["inductor", "eager"]])
def test_modules_behind_inductor(order: list[str], no_cumsum: None) -> None:
    @omnicomp.override(module=Summed, name="own_summed", reference=lambda x: x.exp().cumsum(-1).relu())
    def own(x: Tensor) -> Tensor:
        CALLS.append("summed")
        return x.exp().cumsum(-1).relu()

    with torch.no_grad():
        run(order, torch.rand(3, 4), nn.Sequential(nn.Tanh(), Summed(), nn.Sigmoid()))
    assert CALLS == (["summed"] if "override" in order else [])
    where = [event.lowering for event in of(Ran)]
    expected = {
        "inductor": ["inductor", "override", "inductor"],
        "override": ["inductor", "override"],
    }
    assert where == (expected[order[0]] if "override" in order else ["inductor", "eager", "inductor"])
