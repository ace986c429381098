"""Print docs/options.md, made from the declarations in `omnicomp.options.policy`: `python -m omnicomp.options`."""

import json
import sys
from typing import Any

from omnicomp.options.policy import SPECS, Policy

_HEAD = """# Options

`torch.compile(model, backend="omni", options={...})` takes these keys, and Inductor's config keys with the meaning that
they have there. A misspelt key or value is answered by the nearest known one. `torch.compile` itself refuses `mode`
and `options` in one call. Where a variable is named, it sets the option for calls that don't.

| option | default | variable | what it does |
|---|---|---|---|
"""


def page() -> str:
    """The text of docs/options.md."""
    defaults = Policy()
    text = _HEAD
    for name, spec in SPECS.items():
        variable = f"`{spec.variable}`" if spec.variable else ""
        text += f"| `{name}` | {_shown(getattr(defaults, name))} | {variable} | {spec.doc} |\n"
    return text


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, (bool, int, float)):
        return f"`{value}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else str(value))}`"


if __name__ == "__main__":
    sys.stdout.write(page())
