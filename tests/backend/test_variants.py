"""Two variants of a graph: both right, the second compiled when it is needed, the choice made at each call."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recorded import events
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import omnicomp
import omnicomp.backend.pipeline
from omnicomp import passes
from omnicomp.analysis.nodes import op_name
from omnicomp.backend import variants
from omnicomp.backend.variants import PATIENCE
from omnicomp.passes import verdicts
from omnicomp.passes.assumptions import Assumption, assumption
from omnicomp.passes.base import Pass, PassContext, PassResult
from omnicomp.passes.verdicts import Memo
from omnicomp.timeline import Capture, Ran, Reason, Retreat, Rewrite, Speculation, current

EAGER = {"lowerings": ["eager"]}


class DropsMaskedFill(Pass):
    """Rewrites `x.masked_fill(~mask, value)` to `x` as if the mask were full."""

    name = "drops_masked_fill"

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        return context.speculate

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        modified = False
        assert context.root is not None
        for node in list(module.graph.nodes):
            if op_name(node) != "Tensor.masked_fill":
                continue
            operand, inverted, _ = node.args
            (mask,) = inverted.args
            found = assumption(context.root, mask, sentence="the padding mask is full", saves="a masked_fill")
            if isinstance(found, Reason):
                context.near_miss(self.name, "mask", node, found)
                continue
            context.assume(found)
            node.replace_all_uses_with(operand)
            context.rewrite(self.name, "mask", node, target="nothing")
            for dead in (node, inverted):
                if not dead.users:
                    module.graph.erase_node(dead)
            modified = True
        return PassResult(module, modified)


@pytest.fixture(autouse=True)
def toy_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PIPELINE", (DropsMaskedFill(),))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).masked_fill(~(mask[:, None] != 0), -1.0)
        return scores.cumsum(-1).tanh()


FULL = torch.ones(3, dtype=torch.long)
PADDED = torch.tensor([1, 1, 0])


def states() -> list[tuple[str, str]]:
    return [(event.state, event.variant) for event in events(Speculation)]


def check(compiled: Callable[..., Any], model: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(compiled(*args), model(*args))


def test_both_variants_are_right_and_the_second_is_compiled_when_it_is_needed() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    check(compiled, model, x, FULL)
    assert states() == [("assumed", "assumed"), ("compiled", "assumed"), ("held", "assumed")]
    assert len(events(Capture)) == len(events(Rewrite)) == 1
    check(compiled, model, x, PADDED)
    assert states()[3:] == [("compiled", "general"), ("failed", "general")]
    first, second = events(Capture)
    assert (first.variant, second.variant, second.graph) == ("", "general", f"{first.graph}:general")
    assert {e.subgraph for e in events(Ran)} == {f"{first.graph}.forward.0", f"{second.graph}.forward.0"}
    assert len(events(Rewrite)) == 1, "the general variant keeps the mask"


def test_a_first_call_that_is_padded_compiles_the_general_variant_alone() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    check(compiled, model, x, PADDED)
    assert states() == [("assumed", "assumed"), ("compiled", "general"), ("failed", "general")]
    assert not events(Rewrite), "what was not compiled is not reported as rewritten"
    check(compiled, model, x, FULL)
    assert states()[3:] == [("compiled", "assumed"), ("held", "assumed")]
    assert len(events(Rewrite)) == 1


def test_a_mask_that_flips_is_checked_at_each_call_and_nothing_is_compiled_again() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    mask = FULL.clone()
    for _ in range(3):
        for value in (1, 0, 1):
            mask[1] = value  # in place: the same tensor all the time
            check(compiled, model, x, mask)
    assert len(events(Capture)) == 2
    assert [state for state, _ in states()].count("compiled") == 2
    assert "stopped" not in dict(states())


def test_calls_that_are_never_full_end_the_checks() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    for _ in range(PATIENCE + 1):
        check(compiled, model, x, PADDED)
    assert [state for state, _ in states()] == ["assumed", "compiled", "failed", "stopped"]
    (stopped,) = [e for e in events(Speculation) if e.state == "stopped"]
    assert stopped.reason.code == "assumption_failed"
    check(compiled, model, x, FULL)
    assert len(states()) == 4, "the general variant serves a full mask, too"


def test_speculation_is_switched_off_by_an_option() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options={**EAGER, "speculate": False})
    for mask in (FULL, PADDED):
        check(compiled, model, x, mask)
    assert states() == []
    assert len(events(Capture)) == 1
    with pytest.raises(omnicomp.errors.OptionError, match="speculate can't be 'yes'; it takes True or False"):
        torch.compile(model, backend="omni", options={"speculate": "yes"})(x, FULL)


@pytest.mark.parametrize("masks", [(FULL, PADDED, FULL), (PADDED, FULL)], ids=["full first", "padded first"])
def test_gradients_of_both_variants(masks: tuple[torch.Tensor, ...]) -> None:
    model = Model()
    compiled = torch.compile(model, backend="omni", options=EAGER)
    for mask in masks:
        x, gradients = torch.randn(3, 4), []
        for run in (model, compiled):
            model.zero_grad()
            run(x, mask).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(gradients[1], gradients[0])
    assert {e.part for e in events(Ran)} == {"forward", "backward"}
    assert len(events(Ran)) == 4


def test_dynamic_sizes_share_both_variants() -> None:
    model = Model()
    compiled = torch.compile(model, backend="omni", options=EAGER, dynamic=True)
    for rows in (3, 5, 8):
        x, full = torch.randn(rows, 4), torch.ones(rows, dtype=torch.long)
        padded = full.clone()
        padded[-2:] = 0
        for mask in (full, padded):
            check(compiled, model, x, mask)
    assert len(events(Capture)) == 2, "one graph, two variants"
    assert not events(Retreat)


class LooksAtSizes(DropsMaskedFill):
    """Adds a guard on a size when it runs on the general variant."""

    name = "looks_at_sizes"

    def applies(self, module: GraphModule, context: PassContext) -> bool:
        return True

    def run(self, module: GraphModule, context: PassContext) -> PassResult:
        if context.speculate:
            return super().run(module, context)
        sizes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        (size,) = [value for value in sizes if isinstance(value, torch.SymInt)]
        assert size % 2 == 0
        return PassResult(module, False)


def test_what_a_late_compilation_learns_of_sizes_is_checked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PIPELINE", (LooksAtSizes(),))
    model = Model()
    compiled = torch.compile(model, backend="omni", options=EAGER, dynamic=True)
    check(compiled, model, torch.randn(6, 4), torch.ones(6, dtype=torch.long))
    for rows in (8, 10):
        check(compiled, model, torch.randn(rows, 4), torch.arange(rows))
    assert not events(Retreat), "sizes that the general variant is right for"
    for rows in (5, 7):
        check(compiled, model, torch.randn(rows, 4), torch.arange(rows))
    (retreat,) = events(Retreat)
    assert retreat.graph.endswith(":general")
    assert "Mod" in retreat.reason.needed
    assert len(events(Capture)) == 2


def test_a_region_of_a_checkpoint_is_rewritten_and_checked_at_the_entry_of_the_graph() -> None:
    model = Model()

    def checkpointed(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, (mask + 0), use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="omni", options=EAGER)
    for mask in (FULL, PADDED):
        check(compiled, checkpointed, torch.randn(3, 4), mask)
    assert ("held", "assumed") in states()
    assert ("failed", "general") in states()


@pytest.mark.inductor
def test_both_variants_compiled_by_inductor_with_gradients_and_symbolic_sizes() -> None:
    model = Model()
    compiled = torch.compile(model, backend="omni", dynamic=True)
    for rows, first in ((3, 0), (6, 1)):
        x, mask = torch.randn(rows, 4), torch.ones(rows, dtype=torch.long)
        for value in (1, first):
            mask[-1] = value
            gradients = []
            for run in (model, compiled):
                model.zero_grad()
                output = run(x, mask)
                output.sum().backward()
                gradients.append([output, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            torch.testing.assert_close(gradients[1], gradients[0])
    assert sorted(e.subgraph.split(".", 1)[0].partition(":")[2] for e in events(Ran)) == ["", "", "general", "general"]
    assert {e.lowering for e in events(Ran)} == {"inductor"}
    assert not omnicomp.audit().mismatches


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    model = Model()
    compiled = torch.compile(model, backend="omni", options=EAGER)
    with mode():
        for mask in (FULL.clone(), PADDED.clone(), FULL.clone()):
            check(compiled, model, torch.randn(3, 4), mask)
    assert {e.part for e in events(Ran)} == {"inference"}
    assert [state for state, _ in states()].count("compiled") == 2


def test_random_numbers_and_modes_are_left_alone_by_a_late_compilation() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    with Mode():
        compiled(x, FULL)
        torch.manual_seed(5)
        check(compiled, model, x, PADDED)
        drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert ("compiled", "general") in states()


def test_threads_that_race_compile_each_variant_once() -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    with torch.no_grad():
        compiled(x, FULL)
        wrong: list[Any] = []
        start = threading.Barrier(4)

        def call(mask: torch.Tensor) -> None:
            with torch.no_grad():
                expected = model(x, mask)
                start.wait()
                wrong.extend(1 for _ in range(20) if not torch.allclose(compiled(x, mask), expected))

        threads = [threading.Thread(target=call, args=(mask,)) for mask in (FULL, PADDED, PADDED, FULL)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert [state for state, _ in states()].count("compiled") == 2


def test_a_check_that_raises_is_recorded_and_the_general_variant_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    compiled(x, FULL)

    def begin(self: Any, args: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setattr(variants.Checks, "begin", begin)
    for mask in (PADDED, FULL):
        check(compiled, model, x, mask)
    (stopped,) = [e for e in events(Speculation) if e.state == "stopped"]
    assert stopped.reason.code == "check_failed"
    assert "planted failure" in stopped.reason.sentence
    assert "planted failure" in omnicomp.audit().to_text()


def test_a_kernel_of_the_check_that_failed_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Reason(code="check_failed", by="speculation", sentence="planted failure")
    monkeypatch.setattr(variants, "unusable", lambda: reason)
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    for mask in (FULL, PADDED, FULL):
        check(compiled, model, x, mask)
    assert states().count(("slower", "general")) == 1
    assert "planted failure" in omnicomp.audit().to_text()


def test_without_a_scene_for_a_late_compilation_nothing_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(inputs: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setattr(omnicomp.backend.pipeline.late_compile, "keep_scene", fail)
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    for mask in (FULL, PADDED):
        check(compiled, model, x, mask)
    assert states() == [("stopped", "general")]
    assert not events(Rewrite)
    assert len(events(Capture)) == 1


def test_nothing_is_assumed_where_inductor_orders_collectives_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omnicomp.backend.pipeline.ranks, "spans", lambda *_: True)
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options={**EAGER, "reorder_for_compute_comm_overlap": True})
    for mask in (FULL, PADDED):
        check(compiled, model, x, mask)
    assert states() == [("stopped", "general")]
    assert "order" in events(Speculation)[0].reason.sentence
    assert not events(Rewrite)


def test_a_late_compilation_that_fails_retreats_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    compiled(x, FULL)
    original = omnicomp.backend.autograd.aot_autograd.compile_graph

    def fail(*args: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setattr(omnicomp.backend.autograd.aot_autograd, "compile_graph", fail)
    check(compiled, model, x, PADDED)
    monkeypatch.setattr(omnicomp.backend.autograd.aot_autograd, "compile_graph", original)
    check(compiled, model, x, FULL)
    (retreat,) = events(Retreat)
    assert retreat.graph.endswith(":general")
    audit = omnicomp.audit()
    assert not audit.mismatches
    assert [(row.id, row.ran) for row in audit.subgraphs] == [
        (f"{audit.graphs[0].id}.forward.0", "eager"),
        (retreat.graph, "eager"),
    ]


def test_the_audit_tells_what_was_assumed_and_counts_shared_sites_once() -> None:
    class Attention(DropsMaskedFill):
        def run(self, module: GraphModule, context: PassContext) -> PassResult:
            for node in module.graph.find_nodes(op="call_method", target="tanh"):
                context.rewrite(self.name, "attention", node, target="tanh")
            return super().run(module, context) if context.speculate else PassResult(module, False)

        def applies(self, module: GraphModule, context: PassContext) -> bool:
            return True

    model, x = Model(), torch.randn(3, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PIPELINE", (Attention(),))
        compiled = torch.compile(model, backend="omni", options=EAGER)
        compiled(x, PADDED)
        assert len(omnicomp.audit().sites.fused) == 1
        compiled(x, FULL)
    audit = omnicomp.audit()
    assert len(events(Rewrite)) == 3
    assert len(audit.sites.fused) == 1
    text, page = audit.to_text(), audit.to_html()
    for view in (text, page):
        assert "the padding mask is full" in view
        assert "saves a masked_fill; reads l_mask_" in view
    assert "the general variant" in " ".join(text.split()), "a long line is wrapped"
    assert len({graph["variant"] for graph in audit.stable()["graphs"]}) == 2


def test_a_call_under_capture_takes_the_general_variant_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: Any) -> bool:
        raise AssertionError("a check waits for the device")

    full = torch.fx.symbolic_trace(lambda mask: mask.all())
    ran: list[str] = []
    names = ("assumed", "general")
    each = {name: variants.Variant(name=name, graph="g0", build=lambda late: refuse(late)) for name in names}
    checks = variants.Checks([Assumption(check=full, inputs=("mask",), sentence="it is full")], ["mask"])
    choice = variants.Variants(
        checks=checks,
        assumed={(None,): each["assumed"]},
        general=each["general"],
        eager=lambda mask: ran.append("eager"),
        timeline=current(),
        on_cuda=True,
        graph="g0",
    )
    monkeypatch.setattr(checks, "begin", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choice(FULL)
    assert states()[1:] == [("captured", "general")], "nothing can be compiled there"
    each["general"].call = lambda mask: ran.append("general")
    choice(FULL)
    assert ran == ["eager", "general"]


def test_a_verdict_is_remembered_for_a_tensor_that_nobody_wrote_to() -> None:
    memo, mask = Memo([0, 1]), torch.ones(3, device="meta")
    assert memo.recall([mask, 3]) is None
    memo.keep([mask, 3], True)
    assert memo.recall([mask, 3]) is True
    assert memo.recall([mask, 4]) is None
    assert memo.recall([mask.clone(), 3]) is None
    mask.add_(1)
    assert memo.recall([mask, 3]) is None


def test_no_verdict_is_remembered_where_writes_are_not_counted() -> None:
    memo = Memo([0])
    with torch.inference_mode():
        mask = torch.ones(3, device="meta")
    for value in (mask, torch.ones(3)):
        memo.keep([value], True)
        assert memo.recall([value]) is None


class Event:
    """What a copy from a device is waited for by."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def synchronize(self) -> None:
        self.told.append("waited")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In which order the device was asked and waited for, and variants ran; the CPU counts as an accelerator."""
    found: list[str] = []
    original = variants.Variants._compiled

    def compiled(self: Any, variant: Any, *, after_dynamo: bool) -> Any:
        built = original(self, variant, after_dynamo=after_dynamo)

        def call(*args: Any) -> Any:
            found.append(variant.name)
            return built(*args)

        variant.call = call
        return call

    monkeypatch.setattr(variants.Variants, "_compiled", compiled)
    monkeypatch.setattr(verdicts, "_remembers", lambda value: True)
    monkeypatch.setattr(verdicts, "_waits", lambda value: True)
    monkeypatch.setattr(verdicts, "_copied", lambda value: (found.append("asked"), (value.clone(), Event(found)))[1])
    verdicts.forget()
    return found


def steps(compiled: Any, model: Any, order: list[str], masks: Sequence[torch.Tensor]) -> list[str]:
    """What was run and waited for in calls with new tensors, behind two calls from which it is known what to expect."""
    x = torch.randn(3, 4)
    for mask in (masks[0], masks[0], *masks):
        order.append("call")
        check(compiled, model, x, mask.clone())
    return " ".join(order).split("call ")[3:]


def test_the_likely_variant_is_launched_before_the_device_is_waited_for(order: list[str]) -> None:
    model = Model()
    compiled = torch.compile(model, backend="omni", options=EAGER)
    found = steps(compiled, model, order, [FULL, PADDED, PADDED, FULL, FULL, FULL])
    assert [step.split() for step in found] == [
        ["asked", "assumed", "waited"],
        ["asked", "assumed", "waited", "general"],
        ["asked", "waited", "general"],
        ["asked", "general", "waited", "assumed"],
        ["asked", "waited", "assumed"],
        ["asked", "assumed", "waited"],
    ]


def test_layers_behind_the_first_do_not_wait(order: list[str]) -> None:
    model, x = Model(), torch.randn(3, 4)
    layers = [torch.compile(model, backend="omni", options=EAGER) for _ in range(3)]
    for _ in range(4):
        order.clear()
        mask = FULL.clone()
        for layer in layers:
            check(layer, model, x, mask)
    assert order == ["asked", "assumed", "waited", "assumed", "assumed"]


class Writes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, mask)


def test_what_leaves_something_behind_is_not_run_before_the_verdict(order: list[str]) -> None:
    model = Writes()
    compiled = torch.compile(model, backend="omni", options=EAGER)
    with torch.no_grad():
        assert [step.split()[0] for step in steps(compiled, model, order, [FULL, FULL])] == ["asked"] * 2
    assert model.calls == 8


@pytest.mark.parametrize("hooked", [True, False], ids=["hooks for saved tensors", "CUDA graphs"])
def test_what_counts_calls_sees_one(hooked: bool, order: list[str]) -> None:
    model, option = Model(), EAGER if hooked else {**EAGER, "triton.cudagraphs": True}
    compiled = torch.compile(model, backend="omni", options=option)
    with torch.autograd.graph.save_on_cpu() if hooked else contextlib.nullcontext():
        assert [step.split()[0] for step in steps(compiled, model, order, [FULL, FULL])] == ["asked"] * 2


def test_random_numbers_of_a_variant_that_was_wrong_are_drawn_again(order: list[str]) -> None:
    class Drops(Model):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x, mask), 0.5)

    model, x = Drops(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    for mask in (FULL, FULL, FULL, PADDED):
        torch.manual_seed(3)
        found = compiled(x, mask.clone())
        torch.manual_seed(3)
        torch.testing.assert_close(found, model(x, mask))
    assert order[-4:] == ["asked", "assumed", "waited", "general"]
