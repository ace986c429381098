import dataclasses

from omnicomp.audit.report import fold
from omnicomp.audit.views.jsonform import to_dict
from omnicomp.timeline import Attempt, Capture, Reason, Subgraph
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
            "subgraph": "g0.forward.0",
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


def test_each_compiler_is_an_attempt_to_compile() -> None:
    events = [
        attempt("override", False),
        attempt("device", False, reason=FAILED),
        attempt("toy", False, reason=Reason(code="engine_missing", sentence="it is not installed")),
        attempt("eager", True, selected=True),
    ]
    (entry,) = backend_timeline(events)
    levels = [(item["level"], item["selected"], item["reason"]) for item in entry["attempts"]]
    assert levels == [
        ("compile", False, "it does not build; it is not installed"),
        ("kernel_override", False, None),
        ("eager", True, None),
    ]


def test_a_compiler_that_failed_before_one_that_built() -> None:
    (entry,) = backend_timeline([attempt("device", False, reason=FAILED), attempt("inductor", True, selected=True)])
    assert [item["selected"] for item in entry["attempts"]] == [True, False, False]
    assert entry["attempts"][0] == {"level": "compile", "ok": True, "selected": True, "reason": None}


def test_the_module_is_its_tag() -> None:
    events = [Capture(graph="g0", options={"tag": "unet"}), attempt("eager", True, selected=True)]
    (entry,) = backend_timeline(events)
    assert (entry["module"], entry["subgraph"]) == ("unet", "g0.forward.0")
    (told,) = fold(events).backend_timeline
    assert {**dataclasses.asdict(told), "attempts": [dataclasses.asdict(each) for each in told.attempts]} == entry


def test_the_report_has_the_last_word_too() -> None:
    events = [
        Capture(graph="g0"),
        Subgraph(graph="g0", part="forward", subgraph="g0.forward.0", lowering="inductor", nodes=1),
        attempt("inductor", True, selected=True),
        attempt("inductor", False, reason=FAILED),
        attempt("eager", True, selected=True),
    ]
    assert to_dict(fold(events))["backend_timeline"] == backend_timeline(events)
