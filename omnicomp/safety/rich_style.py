"""Imports `rich.style` before others do: it draws from Python's `random`, and a seeded program goes on drawing."""

import importlib
import random

_state = random.getstate()
importlib.import_module("rich.style")
random.setstate(_state)
