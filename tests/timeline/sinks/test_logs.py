"""Log lines: by `TORCH_LOGS`, and by Python's own configuration."""

import logging

import pytest
import torch
import torch._logging
from processes import python

import omnicomp
from omnicomp.timeline import EVENT_TYPES, NearMiss, NodePlacement, Placement, Reason, Timeline
from omnicomp.timeline.sinks import logs
from omnicomp.timeline.sinks.logs import LOGGERS, LogSink

PROGRAM = """
import torch
f = torch.compile(lambda x: (x.sin() + 1).sum(), backend="omni", options={"lowerings": ["eager"]})
f(torch.ones(3, requires_grad=True)).backward()
"""


def lines(setting: str) -> list[str]:
    """What a program prints below the logger `omnicomp` under a setting of TORCH_LOGS."""
    environment = {"TORCH_LOGS": setting, "TORCH_LOGS_FORMAT": "%(levelname)s %(name)s %(message)s"}
    done = python("-c", PROGRAM, environment=environment, check=True)
    return [line for line in done.stderr.splitlines() if " omnicomp" in line]


def test_torch_logs_shows_what_was_decided() -> None:
    shown = lines("omnicomp")
    assert {line.split()[0] for line in shown} == {"INFO"}
    assert any("omnicomp.capture g0" in line and "3 operators, device cpu" in line for line in shown)
    assert "INFO omnicomp.placement g0.forward: 3 on eager" in shown
    assert any(line.startswith("INFO omnicomp.lowerings g0.backward.0: eager built it in") for line in shown)
    assert len(shown) == len(set(shown)), "a line is printed twice"


@pytest.mark.slow
def test_plus_shows_each_detail() -> None:
    shown = lines("+omnicomp")
    assert any(line.startswith("DEBUG omnicomp.passes g0: attention_fusion changed nothing") for line in shown)
    assert any(line.startswith("DEBUG omnicomp.placement g0.forward.0: subgraph: lowering=eager") for line in shown)


@pytest.mark.slow
def test_minus_shows_errors_alone() -> None:
    assert lines("-omnicomp") == []


def test_torchs_own_python_interface_knows_the_name(caplog: pytest.LogCaptureFixture) -> None:
    assert torch._logging._internal.log_registry.is_log("omnicomp")
    logger = logging.getLogger("omnicomp")
    before = (logger.level, logger.propagate, list(logger.handlers))
    try:
        torch._logging.set_logs(modules={"omnicomp": logging.DEBUG})
        assert logger.level == logging.DEBUG
        assert LogSink().wanted
    finally:
        torch._logging.set_logs()
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.handlers[:] = before[2]


def test_nothing_is_attached_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("omnicomp"), "level", logging.WARNING)
    logging.getLogger("omnicomp").manager._clear_cache()  # type: ignore[attr-defined]
    timeline = Timeline()
    logs.attach(timeline)
    assert not timeline._sinks


def test_every_type_of_event_gives_a_line(caplog: pytest.LogCaptureFixture) -> None:
    assert set(LOGGERS) <= set(EVENT_TYPES)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="omni", options={"lowerings": ["eager"]})
    with caplog.at_level(logging.DEBUG, "omnicomp"):
        compiled(torch.ones(2))
    kinds = {event.type for event in omnicomp.timeline.events()}
    names = {record.name for record in caplog.records}
    assert {f"omnicomp.{LOGGERS[kind]}" for kind in kinds if kind in LOGGERS} <= names


def test_names_of_a_model_stay_on_their_line(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline()
    timeline.add_sink("logs", LogSink())
    reason = Reason(code="match_ended", by="p", sentence="it\nended \x1b[31mred")
    node = NodePlacement(node="n", op="aten.foo", lowering="eager", chain=(reason,), source="evil\r\n.py:3")
    with caplog.at_level(logging.DEBUG, "omnicomp"):
        timeline.append(NearMiss(graph="g0", name="p", kind="attention", node="n\x1b[2J", reason=reason))
        timeline.append(Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,)))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "g0: p left n\ufffd[2J: it ended \ufffd[31mred"
    assert messages[2] == "g0.forward: n (aten.foo) at evil\ufffd .py:3 on eager: p: it ended \ufffd[31mred"
    assert all(message.isprintable() for message in messages)
