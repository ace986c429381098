"""The pass manager checks what a pass claims."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from omnicomp.analysis.nodes import insert_call
from omnicomp.devices import resolve_device
from omnicomp.errors import PassError
from omnicomp.passes.base import Pass, PassContext, PassResult, digest, run_pipeline
from omnicomp.timeline import PassRun, Timeline


@dataclasses.dataclass(frozen=True)
class SinToCos(Pass):
    """Replaces sin by cos, and reports `claims` if given."""

    name: ClassVar[str] = "sin_to_cos"
    claims: bool | None = None
    after: Callable[[GraphModule], None] | None = None

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        return True

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        modified = False
        for node in list(module.graph.nodes):
            if node.target in (torch.sin, "sin"):
                node.replace_all_uses_with(insert_call(node, torch.cos, node.args))
                module.graph.erase_node(node)
                context.rewrite(self.name, "trigonometry", node, target="cos")
                modified = True
        if self.after is not None:
            self.after(module)
        return PassResult(module, modified if self.claims is None else self.claims)


def captured(function: Callable[..., Any], *args: torch.Tensor) -> GraphModule:
    """The Dynamo graph of a function."""
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=backend)(*args)
    return graphs[0]


def context() -> PassContext:
    return PassContext(graph_id="g0", device=resolve_device("cpu"), timeline=Timeline(), training=False)


def record(ctx: PassContext) -> PassRun:
    (event,) = [e for e in ctx.timeline if isinstance(e, PassRun)]
    return event


def test_a_rewrite_is_run_counted_and_diffed() -> None:
    module, ctx, x = captured(lambda x: x.sin() + x.sin(), torch.ones(2)), context(), torch.rand(2)
    assert run_pipeline((SinToCos(),), module, ctx)
    torch.testing.assert_close(module(x)[0], 2 * x.cos())
    event = record(ctx)
    assert (event.applied, event.modified, event.rewrites) == (True, True, 2)
    assert event.node_diff == {"Tensor.sin": -2, "torch.cos": 2}
    rewrite = next(e for e in ctx.timeline if e.type == "rewrite")
    assert rewrite.source.startswith(__file__)


@pytest.mark.parametrize("claims", [True, False])
def test_a_false_claim_is_an_error(claims: bool) -> None:
    module = captured((lambda x: x.exp()) if claims else (lambda x: x.sin()), torch.ones(2))
    with pytest.raises(PassError, match=f"modified={claims}"):
        run_pipeline((SinToCos(claims=claims),), module, context())


def test_a_broken_graph_is_an_error() -> None:
    def use_before_definition(module: GraphModule) -> None:
        call = next(n for n in module.graph.nodes if n.op == "call_function")
        call.args = (next(iter(reversed(module.graph.nodes))),)

    module = captured(lambda x: x.sin(), torch.ones(2))
    with pytest.raises(PassError, match="broken graph"):
        run_pipeline((SinToCos(after=use_before_definition),), module, context())


def test_verify_finds_a_changed_output() -> None:
    class Widen(SinToCos):
        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            output = next(iter(reversed(module.graph.nodes)))
            (value,) = output.args[0]
            output.args = ((insert_call(output, torch.ops.aten.to.dtype, (value, torch.float64)),),)
            return PassResult(module, True)

    run_pipeline((Widen(),), captured(lambda x: x + 1, torch.ones(2)), context())
    with pytest.raises(PassError, match=r"output 0 from \(2,\) torch.float32 on cpu to \(2,\) torch.float64"):
        run_pipeline((Widen(),), captured(lambda x: x + 1, torch.ones(2)), context(), check=True)


def test_verify_runs_the_graph_and_does_not_believe_its_metadata() -> None:
    class SumInDisguise(SinToCos):
        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            next(n for n in module.graph.nodes if n.target == "sin").target = "sum"
            return PassResult(module, True)

    with pytest.raises(PassError, match=r"output 0 from \(2,\) .* to \(\) "):
        run_pipeline((SumInDisguise(),), captured(lambda x: x.sin(), torch.ones(2)), context(), check=True)


def test_submodules_of_higher_order_operators_are_rewritten_too() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False).exp()

    x = torch.rand(3, requires_grad=True)
    module, ctx = captured(function, x), context()
    assert run_pipeline((SinToCos(),), module, ctx)
    assert record(ctx).node_diff == {"Tensor.sin": -1, "torch.cos": 1}
    torch.testing.assert_close(module(x)[0], (x.cos() * 2).exp())


def test_a_pass_is_switched_off_by_name() -> None:
    module, ctx = captured(lambda x: x.sin(), torch.ones(2)), context()
    assert not run_pipeline((SinToCos(),), module, ctx, disabled=("sin_to_cos",))
    assert not record(ctx).applied
    assert "disable_passes" in record(ctx).note


def test_a_pass_must_work_in_place() -> None:
    class Copies(SinToCos):
        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            return PassResult(GraphModule(module, module.graph), False)

    with pytest.raises(PassError, match="in place"):
        run_pipeline((Copies(),), captured(lambda x: x.sin(), torch.ones(2)), context())


def test_the_digest_follows_the_passes() -> None:
    class Other(SinToCos):
        name = "other"

    assert digest((SinToCos(),)) == digest((SinToCos(),))
    assert digest((SinToCos(),)) != digest((Other(),))
    assert digest(()) != digest((SinToCos(),))
