"""The failing nodes are found with a bounded number of builds."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from omnicomp.localize import Budget, find_failing, first_line


def chain(length: int) -> list[Node]:
    graph = Graph()
    node = graph.placeholder("x")
    nodes = []
    for _ in range(length):
        node = graph.call_function(abs, (node,))
        nodes.append(node)
    return nodes


def builder(bad: set[int], nodes: list[Node], tried: list[int]):
    def build(part: Sequence[Node]) -> Exception | None:
        tried.append(len(part))
        return RuntimeError("planted") if any(nodes.index(node) in bad for node in part) else None

    return build


@settings(deadline=None)
@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_exactly_the_failing_nodes_are_cut(case: tuple[int, set[int]]) -> None:
    length, bad = case
    nodes = chain(length)
    tried: list[int] = []
    verdict = find_failing(nodes, RuntimeError("planted"), builder(bad, nodes, tried), Budget(1000))
    assert set(verdict.cut) == {nodes[i].name for i in bad}
    assert len(tried) <= 2 * length


def test_one_failing_node_takes_a_logarithmic_number_of_builds() -> None:
    nodes = chain(64)
    tried: list[int] = []
    find_failing(nodes, RuntimeError("planted"), builder({37}, nodes, tried), Budget(1000))
    assert len(tried) == 12


def test_nodes_that_fail_only_together_are_parted() -> None:
    nodes = chain(8)

    def build(part: Sequence[Node]) -> Exception | None:
        return RuntimeError("together") if len(part) > 4 else None

    verdict = find_failing(nodes, RuntimeError("together"), build, Budget(100))
    assert verdict.cut == {}
    assert verdict.boundaries == {nodes[4].name}


@pytest.mark.parametrize("builds", [0, 1, 3])
def test_a_spent_budget_cuts_what_is_left_and_says_so(builds: int) -> None:
    nodes = chain(32)
    verdict = find_failing(nodes, RuntimeError("planted"), builder({5}, nodes, []), Budget(builds))
    assert nodes[5].name in verdict.cut
    assert any("max_builds" in reason.sentence for reason in verdict.cut.values())


def test_a_missing_compiler_is_not_bisected() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    nodes, tried = chain(8), []
    verdict = find_failing(nodes, InvalidCxxCompiler(), builder(set(), nodes, tried), Budget(9))
    assert set(verdict.cut) == {node.name for node in nodes}
    assert tried == []
    assert all("install a C++ compiler" in reason.lever for reason in verdict.cut.values())


def test_the_first_line_names_the_error_once() -> None:
    assert first_line(RuntimeError("\n  broken\nmore")) == "RuntimeError: broken"
    assert first_line(ValueError()) == "ValueError: no message"
