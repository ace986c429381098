"""What can be run for a comparison, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from omnicomp.timeline import Calibration, current


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.compiler.reset()


def calibrated(function, *args, bound=1e-1, **options) -> Calibration:
    """What the calibration of a function's only graph reports."""
    known = len(current().events())
    options = {"lowerings": ["eager"], "dtype_policy": "bf16", "dtype_error": bound, "verdicts": "off", **options}
    with torch.no_grad():
        torch.compile(function, backend="omni", options=options)(*args)
    (event,) = [e for e in current().events()[known:] if isinstance(e, Calibration)]
    return event


def test_attention_drops_nothing() -> None:
    q, w = torch.randn(2, 2, 16, 8), nn.Parameter(torch.randn(8, 8))
    event = calibrated(lambda q: F.scaled_dot_product_attention(q @ w, q, q, dropout_p=0.5), q)
    assert 0 < event.before < 2e-2


def test_functions_that_want_one_dtype_get_it() -> None:
    q, w = torch.randn(2, 2, 16, 8), nn.Parameter(torch.randn(2, 2, 16, 8))
    event = calibrated(lambda q: F.scaled_dot_product_attention(q, w, w), q)
    assert (event.state, event.runs) == ("measured", 3)


def test_overflow_is_an_infinite_error() -> None:
    event = calibrated(lambda x: (x @ x) * 1, 1e4 * torch.randn(8, 8), dtype_policy="fp16")
    assert (event.state, event.kept, event.before) == ("measured", 1, -1)
    assert 0 <= event.after < 1e-5


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x @ x, torch.full((8, 8), float("nan"))),
        (lambda x: x @ x, torch.empty(0, 0)),
        (lambda x: (x @ x).argmax(-1), torch.eye(8)),
    ],
    ids=["nan", "empty", "integers"],
)
def test_outputs_that_show_no_error_are_refused(function, x) -> None:
    event = calibrated(function, x)
    assert (event.state, event.kept) == ("refused", 1)
    assert event.reason is not None
    assert "no finite floating-point number" in event.reason.sentence


def test_a_write_to_shared_memory_is_refused() -> None:
    base = torch.randn(8, 8)
    before = base.clone()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        return x @ x

    event = calibrated(function, base[:4, :4], base[4:, 4:])
    assert event.state == "refused"
    assert event.reason is not None
    assert "shares its memory" in event.reason.sentence
    before[4:, 4:] += 1
    assert torch.equal(base, before)


def test_bits_are_refused() -> None:
    event = calibrated(lambda x: (x @ x) + x.view(torch.int32), torch.randn(8, 8))
    assert event.state == "refused"
    assert event.reason is not None
    assert "bits" in event.reason.sentence


def test_sizes_may_depend_on_data() -> None:
    assert calibrated(lambda x: (x @ x)[x[0] > 0], torch.randn(8, 8)).state == "measured"


def test_inside_inference_mode() -> None:
    with torch.inference_mode():
        event = calibrated(nn.Linear(8, 8), torch.randn(4, 8))
    assert event.state == "measured"
    assert event.before > 0


def test_the_reference_may_be_float32() -> None:
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    event = calibrated(model, x, bound=1e-12, reference="fp32")
    assert event.wide == 0
    assert event.kept == 1
