"""A step down is recorded in one place, with the same events wherever it happens."""

import ast
from pathlib import Path

import pytest

import omnicomp
from omnicomp.timeline import Attempt, Ran, Reason, Retreat, Timeline
from omnicomp.timeline.step_down import Where, record_step_down

WHERE = Where(graph="g0", part="forward", subgraph="g0.forward.1")
RAN = ("seen", {"aten.sin.default": 1})
REASON = Reason(code="call_failed", sentence="it raised")


@pytest.mark.parametrize("attempts", [True, False])
@pytest.mark.parametrize("ran", [True, False])
def test_the_events(attempts: bool, ran: bool) -> None:
    timeline = Timeline()
    record_step_down(timeline, WHERE, "inductor", "eager", REASON, attempts=attempts, ran=RAN if ran else None)
    expected = [
        Retreat(**WHERE, source_lowering="inductor", target_lowering="eager", reason=REASON),
        *([Attempt(**WHERE, lowering="inductor", ok=False, reason=REASON)] if attempts else []),
        *([Attempt(**WHERE, lowering="eager", ok=True, selected=True)] if attempts else []),
        *([Ran(**WHERE, lowering="eager", evidence="seen", kernels={"aten.sin.default": 1})] if ran else []),
    ]
    unplaced = [{**event.to_dict(), "time": 0, "seq": 0} for event in timeline.events()]
    assert unplaced == [{**event.to_dict(), "time": 0, "seq": 0} for event in expected]


def test_no_other_module_makes_such_an_event() -> None:
    package = Path(omnicomp.__file__).parent
    makers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Retreat":
                makers.add(str(path.relative_to(package)))
    assert makers == {"timeline/step_down.py"}
