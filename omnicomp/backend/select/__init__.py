"""Choosing among lowerings for a whole graph: by rule (`tuned`), or by measuring (`measure`)."""

from omnicomp.backend.select.choose import compile_chosen

__all__ = ["compile_chosen"]
