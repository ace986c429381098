"""Values of inputs for another process: small ones as they are, large ones made up alike."""

import torch

from omnicomp._torch.dynamo import samples


def fakes(*values: torch.Tensor) -> list[torch.Tensor]:
    with torch._subclasses.FakeTensorMode():
        return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]


def test_small_values_are_those_of_the_call_in_their_layout() -> None:
    base = torch.arange(12.0).view(3, 4)
    given = [base.t(), base[:, 1:2].expand(3, 5), torch.tensor([True, False]), torch.empty(0, 3)]
    data = samples.packed(given, [False] * 4, whole=False)
    base += 1
    for made, value in zip(samples.unpacked(data, fakes(*given)), given, strict=True):
        assert made.stride() == value.stride()
        assert torch.equal(made, value - 1 if made.is_floating_point() else value)


def test_weights_are_left_out_or_made_up_alike() -> None:
    weight, other = torch.randn(512, 512) * 3 + 7, torch.zeros(2**21, dtype=torch.int64)
    expected = fakes(weight, other)
    assert samples.unpacked(samples.packed([weight, other], [True, False], whole=False), expected) == tuple(expected)
    made, left = samples.unpacked(samples.packed([weight, other], [True, False], whole=True), expected)
    assert abs(made.mean() - 7) < 0.2
    assert abs(made.std() - 3) < 0.2
    assert left is expected[1]
    assert torch.isfinite(samples.unpacked(samples.packed([weight * torch.inf], [True], whole=True), expected)[0]).all()
