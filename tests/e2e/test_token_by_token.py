"""`generate` with a static cache, and a loop that takes noise away, have eager's values and no new graphs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omnicomp


def graphs() -> int:
    return len(omnicomp.audit().graphs)


@pytest.mark.model
@pytest.mark.parametrize("spelling", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_tokens_of_generate_are_eagers_and_none_compiles_anew(spelling: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation=spelling,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(97, (2, 6))

    def generate(count: int) -> Tensor:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,  # what transformers would compile by itself
        )

    expected = generate(64)
    model.forward = torch.compile(model.forward, backend="omni", options={"lowerings": ["eager"]})
    assert torch.equal(generate(64), expected)
    compiled = graphs()
    assert compiled <= 4  # of the prompt and of a token
    assert torch.equal(generate(64), expected)
    assert graphs() == compiled


class Denoiser(nn.Module):
    """Predicts noise from an image, a time and a text, as the UNets of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.time, self.norm = nn.Linear(8, 16), nn.GroupNorm(4, 16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(12, 16), nn.Linear(12, 16)
        self.register_buffer("frequencies", torch.logspace(0, -3, 4))

    def forward(self, image: Tensor, time: Tensor, text: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        hidden = self.enter(image) + self.time(torch.cat((angles.sin(), angles.cos()), 1))[:, :, None, None]
        hidden = nn.functional.silu(self.norm(hidden))
        tokens = hidden.flatten(2).transpose(1, 2)
        scores = self.query(tokens) @ self.key(text).transpose(1, 2) * 0.25
        tokens = tokens + scores.softmax(-1) @ self.value(text)
        return self.leave(tokens.transpose(1, 2).unflatten(2, hidden.shape[2:]))


def test_images_of_a_denoising_loop_are_eagers_and_no_step_compiles_anew() -> None:
    torch.manual_seed(0)
    model = Denoiser().eval()
    noise, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    kept = torch.linspace(0.999, 0.01, 1000).cumprod(0)

    def denoise(predict: Any) -> Tensor:
        image = noise
        with torch.no_grad():
            for time in torch.linspace(999, 0, 10).long():
                predicted = predict(image, time.expand(2), text)
                clean = (image - (1 - kept[time]).sqrt() * predicted) / (kept[time].sqrt() + 1e-3)
                clean, before = clean.clamp(-1, 1), kept[(time - 111).clamp(min=0)]
                image = before.sqrt() * clean + (1 - before).sqrt() * predicted
        return image

    expected = denoise(model)
    compiled = torch.compile(model, backend="omni", options={"lowerings": ["eager"]})
    torch.testing.assert_close(denoise(compiled), expected)
    assert graphs() == 1
