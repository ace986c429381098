"""`omnicomp verify`: the changes of passes that a timeline tells of, checked again.

Both graphs of a change are in omni's cache folder, under the key that the event has.
"""

from pathlib import Path

from omnicomp.audit.views import rows
from omnicomp.audit.views.layout import FittingTable, cell, plain, width_of
from omnicomp.cli.output import emit
from omnicomp.errors import OmnicompError, first_line
from omnicomp.timeline import Certified, read_events


def run_verify(timeline: Path) -> int:
    """Print a row for each change; returns 1 if one does not hold, or has another verdict than it had.

    Raises:
        OmnicompError: the file tells of no certificate.
    """
    found = [event for event in read_events(timeline) if isinstance(event, Certified)]
    if not found:
        raise OmnicompError(f"{timeline} has no certificate: no pass changed anything, or options={{'certify': 'off'}}")
    table = FittingTable("Certificates", "change", "pass", "then", "now", "detail")
    now: dict[str, tuple[str, str]] = {}
    for event in found:
        if event.key not in now:
            now[event.key] = _again(event)
        verdict, detail = now[event.key]
        words = [rows.VERDICTS.get(each, each) or "not checked" for each in (event.verdict, verdict)]
        table.add_row(*map(cell, (f"{event.graph} {event.node}", event.name, *words, detail)))
    emit(plain(table, width=width_of()))
    verdicts = [(event.verdict, now[event.key][0]) for event in found]
    return int(any("refuted" in pair or (pair[1] and pair[0] != pair[1]) for pair in verdicts))


def _again(event: Certified) -> tuple[str, str]:
    """The verdict of today, and a sentence; no verdict where nothing can be checked."""
    from omnicomp.passes.certificates import again

    if not event.key:
        return "", event.sentence
    try:
        _, fresh = again(event.key)
    except LookupError as error:
        return "", str(error)
    except Exception as error:  # noqa: BLE001 - becomes the row
        return "", f"it can't be checked: {first_line(error)}"
    return ("", "its graphs are not kept: their sizes are symbolic") if fresh is None else (fresh.verdict, fresh.reason)
