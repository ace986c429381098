"""Cases that a test draws itself: from the run's seed, few of them in the fast tier and many in the slow one.

Tests with `hypothesis.given` need none of this; others have the marker `drawn`.
"""

import os
import random

from hypothesis import settings

FEW = 40


def generator(name: str) -> random.Random:
    """Random numbers that are others in each run, and the same in a run with the same `--seed`."""
    return random.Random(f"{os.environ['OMNICOMP_TEST_SEED']} {name}")


def examples(few: int) -> int:
    """How many cases to draw.

    Args:
        few: how many in the fast tier.
    """
    return few * settings().max_examples // FEW
