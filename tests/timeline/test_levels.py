from omnicomp.timeline import Attempt, Reason
from omnicomp.timeline.levels import backend_timeline

FAILED = Reason(code="build_failed", sentence="it does not build")


def attempt(lowering: str, ok: bool, selected: bool = False, reason: Reason | None = None) -> Attempt:
    return Attempt(
        graph="g0", part="forward", subgraph="g0.forward.0", lowering=lowering, ok=ok, selected=selected, reason=reason
    )


def test_levels_are_in_order_and_say_why() -> None:
    events = [attempt("inductor", False, reason=FAILED), attempt("eager", True, selected=True)]
    assert backend_timeline(events) == [
        {
            "module": "g0.forward.0",
            "attempts": [
                {"level": "compile", "ok": False, "selected": False, "reason": "it does not build"},
                {"level": "kernel_override", "ok": False, "selected": False, "reason": "skipped: eager selected"},
                {"level": "eager", "ok": True, "selected": True, "reason": None},
            ],
        }
    ]


def test_the_last_word_on_a_level_stands() -> None:
    events = [attempt("inductor", True, selected=True), attempt("inductor", False, reason=FAILED)]
    (entry,) = backend_timeline(events)
    assert [item["ok"] for item in entry["attempts"]] == [False, False, False]
    assert entry["attempts"][1]["reason"] == "not tried"
