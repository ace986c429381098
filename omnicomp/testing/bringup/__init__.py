"""How far a device is with a model, operator by operator: `omnicomp bringup MODEL --device NAME`."""

from omnicomp.testing.bringup.table import Bringup, Next, Row, bringup, print_table, to_html, to_text

__all__ = ["Bringup", "Next", "Row", "bringup", "print_table", "to_html", "to_text"]
