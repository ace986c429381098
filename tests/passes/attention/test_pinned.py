"""Which kernel rules take on CUDA, by fake tensors: no device is needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from omnicomp.passes.attention.pinned import cudnn_is_wrong, prefers_cudnn

HALF = torch.bfloat16


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (1500, 1500), (512, 704), (448, 1024)])
def test_cudnn_has_no_backward_on_hopper_beside_its_tiles(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], queries: int, keys: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with FakeTensorMode():
        query, key = (torch.empty(2, 8, size, 64, device="cuda", dtype=HALF) for size in (queries, keys))
        wrong = capability[0] == 9 and (queries % 128 != 0 or keys % 128 != 0)
        assert cudnn_is_wrong(query, key, HALF, training=True) == wrong
        assert not cudnn_is_wrong(query, key, HALF, training=False)
        assert prefers_cudnn(query, key, HALF, training=True) != wrong
        assert prefers_cudnn(query, key, HALF, training=False)
        assert not cudnn_is_wrong(query, key, torch.float32, training=True)


def test_symbolic_lengths_may_be_any_or_multiples_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        length = environment.create_unbacked_symint()
        query = torch.empty(2, 8, length, 64, device="cuda", dtype=HALF)
        assert cudnn_is_wrong(query, query, HALF, training=True)
        assert not prefers_cudnn(query, query, HALF, training=True)
        assert not cudnn_is_wrong(query, query, HALF, training=True, tiled=True)
        assert prefers_cudnn(query, query, HALF, training=True, tiled=True)
    assert not environment.guards


@pytest.mark.parametrize(
    ("capability", "heads", "wrong"), [((10, 0), 4, True), ((10, 0), 8, False), ((9, 0), 4, False)]
)
def test_cudnn_is_not_taken_for_few_heads_of_keys_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], heads: int, wrong: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with FakeTensorMode():
        query = torch.empty(2, 32, 512, 64, device="cuda", dtype=HALF)
        key = torch.empty(2, heads, 512, 64, device="cuda", dtype=HALF)
        assert cudnn_is_wrong(query, key, HALF, training=False) == wrong
        assert prefers_cudnn(query, key, HALF, training=False) != wrong
