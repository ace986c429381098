"""`omnicomp conformance`: whether a device meets what torch and omnicomp require, one line per check."""

from collections.abc import Sequence
from pathlib import Path

from omnicomp.audit.views.layout import fitted
from omnicomp.cli.output import check_writable, write
from omnicomp.testing.conformance import conformance, to_text


def run_conformance(
    device: str, *, quick: bool, setup: str, operators: str, groups: Sequence[str] | None, json: Path | None
) -> int:
    """Print each check as it ends, then one line; write the JSON.

    Returns:
        0 if the device conforms, 1 if not.

    Raises:
        OmnicompError: the device is unknown or not there, or the file can't be written; nothing has run yet.
    """
    if json is not None:
        check_writable(json)
    found = conformance(
        device,
        quick=quick,
        setup=setup,
        operators=operators,
        groups=groups,
        say=lambda result: print(fitted(to_text(result)), flush=True),
    )
    print(fitted(found.summary()))
    if json is not None:
        write(json, found.to_json())
    return 0 if found.ok else 1
