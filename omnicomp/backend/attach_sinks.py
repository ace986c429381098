"""Sinks of the timeline, attached as the options and the environment ask: files, loggers, torch's trace, telemetry."""

from omnicomp.audit import build
from omnicomp.options.policy import Policy
from omnicomp.timeline import Timeline
from omnicomp.timeline.sinks import jsonl, logs, opentelemetry, structured_trace

__all__ = ["attach_all"]


def attach_all(timeline: Timeline, policy: Policy) -> None:
    """Attach the sinks that the environment, the options and the program ask for; none is attached twice.

    Args:
        timeline: of the process.
        policy: of the graph that is being captured.
    """
    jsonl.attach(timeline, None, policy.timeline_max_bytes)
    if policy.timeline is not None:
        jsonl.attach(timeline, policy.timeline, policy.timeline_max_bytes)
    logs.attach(timeline)
    structured_trace.attach(timeline, lambda events: build(events).to_text())
    opentelemetry.attach(timeline)
