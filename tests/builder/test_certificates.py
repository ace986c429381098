import pytest
import torch
from torch import nn

import omnicomp
from omnicomp.analysis.certify import ASSUMED, PROVED
from omnicomp.builder import certificates


def test_a_check_of_weights_that_fails_costs_the_verdict_alone(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(certificates, "traced_again", fail)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval(), torch.randn(8, 32)
    options = {"lowerings": ["eager"], "dtype_policy": "bf16"}
    with torch.no_grad():
        found = torch.compile(model, backend="omni", options=options)(x)
        torch.testing.assert_close(found, model(x), rtol=0.1, atol=0.1)
    (graph,) = omnicomp.audit().graphs
    (event,) = (event for event in graph.certificates if event.name == "weights")
    assert (event.verdict, event.sentence) == (ASSUMED, "the check failed: RuntimeError: no")
    assert not graph.retreats


def test_weights_that_are_cast_once_are_certified():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    options = {"lowerings": ["eager"], "certify": "always", "dtype_policy": "bf16"}
    with torch.no_grad():
        torch.compile(model, backend="omni", options=options)(torch.randn(8, 32))
    (graph,) = omnicomp.audit().graphs
    events = [event for event in graph.certificates if event.name == "weights"]
    assert events
    assert {event.verdict for event in events} == {PROVED}
