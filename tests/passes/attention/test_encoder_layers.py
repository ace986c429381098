"""Torch's operator for a whole encoder layer is read as the attention that it holds, and gives what it gave."""

import math

import pytest
import torch
from fusion import Backend, compiled
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from omnicomp._torch.repairs.encoder_sizes import put_fake_layer
from omnicomp.passes.attention import fuse
from omnicomp.passes.attention.encoder_layers import why_called
from omnicomp.passes.attention.site import MatchEnded
from omnicomp.timeline import Rewrite

put_fake_layer()  # the backend does
LENGTH = 12
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [7], [3]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
MASKS = {
    "padding": {"src_key_padding_mask": PADDING},
    "numbers": {"src_key_padding_mask": torch.zeros(3, LENGTH).masked_fill(PADDING, -math.inf)},
    "causal": {"mask": CAUSAL, "is_causal": True},
    "both": {"mask": CAUSAL < 0, "src_key_padding_mask": PADDING},
}


def encoder(*, layers=2, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval().to(dtype)


def run(module, x, masks=None, **options):
    """Compile, compare with eager, and return the backend."""
    backend = Backend()
    masks = {
        k: v if isinstance(v, bool) or not v.is_floating_point() else v.to(x.dtype) for k, v in (masks or {}).items()
    }
    with torch.no_grad():
        found, want = compiled(module, backend, **options)(x, **masks), module(x, **masks)
    assert found.stride() == want.stride()
    tolerance = {"rtol": 0.05, "atol": 0.05} if x.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, want, equal_nan=True, **tolerance)
    return backend


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_attention_is_fused(masks, options, dtype):
    backend = run(encoder(dtype=dtype, **options), torch.randn(3, LENGTH, 16, dtype=dtype), MASKS[masks])
    assert len(backend.attentions()) == 2
    assert backend.reasons() == []


def test_no_mask_is_fused_where_there_are_many_keys():
    assert len(run(encoder(layers=1), torch.randn(2, 256, 16)).attentions()) == 1
    (told,) = run(encoder(layers=1), torch.randn(2, 255, 16)).of(Rewrite)
    assert (told.kept, told.target) == (True, "_transformer_encoder_layer_fwd")
    assert told.detail == "no mask, and fewer than 256 keys"


def test_queries_without_a_key_are_undefined():
    padding = PADDING.clone()
    padding[1] = True
    module, x = encoder(layers=1), torch.randn(3, LENGTH, 16)
    with torch.no_grad():
        assert module(x, src_key_padding_mask=padding).isnan().any()
    assert run(module, x, {"src_key_padding_mask": padding}).attentions()


@pytest.mark.parametrize("first", [False, True])
def test_an_input_that_is_transposed(first):
    x = torch.randn(LENGTH, 3, 16).transpose(0, 1)
    assert len(run(encoder(norm_first=first), x, MASKS["padding"]).attentions()) == 2


def test_symbolic_sizes():
    module, backend = encoder(), Backend()
    function = compiled(module, backend, dynamic=True)
    with torch.no_grad():
        for size, length in ((3, 12), (2, 9), (5, 31)):
            x, padding = torch.randn(size, length, 16), torch.arange(length) >= torch.randint(1, length, (size, 1))
            want = module(x, src_key_padding_mask=padding)
            torch.testing.assert_close(function(x, src_key_padding_mask=padding), want)
    assert len(backend.attentions()) == 2 * len(backend.graphs) == 2


def test_what_is_not_fused_is_called_as_it_was(monkeypatch):
    sites = []

    def choose(site, session):
        sites.append(site)
        raise MatchEnded(site.softmax.node, "no kernel is wanted", needed="one")

    monkeypatch.setattr(fuse, "choose", choose)
    backend = run(encoder(layers=3), torch.randn(3, LENGTH, 16), MASKS["padding"])
    assert len(sites) == 3
    (graph,) = backend.graphs
    called = [node for node in graph.graph.nodes if node.target is torch._transformer_encoder_layer_fwd]
    assert len(called) == 3
    assert not any(node.target is torch.matmul for node in graph.graph.nodes)
    assert {(told.kept, told.detail) for told in backend.of(Rewrite)} == {(True, "its attention is not fused")}


@pytest.mark.parametrize(("length", "few"), [(64, True), (2048, False)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_small_layers_of_changing_sizes_stay_one_call_on_cuda(length, few, dynamic):
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(length, ConstantSource("length"), DimDynamic.DYNAMIC)
    size = shapes.create_symintnode(symbol, hint=length) if dynamic else length
    graph = Graph()
    with FakeTensorMode(shape_env=shapes), torch.device("cuda"):
        src, weight, bias, mask = (torch.empty(sizes) for sizes in ((8, size, 512), (2048, 512), 2048, (8, size)))
    arguments = torch.ops.aten._transformer_encoder_layer_fwd.default._schema.arguments
    given = {"src": src, "embed_dim": 512, "num_heads": 8, "ffn_weight_1": weight, "mask": mask, "mask_type": 1}
    args = [given.get(each.name, bias) for each in arguments]
    nodes = [graph.placeholder(f"x{i}") if isinstance(x, torch.Tensor) else x for i, x in enumerate(args)]
    for node, value in zip(nodes, args, strict=True):
        if isinstance(value, torch.Tensor):
            node.meta["example_value"] = value
    why = why_called(graph.call_function(torch._transformer_encoder_layer_fwd, tuple(nodes)))
    assert why.startswith("its sizes may change") == (few and dynamic)
