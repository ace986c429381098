import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.autograd.run_in_precision import CannotWiden, InPrecision, on_real_tensors


def test_operators_compute_in_the_dtype_whatever_they_are_told() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    true = (F.linear(x.double(), weight.double()).softmax(-1) + torch.ones(8).double()).sum()
    with on_real_tensors(), InPrecision(torch.float64), torch.autocast("cpu", torch.bfloat16):
        found = (F.linear(x, weight).softmax(-1, dtype=torch.float32) + torch.ones(8).half()).float().sum()
    assert found.dtype is torch.float64
    assert torch.equal(found, true)


@pytest.mark.parametrize("draw", [lambda x: F.dropout(x, 0.5), torch.rand_like, lambda x: torch.randn(4, 64) + 0 * x])
def test_random_numbers_are_the_same_in_every_dtype(draw) -> None:
    found: list[torch.Tensor] = []
    for dtype in (None, torch.float64):
        torch.manual_seed(0)
        with on_real_tensors(), InPrecision(dtype):
            found.append(draw(torch.ones(4, 64)))
    torch.manual_seed(0)
    assert torch.equal(found[0], draw(torch.ones(4, 64)))
    assert found[1].dtype is torch.float64
    assert torch.equal(found[0].double(), found[1])


def test_writes_reach_what_is_wide_and_nothing_else() -> None:
    wide, narrow = torch.zeros(3, dtype=torch.float64), torch.zeros(3)
    with on_real_tensors(), InPrecision(torch.float64):
        wide.add_(torch.ones(3))
        with pytest.raises(CannotWiden, match="writes"):
            narrow.add_(1)
    assert wide.tolist() == [1, 1, 1]
    assert narrow.tolist() == [0, 0, 0]


def test_bits_are_not_reinterpreted() -> None:
    with on_real_tensors(), InPrecision(torch.float64), pytest.raises(CannotWiden, match="bits"):
        torch.ones(3).view(torch.int32)


def test_a_checkpoint_is_looked_into() -> None:
    seen: list[torch.dtype] = []

    def backend(module, inputs):
        with on_real_tensors(), InPrecision(torch.float64):
            seen.extend(value.dtype for value in module.forward(*inputs))
        return module.forward

    function = torch.compile(lambda x: checkpoint(lambda y: y.float().sin(), x, use_reentrant=False), backend=backend)
    function(torch.ones(3))
    assert seen == [torch.float64]


def test_complex_numbers_are_widened_with_their_parts() -> None:
    with on_real_tensors(), InPrecision(torch.float64):
        found = torch.view_as_complex(torch.ones(3, 2)) * 2
    assert found.dtype is torch.complex128


def test_attention_without_a_dropout_is_computed_in_the_dtype() -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8).double().unbind()
    true = (q @ k.mT / 8**0.5).softmax(-1) @ v
    with on_real_tensors(), InPrecision(torch.float64):
        found = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
