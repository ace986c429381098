"""Encoders of `nn.TransformerEncoder` are one graph, also at symbolic sizes."""

from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize("padded", [False, True])
def test_a_second_length_is_one_graph_too(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    compiled: Any = torch.compile(module, backend="omni", options={"lowerings": ["eager"]}, fullgraph=True)
    with torch.no_grad():
        for length in (8, 13, 21):
            x = torch.randn(2, length, 16)
            masks = {"src_key_padding_mask": torch.arange(length) >= torch.tensor([[length], [5]])} if padded else {}
            torch.testing.assert_close(compiled(x, **masks), module(x, **masks))
