"""Choosing among lowerings for a whole graph: by rule (`tuned`), or by measuring (`measure`)."""

from omnicomp.backend.select.choose import choose

__all__ = ["choose"]
