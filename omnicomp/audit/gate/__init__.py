"""Judging a report by a fallback budget, and the views of the verdict."""

from omnicomp.audit.gate.judge import judge

__all__ = ["judge"]
