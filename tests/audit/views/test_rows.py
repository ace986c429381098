"""What rows of the views say in a few words."""

import pytest

from omnicomp.audit.views.rows import step_of
from omnicomp.timeline import Reason, Retreat


@pytest.mark.parametrize(
    ("source", "target", "code", "said"),
    [
        ("inductor", "eager", "build_failed", "inductor retreated to eager"),
        ("inductor", "inductor", "build_failed", "inductor builds it in pieces only"),
        ("frozen", "frozen", "weights_changed", "frozen reads weights as inputs"),
    ],
)
def test_a_retreat_in_words(source: str, target: str, code: str, said: str) -> None:
    where = {"graph": "g0", "part": "inference", "subgraph": "g0.inference.0"}
    reason = Reason(code=code, sentence="it is so")
    assert step_of(Retreat(**where, source_lowering=source, target_lowering=target, reason=reason)) == said
