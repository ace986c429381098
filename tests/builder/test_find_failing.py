"""The failing nodes are found with a bounded number of builds, and no more nodes than needed leave Inductor."""

import itertools
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import fast
from torch.fx import Graph, Node

import omnicomp
from omnicomp._torch.inductor import compile_fx as inductor
from omnicomp.builder import part as ladder
from omnicomp.builder.find_failing import Prober, Verdict, find_failing, refused_by
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering

Fails = Callable[[Sequence[Node]], bool]


def chain(length: int, function=operator.add) -> list[Node]:
    """Operators in a row, no two alike."""
    graph = Graph()
    node = graph.placeholder("x")
    nodes = []
    for index in range(length):
        node = graph.call_function(function, (node, index))
        nodes.append(node)
    graph.output((node,))
    return nodes


def search(nodes: Sequence[Node], fails: Fails, builds: int = 1000) -> tuple[dict, set[str], list[int]]:
    """What the ladder does: narrow, place again, build again, until nothing fails."""
    tried: list[int] = []

    def build(part: Sequence[Node]) -> Exception | None:
        tried.append(len(part))
        return RuntimeError("planted") if fails(part) else None

    cut, boundaries, prober = {}, set(), Prober(build, builds)
    while (run := next((r for r in runs(nodes, cut, boundaries) if fails(r)), None)) is not None:
        verdict = find_failing(run, RuntimeError("planted"), prober, nodes)
        assert verdict.cut.keys() - cut.keys() or verdict.boundaries - boundaries
        cut.update(verdict.cut)
        boundaries |= verdict.boundaries
    return cut, boundaries, tried


def runs(nodes: Sequence[Node], cut, boundaries) -> list[list[Node]]:
    found: list[list[Node]] = [[]]
    for node in nodes:
        if node.name in cut:
            found.append([])
            continue
        if node.name in boundaries:
            found.append([])
        found[-1].append(node)
    return [run for run in found if run]


@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_exactly_the_failing_nodes_are_cut(case: tuple[int, set[int]]) -> None:
    length, bad = case
    nodes = chain(length)
    cut, boundaries, tried = search(nodes, lambda part: any(nodes.index(node) in bad for node in part))
    assert set(cut) == {nodes[i].name for i in bad}
    assert boundaries == set()
    assert len(tried) <= len(bad) * (length.bit_length() + 1)


@given(st.integers(2, 24).flatmap(lambda n: st.tuples(*[st.just(n), *[st.integers(0, n - 1)] * 2])))
def test_two_nodes_that_fail_only_together_are_parted_and_stay(case: tuple[int, int, int]) -> None:
    length, one, two = case
    nodes = chain(length)
    pair = {nodes[one], nodes[two]}
    if one == two:
        return
    cut, boundaries, _ = search(nodes, lambda part: pair <= set(part))
    assert cut == {}
    assert len(boundaries) == 1


def test_one_failing_node_takes_a_logarithmic_number_of_builds_and_the_good_part_before_it_is_built() -> None:
    nodes = chain(64)
    cut, _, tried = search(nodes, lambda part: nodes[37] in part)
    assert set(cut) == {nodes[37].name}
    assert len(tried) == 7
    assert 37 in tried


def layers(count: int) -> list[Node]:
    graph = Graph()
    node = graph.placeholder("x")
    nodes = []
    for _ in range(count):
        for function in (operator.neg, operator.abs, operator.pos):
            node = graph.call_function(function, (node,))
            nodes.append(node)
    graph.output((node,))
    return nodes


def test_nodes_that_are_alike_are_found_together_without_spending_the_budget() -> None:
    nodes = layers(40)
    cut, boundaries, tried = search(nodes, lambda part: any(n.target is operator.abs for n in part), 8)
    assert set(cut) == {n.name for n in nodes if n.target is operator.abs}
    assert boundaries == set()
    assert tried.count(1) <= 41


def test_nodes_that_are_alike_stay_if_they_do_not_fail() -> None:
    nodes = layers(10)
    bad = next(n for n in nodes if n.target is operator.abs)
    cut, _, tried = search(nodes, lambda part: bad in part)
    assert set(cut) == {bad.name}
    assert tried.count(1) <= 3


def test_trying_nodes_that_are_alike_ends_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnicomp.builder.find_failing._SECONDS", -1.0)
    nodes = layers(40)
    cut, _, tried = search(nodes, lambda part: any(n.target is operator.abs for n in part), 8)
    assert set(cut) == {n.name for n in nodes if n.target is operator.abs}
    assert len(tried) <= 8


def test_an_operator_keeps_its_getitems() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(divmod, (x, 2))
    first, second = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    end = graph.call_function(operator.add, (first, second))
    graph.output((end,))
    cut, _, _ = search([both, first, second, end], lambda part: both in part)
    assert set(cut) == {both.name, first.name, second.name}


@pytest.mark.parametrize("builds", [0, 1, 3])
def test_a_spent_budget_cuts_what_is_left_and_says_so(builds: int) -> None:
    nodes = chain(32)
    cut, _, tried = search(nodes, lambda part: nodes[5] in part, builds)
    assert nodes[5].name in cut
    assert len(tried) <= builds
    assert any("max_builds" in reason.sentence for reason in cut.values())


def test_what_is_known_to_build_is_kept_when_the_budget_is_spent() -> None:
    nodes = chain(32)
    cut, _, _ = search(nodes, lambda part: nodes[30] in part, 2)
    assert set(cut) == {node.name for node in nodes[24:]}


def verdict_of(error: Exception) -> Verdict:
    nodes = chain(8)
    return find_failing(nodes, error, Prober(lambda part: error, 9))


def test_a_missing_compiler_is_not_bisected() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    verdict = verdict_of(InvalidCxxCompiler())
    assert len(verdict.cut) == 8
    assert not verdict.lasting
    assert verdict.smallest == ()
    assert all("install a C++ compiler" in reason.lever for reason in verdict.cut.values())


def test_a_full_disk_is_no_nodes_fault() -> None:
    verdict = verdict_of(OSError(28, "No space left on device"))
    assert len(verdict.cut) == 8
    assert not verdict.lasting
    assert all("TORCHINDUCTOR_CACHE_DIR" in reason.lever for reason in verdict.cut.values())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("autotuning"), MemoryError(), TimeoutError("autotuning")])
def test_what_ran_out_of_memory_or_time_is_narrowed_and_not_kept(error: Exception) -> None:
    nodes = chain(8)
    wrapped = RuntimeError("while tuning")
    wrapped.__cause__ = error
    verdict = find_failing(nodes, wrapped, Prober(lambda part: wrapped if nodes[3] in part else None, 9))
    assert set(verdict.cut) == {nodes[3].name}
    assert not verdict.lasting


class Planted:
    """An Inductor that builds nothing but fails where it is told to, without naming a node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[set[str]], bool]) -> None:
        self.builds: list[set[str]] = []

        def lower(lowering, module, inputs, context):
            names = {n.name for n in module.graph.nodes if n.op == "call_function"}
            self.builds.append(names)
            if fails(names):
                raise RuntimeError("planted")
            built = EagerLowering().lower(module, inputs, context)
            built.lowering = "inductor"
            return built

        def whole(module, inputs, record, *rest, **kwargs):
            self.builds.append({n.name for n in module.graph.nodes if n.op == "call_function"})
            raise RuntimeError("planted")

        monkeypatch.setattr(InductorLowering, "lower", lower)
        monkeypatch.setattr(inductor, "compile_part", whole)


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).sin() * 2 + x.cos()).exp().sum(-1)


def compile_and_compare(training: bool) -> None:
    torch.compiler.reset()
    x, w = (torch.randn(4, 4, dtype=torch.float64, requires_grad=training) for _ in range(2))
    compiled = torch.compile(program, backend="omni", options={"summary": False, "verify": "off"})
    torch.testing.assert_close(compiled(x, w), program(x, w))
    if training:
        grads = [torch.autograd.grad(f(x, w).sum(), (x, w)) for f in (compiled, program)]
        torch.testing.assert_close(*grads)


def names_of(part: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes of a part, in order."""
    found: list[list[str]] = []
    original = ladder.build_part

    def build_part(module, inputs, context, *rest):
        if context.part == part:
            found.append([n.name for n in module.graph.nodes if n.op == "call_function"])
        return original(module, inputs, context, *rest)

    monkeypatch.setattr("omnicomp.backend.autograd.build_part", build_part)
    with monkeypatch.context() as patched:
        Planted(patched, lambda names: False)
        compile_and_compare(part != "inference")
    (names,) = found
    return names


@pytest.mark.parametrize("part", fast(["inference", "forward", "backward"], "backward".__eq__))
def test_at_every_position_only_the_planted_node_is_in_eager(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of(part, monkeypatch)
    assert len(names) > 4
    pairs = [{a, b} for a, b in itertools.combinations(names, 2)]
    for bad in [{name} for name in names] + (pairs if part == "inference" else pairs[::30]):
        omnicomp.timeline.clear()
        with monkeypatch.context() as patched:
            Planted(patched, lambda built, bad=bad: bool(built & bad))
            compile_and_compare(part != "inference")
        eager = {
            node.node
            for event in omnicomp.timeline.events()
            if event.type == "placement" and event.part == part
            for node in event.declined
        }
        assert eager == bad


def test_nodes_that_fail_only_together_all_stay_on_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of("inference", monkeypatch)
    for pair in itertools.combinations(names, 2):
        omnicomp.timeline.clear()
        with monkeypatch.context() as patched:
            planted = Planted(patched, lambda built, pair=pair: set(pair) <= built)
            compile_and_compare(False)
        rows = omnicomp.audit().subgraphs
        assert [row.ran for row in rows] == ["inductor", "inductor"]
        assert len(planted.builds) <= 8


def test_a_part_that_is_good_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of("inference", monkeypatch)
    bad = names[len(names) // 2]
    with monkeypatch.context() as patched:
        planted = Planted(patched, lambda built: bad in built)
        compile_and_compare(False)
    good = [frozenset(built) for built in planted.builds if bad not in built]
    assert len(good) == len(set(good))


@pytest.mark.inductor
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_lowering_that_raises_is_named_by_inductor(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    def planted(*args, **kwargs):
        raise ValueError("planted in a lowering")

    op = torch.ops.aten.sin.default if part == "forward" else torch.ops.aten.cos.default
    monkeypatch.setitem(lowering.lowerings, op, planted)
    x = torch.randn(8, requires_grad=True)
    function = lambda x: (x * 2).sin().sum()  # noqa: E731
    compiled = torch.compile(function, backend="omni", options={"summary": False, "verify": "off"})
    with torch.compiler.config.patch(force_disable_caches=True):
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(function(x), x))
    eager = {row.id: row.ops for row in omnicomp.audit().subgraphs if row.ran == "eager"}
    assert [list(ops) for ops in eager.values()] == [[str(op)]]


@pytest.mark.parametrize(
    ("lowering", "compiler", "lever"),
    [("device", "the compiler of sim", "compile_subgraph"), ("toy", "the engine toy", "take toy out of options")],
)
def test_what_another_compiler_refuses_names_it(lowering: str, compiler: str, lever: str) -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    (reason,) = refused_by([node], None, ValueError("planted"), lowering, "sim").values()
    assert reason.sentence == f"{compiler} can't build it: ValueError: planted"
    assert lever in reason.lever
