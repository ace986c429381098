"""Made-up timelines: what a large model with fallbacks would leave, for tests and benches of the audit's views."""

from collections.abc import Iterator
from typing import Final

from omnicomp.timeline import (
    Attempt,
    Boundary,
    Cache,
    Capture,
    Event,
    NearMiss,
    NodePlacement,
    PassRun,
    Placement,
    Ran,
    Reason,
    Retreat,
    Rewrite,
    Stage,
    Subgraph,
    Timing,
)

_KINDS: Final = (("inductor", "attn"), ("eager", "router"), ("inductor", "mlp"), ("override", "norm"))
_OPS: Final = {
    "attn": {"aten.addmm.default": 4, "aten.permute.default": 6, "aten.view.default": 9},
    "router": {"aten.nonzero.default": 1},
    "mlp": {"aten.addmm.default": 2, "aten.gelu.default": 1, "aten.add.Tensor": 1},
    "norm": {"aten.native_layer_norm.default": 1},
}
_START: Final = 1_700_000_000.0


def large_timeline(subgraphs: int = 5000, *, graphs: int = 4) -> Iterator[Event]:
    """Events of models of equal layers with four subgraphs each, one of them on eager for a reason of its own.

    Args:
        subgraphs: how many there are in all, spread over the graphs.
        graphs: how many graphs there are.
    """
    per_graph, rest = divmod(subgraphs, graphs)
    for number in range(graphs):
        yield from _graph(f"g{number}", per_graph + (number < rest), _START + 1000 * number)


def _graph(graph: str, count: int, start: float) -> Iterator[Event]:
    versions = {"torch": "2.13.0", "omnicomp": "0.1.0"}
    yield Capture(
        graph=graph, time=start, compile_id=f"{graph[1:]}/0", function=f"Model{graph[1:]}.forward (model.py:80)",
        nodes=count * 6, device="cpu", training=True, options={"timing": True}, versions=versions, module="layers",
        pid=4711,
    )  # fmt: skip
    yield Stage(graph=graph, time=start, stage="dynamo", seconds=2.0)
    note = "17 nodes were removed"
    yield PassRun(
        graph=graph, time=start + 1, name="attention_fusion", modified=True, rewrites=1, seconds=0.5, note=note
    )
    layers = range(0, count, len(_KINDS))
    for layer, _ in enumerate(layers):
        module, source = f"layers.{layer}.attn", f"model.py:{20 + layer % 7}"
        if layer % 5 == 0:
            reason = Reason(
                code="match_ended", by="attention_fusion", sentence="the weights are returned", node="output"
            )
            yield NearMiss(
                graph=graph, time=start + 1, name="attention_fusion", kind="attention", node=f"softmax_{layer}",
                reason=reason, source=source, module=module,
            )  # fmt: skip
        else:
            yield Rewrite(
                graph=graph, time=start + 1, name="attention_fusion", kind="attention", node=f"softmax_{layer}",
                source=source, module=module, target="scaled_dot_product_attention", detail="causal, scale 0.125",
            )  # fmt: skip
    declined = tuple(
        NodePlacement(
            node=f"nonzero_{layer}",
            op="aten.nonzero.default",
            lowering="eager",
            source="model.py:31",
            module=f"layers.{layer}.router",
            chain=(_unsupported(layer),),
        )
        for layer, first in enumerate(layers)
        if first + 1 < count
    )
    placed = {"inductor": count * 5, "eager": len(declined)}
    yield Placement(graph=graph, time=start + 2, part="forward", nodes=placed, declined=declined)
    at = start + 3
    for number in range(count):
        at += 0.05
        yield from _subgraph(graph, number, at)
    yield Stage(graph=graph, time=at + 0.2, stage="lowering", seconds=at - start - 2.5, part="forward")
    yield Stage(graph=graph, time=at + 0.5, stage="autograd", seconds=0.8)
    for number in range(count):
        lowering, _ = _KINDS[number % 4]
        ran = "eager" if _fails(number) else lowering
        id = f"{graph}.forward.{number}"
        yield Ran(graph=graph, time=at + 1, part="forward", subgraph=id, lowering=ran, evidence=f"module_{number}.py")
        spent = 1e-4 * (1 + number % 9)
        yield Timing(
            graph=graph,
            time=at + 2,
            part="forward",
            subgraph=id,
            device="cpu",
            calls=8,
            seconds=8 * spent,
            fastest=spent,
        )


def _fails(number: int) -> bool:
    return number % 200 == 2


def _unsupported(layer: int) -> Reason:
    return Reason(
        code="unsupported_op",
        by="inductor",
        sentence="the size of its result depends on values",
        observed="u0 elements",
        needed="a size that is known before the call",
        node=f"nonzero_{layer} (aten.nonzero.default)",
        source="model.py:31",
        cause=f"gt_{layer}",
        lever="use torch.where with three arguments",
    )


def _subgraph(graph: str, number: int, at: float) -> Iterator[Event]:
    lowering, kind = _KINDS[number % 4]
    layer, id = number // 4, f"{graph}.forward.{number}"
    ops = _OPS[kind]
    flops = 0 if kind == "norm" else 1000 * (1 + number % 13) * sum(ops.values())
    module = f"layers.{layer}.{kind}"
    yield Subgraph(
        graph=graph, time=at, part="forward", subgraph=id, lowering=lowering, nodes=sum(ops.values()), ops=ops,
        flops=f"{flops // 1000}*s0", flops_hint=flops, bytes=f"{4 * number}*s0", bytes_hint=4000 * number, inputs=3,
        outputs=1, modules=(module, f"{module}.proj"), sources=(f"model.py:{20 + number % 40}",), module=module,
        fingerprint=f"{kind:0<12.12}-{number % 4:08d}", refused=(f"nonzero_{layer}",) if kind == "router" else (),
    )  # fmt: skip
    if number:
        source = f"{graph}.forward.{number - 1}"
        yield Boundary(
            graph=graph, time=at, part="forward", source=source, target=id, tensors=1 + number % 3,
            bytes_hint=4096 * (1 + number % 50), casts=number % 2,
        )  # fmt: skip
    failed = _fails(number)
    if failed:
        reason = Reason(
            code="build_failed", by="inductor", sentence="g++ ended with 1", lever="send the file to PyTorch"
        )
        yield Attempt(
            graph=graph,
            time=at,
            part="forward",
            subgraph=id,
            lowering="inductor",
            ok=False,
            reason=reason,
            seconds=0.02,
        )
        yield Retreat(
            graph=graph, time=at, part="forward", subgraph=id, source_lowering="inductor", target_lowering="eager",
            reason=reason,
        )  # fmt: skip
    yield Attempt(
        graph=graph, time=at, part="forward", subgraph=id, lowering="eager" if failed else lowering, ok=True,
        selected=True, seconds=0.001 if failed else 0.04, artefact=f"module_{number}.py",
    )  # fmt: skip
    if lowering == "inductor":
        yield Cache(
            graph=graph, time=at, part="forward", subgraph=id, cache="fx_graph", verdict="miss", key=f"k{number}"
        )
