import golden
import pytest
from made_timelines import large_timeline
from rich.console import Console

from omnicomp.audit import Audit, build
from omnicomp.audit.views.tree import basis_of, module_trees, to_tree, tree_renderables
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Ran, Reason, Subgraph


def layered(names: list[str], *, odd: str = "") -> Audit:
    events: list[Event] = [Capture(graph="g0", function="f")]
    for number, name in enumerate(names):
        id = f"g0.forward.{number}"
        ops = {"aten.mm.default": 2 if name == odd else 1}
        events.append(
            Subgraph(
                graph="g0",
                part="forward",
                subgraph=id,
                lowering="inductor",
                nodes=2,
                ops=ops,
                flops_hint=10,
                module=name,
            )
        )
        events.append(Ran(graph="g0", part="forward", subgraph=id, lowering="inductor"))
    return build(events)


def test_golden_of_a_small_report(events: list[Event]) -> None:
    golden.check("audit/sample.tree.txt", to_tree(build(events)))


def test_golden_of_equal_layers() -> None:
    golden.check("audit/layers.tree.txt", to_tree(build(large_timeline(48, graphs=1))))


def test_shares_by_time() -> None:
    found = build(large_timeline(48, graphs=1))
    assert "of time" in to_tree(found, by="seconds")
    (root,) = module_trees(found)
    assert sum(root.shares("seconds").values()) == pytest.approx(1)


def test_a_basis_of_which_nothing_is_known_gives_way_and_says_so(events: list[Event]) -> None:
    found = build(events)
    assert basis_of(found, "seconds") == "flops"
    assert "Shares count FLOPs: of time nothing is known." in to_tree(found, by="seconds")


def test_equal_layers_are_one_line_also_around_another_one() -> None:
    found = layered(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.3.mlp", "h.10.mlp"], odd="h.2.mlp")
    text = to_tree(found)
    assert "0-1, 3, 10.mlp (4 equal)  inductor 80.0 %" in text
    assert "2.mlp  inductor 20.0 %" in text


def test_modules_that_differ_in_more_than_a_number_stay_apart() -> None:
    text = to_tree(layered(["encoder.mlp", "decoder.mlp"]))
    assert "encoder.mlp" in text
    assert "decoder.mlp" in text
    assert "equal" not in text


def test_every_subgraph_is_in_the_tree_once() -> None:
    found = build(large_timeline(120, graphs=3))
    for merge in (True, False):
        ids = [row.id for tree in module_trees(found, merge=merge) for rows in tree.every_row() for row in rows.rows]
        assert sorted(ids) == sorted(row.id for row in found.subgraphs)


def test_a_refused_operator_says_why_where_it_is() -> None:
    reason = Reason(code="unsupported_op", by="inductor", sentence="no lowering", lever="write an override")
    node = NodePlacement(node="foo", op="aten.foo.default", lowering="eager", module="a.b", chain=(reason,))
    plan = {"graph": "g0", "part": "forward", "subgraph": "g0.forward.0", "lowering": "eager", "nodes": 1}
    events = [
        Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,)),
        Subgraph(**plan, ops={"aten.foo.default": 1}, module="a.b", refused=("foo",)),
    ]
    assert "inductor: no lowering [unsupported_op]; write an override" in to_tree(build(events))


def test_a_reason_is_said_once() -> None:
    text = to_tree(build(large_timeline(8, graphs=1)))
    assert text.count("the size of its result depends on values") == 1
    assert "as above [unsupported_op]" in text


def test_it_is_coloured_by_lowering_and_a_name_is_no_markup() -> None:
    events = [
        Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="eager", nodes=1, module="[red]x\x1b[2J")
    ]
    console = Console(width=100, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as seen:
        console.print(*tree_renderables(build(events)))
    assert "\x1b[33meager" in seen.get()
    assert "[red]x" in seen.get()
    assert "\x1b[2J" not in seen.get()


def test_of_nothing() -> None:
    assert to_tree(build([])) == "omni: nothing was compiled yet; call the compiled function first\n"
