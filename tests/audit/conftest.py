"""A timeline as a program with a fallback, a retreat, an override and a hostile name would leave it."""

from collections.abc import Callable

import pytest

from omnicomp.timeline import (
    Attempt,
    Cache,
    Capture,
    Event,
    NearMiss,
    NodePlacement,
    Option,
    PassRun,
    Placement,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Subgraph,
)

HOSTILE = "<script>alert(1)</script>"


def unsupported(op: str = "aten.foo.default", source: str = "/home/me/model.py:12") -> Reason:
    return Reason(
        code="unsupported_op",
        by="inductor",
        sentence=f"Inductor has no lowering for {op}",
        observed=f"op={op}",
        node=f"foo ({op})",
        source=source,
        lever="write an override for it",
    )


def no_override() -> Reason:
    return Reason(code="no_override", by="override", sentence="no override is registered for aten.foo.default")


def sample(*, cold: bool = True) -> list[Event]:
    folder = "/tmp/torchinductor_me/ab" if cold else "/var/other/torchinductor_you/cd"
    events: list[Event] = [
        Capture(
            graph="g0",
            compile_id="0/0",
            function="Model.forward /home/me/model.py:5",
            nodes=40,
            device="cpu",
            mode="max-autotune",
            training=True,
            dynamic=True,
            options={"dtype_policy": "bf16"},
            versions={"torch": "2.13.0", "omnicomp": "0.1.0"},
        ),
        Option(
            graph="g0",
            key="triton.cudagraphs",
            requested="True",
            effective="False",
            reason=Reason(
                code="option_ineffective",
                sentence="the CPU has no CUDA graphs",
                lever="leave the option out on this device",
            ),
        ),
        PassRun(
            graph="g0",
            name="fuse_attention",
            modified=True,
            rewrites=1,
            seconds=0.25 if cold else 0.24,
            node_diff={"torch.matmul": -2, "scaled_dot_product_attention": 1},
        ),
        PassRun(graph="g0", name="dtype_policy", applied=False, note="switched off"),
        Rewrite(
            graph="g0",
            name="fuse_attention",
            kind="attention",
            node="softmax",
            source="/home/me/model.py:8",
            module="layers.0.attn",
            target="scaled_dot_product_attention",
            detail="causal, scale 0.125",
        ),
        NearMiss(
            graph="g0",
            name="fuse_attention",
            kind="attention",
            node="softmax_1",
            source="/home/me/model.py:9",
            module=HOSTILE,
            reason=Reason(
                code="match_ended",
                by="fuse_attention",
                sentence="the weights are returned too",
                node="output",
                lever="do not return the attention weights",
            ),
        ),
        Placement(
            graph="g0",
            part="forward",
            nodes={"inductor": 38, "eager": 1, "override": 1},
            declined=(
                NodePlacement(
                    node="foo",
                    op="aten.foo.default",
                    lowering="eager",
                    source="/home/me/model.py:12",
                    module=HOSTILE,
                    chain=(no_override(), unsupported()),
                ),
            ),
            note="38 nodes have no override and went to Inductor",
        ),
        Subgraph(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0",
            lowering="inductor",
            nodes=30,
            ops={"aten.mm.default": 10, "aten.add.Tensor": 20},
            flops="2*s0*1000",
            flops_hint=900,
            bytes="4*s0",
            bytes_hint=400,
            inputs=3,
            outputs=1,
            modules=("layers.0.attn", HOSTILE),
            sources=("/home/me/model.py:8",),
        ),
        Subgraph(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0/softmax_topk",
            lowering="override",
            nodes=1,
            ops={"aten.topk.default": 1},
            flops_hint=100,
        ),
        Subgraph(
            graph="g0",
            part="forward",
            subgraph="g0.forward.1",
            lowering="eager",
            nodes=1,
            ops={"aten.foo.default": 1},
            flops="s0",
            flops_hint=50,
            sources=("/home/me/model.py:12",),
        ),
        Subgraph(
            graph="g0",
            part="forward",
            subgraph="g0.forward.10",
            lowering="inductor",
            nodes=8,
            ops={HOSTILE: 8},
            flops_hint=50,
        ),
        Attempt(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0",
            lowering="inductor",
            ok=True,
            selected=True,
            seconds=12.5 if cold else 0.1,
            artefact=f"{folder}/c0.py",
        ),
        Attempt(graph="g0", part="forward", subgraph="g0.forward.1", lowering="eager", ok=True, selected=True),
        Attempt(
            graph="g0",
            part="forward",
            subgraph="g0.forward.10",
            lowering="inductor",
            ok=False,
            reason=Reason(code="build_failed", by="inductor", sentence=f"{folder}/c1.cpp does not compile"),
        ),
        Attempt(graph="g0", part="forward", subgraph="g0.forward.10", lowering="eager", ok=True, selected=True),
        Retreat(
            graph="g0",
            part="forward",
            subgraph="g0.forward.10",
            source_lowering="inductor",
            target_lowering="eager",
            reason=Reason(code="build_failed", by="inductor", sentence=f"{folder}/c1.cpp does not compile"),
        ),
        Ran(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0",
            lowering="inductor",
            evidence=f"{folder}/c0.py",
            kernels={"extern_kernels.mm": 10},
        ),
        Ran(
            graph="g0",
            part="forward",
            subgraph="g0.forward.0/softmax_topk",
            lowering="override",
            evidence="omnicomp.lowerings.overrides.softmax_topk",
        ),
        Ran(graph="g0", part="forward", subgraph="g0.forward.1", lowering="eager", evidence="fx.Interpreter"),
        Ran(graph="g0", part="forward", subgraph="g0.forward.10", lowering="eager", evidence="fx.Interpreter"),
        Cache(graph="g0", part="forward", cache="fx_graph", verdict="miss" if cold else "hit", key="f" * 8),
    ]
    return events


@pytest.fixture
def make_events() -> Callable[..., list[Event]]:
    return sample


@pytest.fixture
def events() -> list[Event]:
    return sample()
