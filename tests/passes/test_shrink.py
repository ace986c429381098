import torch

from omnicomp._torch.fx import copy_module, describe
from omnicomp.passes.changes import Change
from omnicomp.passes.shrink import Shrunk, shrunk


def small(function, *inputs: torch.Tensor) -> Shrunk | None:
    module = torch.fx.symbolic_trace(function)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        describe(module, [mode.from_tensor(value) for value in inputs])
    node = next(iter(module.graph.nodes))
    return shrunk(Change(before=module, after=copy_module(module), at=node))


def shapes(found: Shrunk) -> list[tuple[int, ...]]:
    return [tuple(node.meta["example_value"].shape) for node in found.before.graph.find_nodes(op="placeholder")]


def test_small_graphs_stay_as_they_are():
    found = small(lambda x: x.sin(), torch.ones(3, 4))
    assert found is not None
    assert not found.sizes


def test_heads_and_features_still_fit_together():
    def function(x, w):
        return (x @ w).view(2, 512, 16, 64).transpose(1, 2).reshape(2, 16, 512 * 64)

    found = small(function, torch.ones(2, 512, 1024), torch.ones(1024, 1024))
    assert found is not None
    (batch, length, width), _ = shapes(found)
    assert batch == 2
    assert width == found.sizes[16] * found.sizes[64]
    assert length == found.sizes[512] < 10


def test_half_of_a_size_is_half_of_its_image():
    found = small(lambda x: torch.cat((x[..., 64:], x[..., :64]), -1), torch.ones(2, 256, 128))
    assert found is not None
    assert found.sizes[128] == 2 * found.sizes[64]


def test_numbers_that_are_no_sizes_stay():
    found = small(lambda x: x.masked_fill(x > 0, -10000), torch.ones(256, 256))
    assert found is not None
    assert "-10000" in found.after.code


def test_constants_are_cut():
    constant = torch.ones(512, 512).tril()

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", constant)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.mask

    found = small(Masked(), torch.ones(4, 512, 512))
    assert found is not None
    assert found.before.mask.shape == (found.sizes[512],) * 2
    assert constant.shape == (512, 512)


def test_what_can_not_be_small_is_none():
    assert small(lambda x: x.repeat(1, 70000), torch.ones(2, 3)) is None
