"""OpenTelemetry spans for the stages of a compilation, in programs that use OpenTelemetry (the extra `otel`).

Nothing is imported for them: where the program has not imported OpenTelemetry itself, nobody takes spans.
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from omnicomp.safety import privacy
from omnicomp.timeline.recorder import Timeline

_NAME: Final = "omnicomp"
_KEY: Final = "OpenTelemetry"


def _api() -> Any:
    return sys.modules.get("opentelemetry.trace")


def span(name: str, attributes: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A span around what is inside; an exception that leaves it is its status."""
    api = _api()
    if api is None:
        return contextlib.nullcontext()
    return _span(api, name, _named(attributes))


def describe(span: Any, attributes: Mapping[str, Any]) -> None:
    """Add attributes to what `span` gave."""
    if span is not None:
        span.set_attributes(_named(attributes))


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_NAME}.{key}": value for key, value in attributes.items() if value not in ("", None)}


@contextlib.contextmanager
def _span(api: Any, name: str, attributes: dict[str, Any]) -> Any:
    tracer = api.get_tracer(_NAME)
    # The exception's text is cleaned first, so it is not left to OpenTelemetry to record it.
    with tracer.start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield current
        except BaseException as error:
            text = privacy.cleaner().text(str(error).split("\n", 1)[0])
            current.set_status(api.StatusCode.ERROR, f"{type(error).__name__}: {text}")
            raise


class TelemetrySink:
    """Adds deviations from the plan to the current span, as span events."""

    _TYPES: Final = ("attempt", "retreat", "option", "verification", "near_miss", "cache")

    def write(self, record: dict[str, Any]) -> None:
        """Take one event."""
        api, kind = _api(), record["type"]
        if api is None or kind not in self._TYPES:
            return
        current = api.get_current_span()
        if not current.is_recording():
            return
        reason: Mapping[str, Any] = record.get("reason") or {}
        fields = {key: value for key, value in record.items() if isinstance(value, (str, bool, int, float)) and value}
        fields |= {f"reason.{key}": value for key, value in reason.items()}
        current.add_event(f"{_NAME}.{kind}", {f"{_NAME}.{key}": value for key, value in fields.items()})

    def close(self) -> None:
        """Nothing is held."""


def attach(timeline: Timeline) -> None:
    """Add the sink, if the program uses OpenTelemetry."""
    if _api() is not None and not timeline.has_sink(_KEY):
        timeline.add_sink(_KEY, TelemetrySink())
