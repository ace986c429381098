"""The policy on models of transformers."""

import collections

import pytest
import torch
from lowered import BOUND, DTYPES, compiled, error
from tiers import fast

from omnicomp.timeline import Rewrite


@pytest.mark.model
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("name", fast(["bert", "llama"], "llama".__eq__))
def test_model(name, policy):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if name == "bert":
        config = transformers.BertConfig(**sizes, vocab_size=128, attn_implementation="sdpa")
        model = transformers.BertModel(config)
    else:
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, vocab_size=128, attn_implementation="sdpa", use_cache=False
        )
        model = transformers.LlamaModel(config)
    model.eval()
    ids, mask = torch.randint(128, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, 16:] = 0
    fn, backend = compiled(lambda: model(ids, attention_mask=mask).last_hidden_state, policy)
    with torch.no_grad():
        expected = model.double()(ids, attention_mask=mask).last_hidden_state
        model.float()
        with torch.autocast("cpu", DTYPES[policy]):
            amp = error(model(ids, attention_mask=mask).last_hidden_state, expected)
        actual = fn()
    assert actual.dtype == torch.float32
    assert error(actual, expected) < min(BOUND[policy], 1.5 * amp)
    kinds = collections.Counter(e.detail.split()[0] for e in backend.of(Rewrite))
    assert kinds["linear"] == (13 if name == "bert" else 14)
    assert kinds["scaled_dot_product_attention"] == 2
    assert kinds["matmul"] == 0
