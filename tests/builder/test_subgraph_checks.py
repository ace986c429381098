import dataclasses

import fake_engines as fake
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import omnicomp
from omnicomp.builder.subgraph_checks import described, taken_together
from omnicomp.lowerings import EagerLowering, GraphRecord, LoweringContext
from omnicomp.lowerings.engines.program import EngineLowering
from omnicomp.options.policy import parse
from omnicomp.timeline import Timeline


def nodes_of(function: object) -> list[torch.fx.Node]:
    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 6))  # type: ignore[arg-type]
    return [node for node in module.graph.nodes if node.op == "call_function"]


def context(**values: object) -> LoweringContext:
    policy = dataclasses.replace(parse(None, {}), engines={"fake": values})
    return LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=omnicomp.resolve_device("cpu"),
        policy=policy,
        timeline=Timeline(),
    )


NODES = nodes_of(lambda x: (x.exp().sin(), x.cos().exp(), (x * 2).sin()))


def test_other_lowerings_take_any_company() -> None:
    assert taken_together(EagerLowering(), NODES, context(strict=True, smallest=100)) == (frozenset(), None)


def test_an_engine_takes_what_it_accepts() -> None:
    assert taken_together(EngineLowering(fake.Fake()), NODES, context()) == (frozenset(), None)
    boundaries, reason = taken_together(EngineLowering(fake.Fake()), NODES, context(smallest=7))
    assert boundaries == frozenset()
    assert reason is not None
    assert (reason.code, reason.by) == ("cluster_refused", "fake")
    assert reason.sentence == "it has 6 operators, and the smallest subgraph has 7"


def test_strict_cuts_come_before_the_rest() -> None:
    boundaries, reason = taken_together(EngineLowering(fake.Fake()), NODES, context(strict=True, smallest=3))
    assert boundaries == {NODES[2].name, NODES[4].name}
    assert reason is None
    # Each of the parts is asked again, and is too small then.
    _, reason = taken_together(EngineLowering(fake.Fake()), NODES[:2], context(strict=True, smallest=3))
    assert reason is not None


def test_a_value_that_is_read_later_holds_a_run_together() -> None:
    nodes = nodes_of(lambda x: (x.exp() + x.sin()) * x.cos())
    assert [node.name for node in nodes] == ["exp", "sin", "add", "cos", "mul"]
    assert taken_together(EngineLowering(fake.Fake()), nodes, context(strict=True)) == (frozenset(), None)
    assert taken_together(EngineLowering(fake.Fake()), nodes[:2], context(strict=True))[0] == {"sin"}
    assert taken_together(EngineLowering(fake.Fake()), nodes[:1], context(strict=True)) == (frozenset(), None)


def test_what_a_compiler_is_called() -> None:
    assert described("device", "sim")[0] == "the compiler of sim"
    assert "compile_subgraph" in described("device", "sim")[1]
    assert described("toy", "cpu") == (
        "the engine toy", "report the error, or take toy out of options={'lowerings': [...]}",
    )  # fmt: skip
