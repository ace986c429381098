"""Judging a report by a limit on fallbacks, and the views of the verdict."""
