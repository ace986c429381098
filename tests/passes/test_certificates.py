import dataclasses
import functools
import operator
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lacking import Lacking
from processes import python
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace

import omnicomp
from omnicomp import timeline
from omnicomp._torch.fx import describe
from omnicomp.analysis import certify
from omnicomp.analysis.nodes import insert_call
from omnicomp.passes import Pass, PassContext, PassResult, certificates, check_budget, run_pipeline
from omnicomp.passes.attention import assume
from omnicomp.passes.attention.differentiable import ATTENTION_WITH_SINK
from omnicomp.passes.attention.pinned import PINNED_ATTENTION
from omnicomp.passes.legalise import Legalise
from omnicomp.timeline import Certified


@dataclasses.dataclass(frozen=True)
class Doubling(Pass):
    """Products with some numbers become sums of two, which is right for 2 alone."""

    name: ClassVar[str] = "doubling"
    factors: tuple[int, ...] = (2,)

    def applies(self, module, context: PassContext) -> bool:
        return True

    def run(self, module, context: PassContext) -> PassResult:
        found = [
            n for n in module.graph.find_nodes(op="call_function", target=operator.mul) if n.args[1] in self.factors
        ]
        for node in found:
            new = insert_call(node, torch.add, (node.args[0], node.args[0]))
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
            context.rewrite(self.name, "sum", new, target="add")
        return PassResult(module, bool(found))


@dataclasses.dataclass(frozen=True)
class Unscaled(Pass):
    """Regions do not multiply by what they are called with, which is right for ones alone."""

    name: ClassVar[str] = "unscaled"

    def applies(self, module, context: PassContext) -> bool:
        return module is not context.root

    def run(self, module, context: PassContext) -> PassResult:
        for node in list(module.graph.find_nodes(op="call_function", target=operator.mul)):
            node.replace_all_uses_with(insert_call(node, torch.clone, (node.args[0],)))
            module.graph.erase_node(node)
        return PassResult(module, True)


@dataclasses.dataclass(frozen=True)
class Careless(Pass):
    """Erases what nobody reads, also in the graphs that the graph calls, where a method that writes looks like that."""

    name: ClassVar[str] = "careless"

    def applies(self, module, context: PassContext) -> bool:
        return module is context.root

    def run(self, module, context: PassContext) -> PassResult:
        for node in module.graph.find_nodes(op="call_function", target=operator.mul):
            node.target = torch.mul
        return PassResult(module, module.graph.eliminate_dead_code())


def function(x):
    return ((x.exp() * 2).sin() * 2).cos() * 3


def compiled(x: torch.Tensor, certify: str = "new", function=function, **fields: tuple[int, ...]) -> torch.Tensor:
    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": certify, "passes": [Doubling(**fields)]}
    return torch.compile(function, backend="omni", options=options)(x)


def certified() -> list[Certified]:
    return [event for event in timeline.events() if isinstance(event, Certified)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))


def test_a_right_rewrite_has_a_verdict_beside_it_and_equal_places_are_checked_once():
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), function(x))
    verdicts = {certify.PROVED, certify.PROVED_FOR_SIZES}
    assert [(event.verdict in verdicts, event.kept) for event in certified()] == [(True, False), (True, True)]
    (graph,) = omnicomp.audit().graphs
    assert {site.verdict for site in graph.rewrites} <= verdicts
    assert len(graph.certificates) == 2
    assert "proved" in omnicomp.audit().to_text()


def test_a_wrong_rewrite_is_taken_back_and_right_ones_stay():
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x, factors=(2, 3)), function(x))
    assert [event.verdict == certify.REFUTED for event in certified()] == [False, False, True]
    (graph,) = omnicomp.audit().graphs
    (run,) = [each for each in graph.passes if each.name == "doubling"]
    assert (len(graph.rewrites), run.rewrites) == (2, 2)
    (miss,) = graph.near_misses
    assert (miss.reason.code, miss.name) == ("not_certified", "doubling")


def test_a_wrong_rewrite_that_cannot_be_told_from_the_rest_costs_the_pass():
    def wrong(x):
        y = x.clone()
        return (y * 3).add_(y.mul_(2))

    x = torch.randn(4)
    torch.testing.assert_close(compiled(x, function=wrong, factors=(3,)), wrong(x))
    (graph,) = omnicomp.audit().graphs
    (retreat,) = graph.retreats
    assert (retreat.reason.code, retreat.reason.by) == ("not_certified", "doubling")


@pytest.mark.parametrize("writes", [True, False])
def test_what_a_pass_does_to_graphs_that_the_graph_calls_is_checked(writes: bool):
    def body(x):
        y = x * 2
        y.exp()
        if writes:
            y.select(0, 0).add_(5)
        return y

    def function(x):
        y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False) * 3
        y.exp()
        return y

    options = {"lowerings": ["eager"], "passes": [Careless()], "disable_passes": ["attention_fusion"]}
    x = torch.randn(2, 4, requires_grad=True)
    result = torch.compile(function, backend="omni", options=options)(x)
    torch.testing.assert_close(result, function(x))
    (graph,) = omnicomp.audit().graphs
    assert [retreat.reason.by for retreat in graph.retreats] == ["careless"] * writes
    assert any(event.verdict == certify.REFUTED for event in certified()) == writes


def test_the_next_compilation_checks_nothing(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(4)
    compiled(x)
    timeline.clear()
    monkeypatch.setattr(certify, "check", None)
    compiled(x)
    assert [event.kept for event in certified()] == [True, True]


def test_always_checks_again(monkeypatch: pytest.MonkeyPatch):
    calls: list[None] = []
    check = certify.check
    monkeypatch.setattr(certify, "check", lambda *args, **kwargs: calls.append(None) or check(*args, **kwargs))
    for _ in range(2):
        compiled(torch.randn(4), certify="always")
    assert len(calls) == 2


def attended(**options: str) -> None:
    def attention(x):
        return (x @ x.mT / 8**0.5).softmax(-1) @ ((x * 2).sin() * 3)

    x = torch.randn(2, 4, 6, 8)
    made = torch.compile(
        attention, backend="omni", options={"lowerings": ["eager"], "passes": [Doubling(factors=(2, 3))], **options}
    )
    torch.testing.assert_close(made(x), attention(x))
    assert [event.verdict == certify.REFUTED for event in certified()].count(True) == 1
    (graph,) = omnicomp.audit().graphs
    assert {site.name for site in graph.rewrites} == {"attention_fusion", "doubling"}


def test_by_default_omnicomps_own_passes_are_checked_too():
    attended()
    assert [event.verdict for event in certified() if event.name == "attention_fusion"] == [certify.PROVED]
    assert {event.name for event in certified()} == {"doubling", "attention_fusion"}


def test_what_is_behind_the_budget_is_told_to_be_unchecked_and_passes_from_outside_have_none(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(check_budget, "_LEAST_CHECKED", 0.0)
    monkeypatch.setattr(check_budget, "_CHECKED_PER_NODE", 0.0)
    attended(certify="new")
    (own,) = (event for event in certified() if event.name == "attention_fusion")
    assert own.verdict == certify.ASSUMED
    assert own.sentence.startswith("left unchecked")
    (graph,) = omnicomp.audit().graphs
    assert [site.verdict for site in graph.rewrites if site.name == "attention_fusion"] == [certify.ASSUMED]
    timeline.clear()
    torch.compiler.reset()
    attended(certify="always")
    assert [event.verdict for event in certified() if event.name == "attention_fusion"] == [certify.PROVED]


def test_omnicomps_own_passes_have_one_budget_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check_budget, "_LEAST_CHECKED", 1e-9)
    monkeypatch.setattr(check_budget, "_CHECKED_PER_NODE", 0.0)
    x = torch.randn(2, 4, 6, 8)
    options = {"lowerings": ["eager"], "dtype_policy": "bf16"}
    torch.compile(lambda x: (x @ x.mT / 8**0.5).softmax(-1) @ x, backend="omni", options=options)(x)
    left = {event.name: event.sentence.startswith("left unchecked") for event in certified()}
    assert left == {"attention_fusion": False, "dtype_policy": True}


def test_off_checks_nothing():
    x = torch.randn(4)
    assert not torch.equal(compiled(x, certify="off", factors=(3,)), function(x))
    assert not certified()


def test_a_check_that_fails_costs_the_verdict_alone(monkeypatch: pytest.MonkeyPatch):
    def check(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(certify, "check", check)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), function(x))
    assert {(event.verdict, event.sentence) for event in certified()} == {
        (certify.ASSUMED, "the check failed: RuntimeError: no")
    }


def test_a_cut_that_fails_costs_the_verdict_alone(monkeypatch: pytest.MonkeyPatch):
    def changes(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(certificates, "changes", changes)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x), function(x))
    assert {(event.verdict, event.sentence) for event in certified()} == {
        (certify.ASSUMED, "the check failed: RuntimeError: no")
    }
    (graph,) = omnicomp.audit().graphs
    assert len(graph.rewrites) == 2
    assert not graph.retreats


def test_what_cannot_be_taken_back_costs_the_pass(monkeypatch: pytest.MonkeyPatch):
    def undo(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("omnicomp.passes.changes._Comparison._undo", undo)
    x = torch.randn(4)
    torch.testing.assert_close(compiled(x, factors=(2, 3)), function(x))
    (retreat,) = omnicomp.audit().graphs[0].retreats
    assert (retreat.reason.code, retreat.reason.by) == ("not_certified", "doubling")


def test_layers_with_numbers_of_their_own_are_one_check():
    class Layer(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return (x @ x.mT * self.scale).softmax(-1) @ x

    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": "new"}
    model = torch.nn.Sequential(*(each for _ in range(3) for each in (torch.nn.Linear(8, 8), Layer(0.25))))
    torch.compile(model, backend="omni", dynamic=True, options=options)(torch.randn(2, 4, 6, 8))
    assert {event.verdict for event in certified()} == {certify.PROVED}
    assert sum(not event.kept for event in certified()) < len(certified()) / 2


def test_a_graph_that_is_rewritten_as_before_is_not_cut_again(monkeypatch: pytest.MonkeyPatch):
    def layers(x):
        for _ in range(16):
            x = x + (x @ x.transpose(-2, -1) / 8**0.5).softmax(-1) @ x
        return x

    found: list[list[tuple[str, str, str]]] = []
    for _ in range(2):
        torch.compiler.reset()
        timeline.clear()
        torch.compile(layers, backend="omni", options={"lowerings": ["eager"]})(torch.randn(2, 4, 6, 8))
        found.append([(event.node, event.verdict, event.key) for event in certified()])
        monkeypatch.setattr(certificates, "changes", None)
    assert len(found[0]) == 16
    assert {verdict for _, verdict, _ in found[0]} <= {certify.PROVED, certify.PROVED_FOR_SIZES}
    assert found[1] == found[0]
    assert all(event.kept for event in certified())
    assert {site.verdict for site in omnicomp.audit().graphs[0].rewrites} == {found[0][0][1]}


@pytest.mark.slow
def test_the_next_process_checks_no_graph_of_symbolic_sizes_again():
    program = """
        import torch
        from omnicomp import timeline
        from omnicomp.timeline import Certified

        def attention(x, scale):
            return (x @ x.mT * scale).softmax(-1) @ x

        options = {"lowerings": ["eager"], "certify": "new"}
        torch.compile(attention, backend="omni", dynamic=True, options=options)(torch.randn(2, 4, 6, 8), 0.25)
        print([event.kept for event in timeline.events() if isinstance(event, Certified)])
        """
    program = textwrap.dedent(program)
    first, second = (python("-c", program, fresh=fresh, check=True).stdout for fresh in (False, True))
    assert "False" in first
    assert "False" not in second
    assert "True" in second


def test_attention_of_symbolic_sizes_is_proved_for_all():
    def attention(q, k, v):
        return (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v

    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": "new"}
    x = torch.randn(2, 4, 6, 8)
    torch.compile(attention, backend="omni", dynamic=True, options=options)(x, x, x)
    (event,) = certified()
    assert (event.name, event.verdict) == ("attention_fusion", certify.PROVED)
    assert event.probability < -40


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_of_torchs_own_attention_that_nothing_reads_are_proved_away(dynamic: bool):
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 16, 64)
    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": "new"}
    with torch.no_grad():
        torch.compile(lambda q, k: attention(q, k, k)[0], backend="omni", dynamic=dynamic, options=options)(x[:, :1], x)
    assert {event.verdict for event in certified()} <= {certify.PROVED, certify.PROVED_FOR_SIZES}
    assert certified()


@pytest.mark.parametrize("differentiated", [False, True])
def test_gradients_are_compared_where_somebody_may_ask_for_them(differentiated: bool):
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": "new"}
    with torch.set_grad_enabled(differentiated):
        torch.compile(lambda x: attention(x, x, x)[0], backend="omni", options=options)(torch.randn(2, 16, 64))
    assert certified()
    for event in certified():
        assert (certify.NO_GRADIENTS in event.assumptions, "gradients" in event.methods) == (
            not differentiated,
            differentiated,
        )


def test_attention_with_a_mask_as_input_is_not_refuted():
    def attention(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(mask, torch.finfo(torch.float32).min)
        return scores.softmax(-1) @ v

    x, mask = torch.randn(2, 4, 6, 8), torch.ones(6, 6, dtype=torch.bool).triu(1)
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="omni", options={"lowerings": ["eager"], "certify": "new"})
    torch.testing.assert_close(compiled(x, x, x, mask), attention(x, x, x, mask))
    assert certified()
    assert certify.REFUTED not in {event.verdict for event in certified()}


def checkpointed(function, *operands):
    return torch.utils.checkpoint.checkpoint(function, *operands, use_reentrant=False)


@pytest.mark.parametrize("training", [False, True])
def test_a_mask_that_the_caller_of_a_region_makes_is_known_there(training: bool):
    def attention(q, mask):
        return (q @ q.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ q

    def function(q):
        mask = torch.arange(6) <= torch.arange(6)[:, None]
        return checkpointed(attention, checkpointed(attention, q.sin(), mask), mask)

    x = torch.randn(2, 4, 6, 8, requires_grad=training)
    torch.compiler.reset()
    with torch.set_grad_enabled(training):
        found = torch.compile(function, backend="omni", options={"lowerings": ["eager"], "certify": "new"})(x)
    torch.testing.assert_close(found, function(x))
    assert certified()
    assert {event.verdict for event in certified()} <= {certify.PROVED, certify.PROVED_FOR_SIZES}
    assert ["is_causal" in site.detail for site in omnicomp.audit().graphs[0].rewrites] == [True, True]


@pytest.mark.parametrize(
    ("factor", "right"),
    [
        (lambda: torch.ones(4), True),
        (lambda: torch.full((4,), 2.0), False),
        (lambda: torch.ones(4).mul_(2), False),
    ],
)
def test_what_a_region_is_called_with_counts_unless_something_writes_to_it(factor, right: bool):
    def function(x):
        return checkpointed(lambda x, factor: (x * factor).sin(), x.cos(), factor()) + 1

    x = torch.randn(4, requires_grad=True)
    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": "new", "passes": [Unscaled()]}
    torch.testing.assert_close(torch.compile(function, backend="omni", options=options)(x), function(x))
    assert [event.verdict != certify.REFUTED for event in certified()] == [right]


def test_exponentials_that_a_mask_sets_to_zero_are_proved_to_be_masked_scores():
    def attention(q, k, v):
        e = (q @ k.transpose(-2, -1) / 8**0.5).exp() * (torch.arange(6) <= torch.arange(6)[:, None])
        return (e / e.sum(-1, keepdim=True)) @ v

    x = torch.randn(2, 4, 6, 8)
    torch.compiler.reset()
    torch.compile(attention, backend="omni", options={"lowerings": ["eager"], "certify": "new"})(x, x, x)
    (event,) = certified()
    assert (event.name, event.verdict) == ("attention_fusion", certify.PROVED)


@pytest.mark.parametrize("holds", ["full", "causal"])
def test_what_is_assumed_of_a_mask_is_told_of_the_input_that_it_is_made_of(holds: str, monkeypatch: pytest.MonkeyPatch):
    def padded(q, mask):  # of whole numbers, as tokenizers give
        hidden = (1.0 - mask.float()) * torch.finfo(torch.float32).min
        return ((q @ q.mT) / 8**0.5 + hidden).softmax(-1) @ q

    monkeypatch.setattr(assume, "worth", lambda *args, **kwargs: None)
    q, mask = torch.randn(2, 4, 16, 8), torch.ones(16, 16, dtype=torch.int64)
    mask = mask if holds == "full" else mask.tril()
    torch.compiler.reset()
    compiled = torch.compile(padded, backend="omni", options={"lowerings": ["eager"], "certify": "new"})
    torch.testing.assert_close(compiled(q, mask), padded(q, mask))
    (event,) = certified()
    assert event.verdict == certify.PROVED
    assert f"mask_class l_mask_ {holds}" in event.assumptions


def test_other_dtypes_than_a_device_has_are_proved_up_to_rounding():
    graph = symbolic_trace(lambda x, w: torch.softmax(x @ w, -1).sum(-1) + x.mean(-1))
    context = PassContext(
        graph_id="g0",
        device=Lacking(uncomputed=(torch.bfloat16,)),
        timeline=timeline.Timeline(),
        training=False,
        certify="always",
    )
    describe(graph, [torch.randn(6, 8).bfloat16(), torch.randn(8, 6).bfloat16()])
    run_pipeline([Legalise(log=False)], graph, context)
    verdicts = [event.verdict for event in context.timeline if isinstance(event, Certified)]
    assert verdicts
    assert set(verdicts) == {certify.PROVED}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_operators_of_kernels_that_are_not_here_are_checked_by_what_they_compute(
    right: bool, dropout: float, kernel: str
):
    """With dropout, which the CPU's kernel does not have, and with a sink."""
    scale = 0.5 if right else 0.6

    def by_hand(q, k, v, sink):
        scores = q @ k.mT * 0.5
        if dropout:
            return torch.nn.functional.dropout(torch.softmax(scores, -1), dropout) @ v
        scores = torch.cat([scores, sink.reshape(1, 2, 1, 1).expand(1, 2, 6, 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    def fused(q, k, v, sink):
        if dropout:
            return PINNED_ATTENTION(q, k, v, scale=scale, dropout_p=dropout, kernel=kernel)
        return ATTENTION_WITH_SINK(q, k, v, sink, scale=scale, kernel=kernel)

    x = torch.zeros(1, 2, 6, 8, dtype=torch.bfloat16)
    sides = [symbolic_trace(each) for each in (by_hand, fused)]
    for side in sides:
        describe(side, [x, x, x, torch.zeros(2, dtype=torch.bfloat16)])
    claims = [certify.Assumption(kind) for kind in (certify.ROUNDING, certify.DRAWS)]
    assert certify.check(*sides, assumptions=claims).verdict == (certify.PROVED if right else certify.REFUTED)


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 4.0), ("cuda", 2.0)])
def test_a_graph_has_a_share_of_what_its_compiler_takes(device: str, seconds: float):
    with FakeTensorMode():
        module = symbolic_trace(lambda x: functools.reduce(lambda y, _: y.sin(), range(998), x))
        describe(module, [torch.empty(2, device=device)])
    assert check_budget.CheckBudget.of(module).seconds == seconds
