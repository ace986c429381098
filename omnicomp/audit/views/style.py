"""The style sheet that omnicomp's HTML pages share."""

from typing import Final

from omnicomp.audit.views.assets import asset

__all__ = ["STYLE"]

STYLE: Final = asset("base.css")
