"""Files of the HTML page that ship beside the code: style sheets and scripts."""

import functools
from importlib.resources import files

__all__ = ["asset"]


@functools.cache
def asset(name: str) -> str:
    """The text of a file in `omnicomp/audit/page`."""
    return files("omnicomp.audit").joinpath("page").joinpath(name).read_text(encoding="utf-8")
