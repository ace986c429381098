"""`omnicomp bringup`: every distinct operator of a model on a device, and what to write next."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from omnicomp.cli.output import check_writable, write
from omnicomp.testing.bringup import Row, bringup, print_table, to_html


def run_bringup(
    model: str,
    device: str,
    *,
    size: str,
    training: bool,
    lowerings: Sequence[str],
    setup: str,
    json: Path | None,
    html: Path | None,
) -> int:
    """Print and write the table.

    Returns:
        0 if everything matched, 1 if something is missing or differs.

    Raises:
        OmnicompError: the model or the device is unknown, or a file can't be written; nothing has run yet.
    """
    for path in (json, html):
        if path is not None:
            check_writable(path)
    progress = Console(stderr=True)

    def say(row: Row) -> None:
        # A model has dozens of calls, and each takes seconds.
        if progress.is_terminal:
            progress.print(f"{'ok' if row.ok else row.kernel:<9}{row.operator}", style="dim", highlight=False)

    found = bringup(model, device, size=size, training=training, lowerings=lowerings, setup=setup, say=say)
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 160
    print_table(found, Console(width=wide))
    if json is not None:
        write(json, found.to_json())
    if html is not None:
        write(html, to_html(found))
    return 0 if found.ok else 1
