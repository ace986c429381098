"""Models whose attention is called: through transformers' interface, through torch's modules, whole and by layers."""

from typing import Any

import pytest
import torch
from tiers import fast
from torch import nn

import omnicomp

EAGER = {"lowerings": ["eager"]}


def transformer(name: str, attention: str) -> Any:
    """A small decoder, encoder or pair of both of transformers with two layers."""
    models = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "attn_implementation": attention}
    made = {
        "llama": lambda: models.LlamaModel(models.LlamaConfig(**sizes, num_key_value_heads=2)),
        "mistral": lambda: models.MistralModel(models.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=6)),
        "bert": lambda: models.BertModel(models.BertConfig(**sizes), add_pooling_layer=False),
        "gpt2": lambda: models.GPT2Model(
            models.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_implementation=attention)
        ),
    }
    torch.manual_seed(0)
    return made[name]().eval()


def arguments(padded: bool, length: int = 16) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    if padded:
        mask[1, length // 2 :] = 0
    return {"input_ids": torch.arange(2 * length).reshape(2, length) % 64, "attention_mask": mask}


def values(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**given, **({"use_cache": False} if "Bert" not in type(model).__name__ else {}))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "layers"),
    [
        *((name, "sdpa", layers) for name in ("llama", "mistral", "bert", "gpt2") for layers in (False, True)),
        ("llama", "flex_attention", False),
        ("mistral", "flex_attention", True),
        ("bert", "flex_attention", False),
    ],
)
def test_transformers_attention_interface(name: str, attention: str, layers: bool) -> None:
    reference, model = transformer(name, "eager"), transformer(name, attention)
    function = model
    if layers:
        for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
            layer.compile(backend="omni", options=EAGER)
    else:
        function = torch.compile(model, backend="omni", options=EAGER)
    for padded in (False, True, False):
        given = arguments(padded)
        seen = given["attention_mask"].bool()
        torch.testing.assert_close(values(function, given)[seen], values(reference, given)[seen], rtol=1e-4, atol=1e-5)
    sites = omnicomp.audit().sites
    assert sites.near_misses == ()
    assert sites.total
    if name == "llama" and not layers:
        assert all("causal" in site.detail for site in (*sites.fused, *sites.called))


@pytest.mark.parametrize("training", fast([False, True], lambda case: not case))
def test_torch_transformer_layers(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    compiled = torch.compile(model, backend="omni", options=EAGER)
    x = torch.randn(2, 12, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = True
    for options in ({}, {"mask": mask}, {"mask": mask > 1}, {"src_key_padding_mask": padding}):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x, **options), model(x, **options), rtol=1e-4, atol=1e-5)
    assert omnicomp.audit().sites.near_misses == ()
