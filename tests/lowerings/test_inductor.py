import pytest
import torch

from omnicomp.timeline import Ran, current


@pytest.mark.inductor
def test_a_tensor_whose_negation_is_pending_is_read_by_eager() -> None:
    x = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    found = torch.compile(lambda x: x.T.exp().sum(0), backend="omni")(x)
    torch.testing.assert_close(found, x.T.exp().sum(0))
    assert {event.lowering for event in current() if isinstance(event, Ran)} == {"eager", "inductor"}
