import torch
from torch import nn

import omnicomp
from omnicomp.analysis.certify import PROVED


def test_weights_that_are_cast_once_are_certified():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    options = {"lowerings": ["eager"], "certify": "always", "dtype_policy": "bf16"}
    with torch.no_grad():
        torch.compile(model, backend="omni", options=options)(torch.randn(8, 32))
    (graph,) = omnicomp.audit().graphs
    events = [event for event in graph.certificates if event.name == "weights"]
    assert events
    assert {event.verdict for event in events} == {PROVED}
