"""Sinks of the timeline, attached as the options and the environment ask: files, loggers, torch's trace, telemetry."""

from omnicomp.options.policy import Policy
from omnicomp.timeline import Timeline
from omnicomp.timeline.sinks import logs
from omnicomp.timeline.sinks import opentelemetry as telemetry
from omnicomp.timeline.sinks import structured_trace as structured
from omnicomp.timeline.sinks.jsonl import attach

__all__ = ["attach_all"]


def attach_all(timeline: Timeline, policy: Policy) -> None:
    """Attach the sinks that the environment, the options and the program ask for; none is attached twice.

    Args:
        timeline: of the process.
        policy: of the graph that is being captured.
    """
    attach(timeline, None, policy.timeline_max_bytes)
    if policy.timeline is not None:
        attach(timeline, policy.timeline, policy.timeline_max_bytes)
    for outlet in (logs, structured, telemetry):
        outlet.attach(timeline)
