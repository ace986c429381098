"""What rows of the views say in a few words."""

import pytest

from omnicomp.audit.model import SubgraphAudit, TimeUse
from omnicomp.audit.views.rows import speed, step_of
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


def timed(device: str, **fields: float | str) -> str:
    use = TimeUse(device=device, calls=8, seconds=1.0, fastest=2e-3, host_seconds=1.9e-3, **fields)  # type: ignore[arg-type]
    return speed(
        SubgraphAudit(id="g0.inference.0", graph="g0", part="inference", bytes_hint=10**9, flops_hint=10**9, timing=use)
    )


def test_what_was_measured_of_a_call_is_told_and_nothing_else() -> None:
    assert timed("cpu") == "a call takes 2 ms"
    assert timed("cuda") == "a call takes 2 ms, host 1.9 ms"
    measured = timed(
        "cuda", kernels=151, kernel_seconds=1.3e-3, copy_rate=1e12, product_rate=1e14, product_dtype="bfloat16"
    )
    assert measured == (
        "a call takes 2 ms, 151 kernels 1.3 ms, gap 0.7 ms, host 1.9 ms, 50.0 % of the copy rate, "
        "0.5 % of the rate of bfloat16 products"
    )
    assert speed(SubgraphAudit(id="g0.inference.0", graph="g0", part="inference")) == ""
