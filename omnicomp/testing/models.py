"""The UNet of a diffusion model from text to images, with the blocks that diffusers' `UNet2DConditionModel` has.

Residual blocks with the time step, transformers with self-attention and attention to the text, down- and upsampling
with skipped connections. Attention is spelled by hand, as in diffusers' `AttnProcessor`. It is written out so that
nothing else has to be installed: diffusers wants Pillow, requests and importlib_metadata to be imported at all.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Predicts the noise in latent images: a level with attention, one below it, and back."""

    def __init__(self, *, width: int, heads: int, layers: int, text: int, channels: int = 4) -> None:
        """Random weights."""
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList([_Block(width, width, time, heads, text) for _ in range(layers)])
        self.smaller = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = _Block(2 * width, 2 * width, time, heads, text)
        self.larger = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = nn.ModuleList([_Block(2 * width, width, time, heads, text) for _ in range(layers)])
        self.last = nn.Sequential(_norm(width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        """The noise."""
        time = self.time(_sinusoids(timestep, self.width).to(sample.dtype))
        x = self.first(sample)
        skipped: list[Tensor] = []
        for block in self.down:
            x = block(x, time, encoder_hidden_states)
            skipped.append(x)
        x = self.middle(self.smaller(x), time, encoder_hidden_states)
        x = self.larger(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        for block in self.up:
            x = block(torch.cat([x, skipped.pop()], dim=1), time, encoder_hidden_states)
        return self.last(x)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels, eps=1e-5)


def _sinusoids(timestep: Tensor, width: int) -> Tensor:
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=timestep.device, dtype=torch.float32) / half)
    angles = timestep[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, time: int, heads: int, text: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = _norm(out), nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()
        self.norm, self.into, self.back = _norm(out), nn.Conv2d(out, out, 1), nn.Conv2d(out, out, 1)
        self.normed = nn.ModuleList([nn.LayerNorm(out) for _ in range(3)])
        self.itself, self.to_text = _Attention(out, out, heads), _Attention(out, text, heads)
        self.gated, self.narrow = nn.Linear(out, 8 * out), nn.Linear(4 * out, out)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        x = self.short(x) + self.conv2(F.silu(self.norm2(h)))
        batch, channels, height, width = x.shape
        h = self.into(self.norm(x)).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        h = h + self.itself(self.normed[0](h), None)
        h = h + self.to_text(self.normed[1](h), text)
        value, gate = self.gated(self.normed[2](h)).chunk(2, dim=-1)
        h = h + self.narrow(value * F.gelu(gate))
        return x + self.back(h.reshape(batch, height, width, channels).permute(0, 3, 1, 2))


class _Attention(nn.Module):
    def __init__(self, width: int, source: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v = (nn.Linear(size, width, bias=False) for size in (width, source, source))
        self.out = nn.Linear(width, width)

    def _split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)
        return x.reshape(batch * self.heads, length, width // self.heads)

    def forward(self, x: Tensor, source: Tensor | None) -> Tensor:
        source = x if source is None else source
        q, k, v = self._split(self.q(x)), self._split(self.k(source)), self._split(self.v(source))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=self.scale)
        found = torch.bmm(scores.softmax(dim=-1), v)
        batch, length, width = x.shape
        found = found.reshape(batch, self.heads, length, width // self.heads).permute(0, 2, 1, 3)
        return self.out(found.reshape(batch, length, width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large to build a model."""

    width: int
    heads: int
    layers: int
    batch: int
    length: int
    vocabulary: int


SIZES: Final[dict[str, Size]] = {
    "tiny": Size(width=64, heads=4, layers=2, batch=2, length=32, vocabulary=256),
    "cpu": Size(width=512, heads=8, layers=4, batch=1, length=512, vocabulary=1024),
    "gpu": Size(width=2048, heads=32, layers=8, batch=2, length=2048, vocabulary=32000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model with inputs."""

    name: str  # a key of `MODELS`
    model: nn.Module  # the module, in evaluation mode, dropout 0
    inputs: dict[str, torch.Tensor]  # keyword arguments of its forward
    sites: int  # number of hand-written attention sites in one forward
    output: Callable[[Any], torch.Tensor]  # picks the tensor to compare from what the model returns

    def to(self, device: str, dtype: torch.dtype) -> "Case":
        """The case on a device, with floating-point weights and inputs in a dtype."""
        moved = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in self.inputs.items()}
        return dataclasses.replace(self, model=self.model.to(device, dtype), inputs=moved)


def build(name: str, size: str = "tiny", seed: int = 0) -> Case:
    """Build a model on the CPU in float32.

    Args:
        name: a key of `MODELS`.
        size: a key of `SIZES`.
        seed: of the random weights and inputs.

    Raises:
        ImportError: transformers is not installed; the extra `bench` has it.
        KeyError: the name or size is unknown.
    """
    torch.manual_seed(seed)
    case = MODELS[name](SIZES[size])
    return dataclasses.replace(case, model=case.model.eval())


def _tokens(size: Size) -> torch.Tensor:
    return torch.randint(1, size.vocabulary, (size.batch, size.length))


def _padding(size: Size) -> torch.Tensor:
    """Ones, with the last quarter of the first sequence padded."""
    mask = torch.ones(size.batch, size.length, dtype=torch.long)
    mask[0, -(size.length // 4) :] = 0
    return mask


def _as_written(config: Any) -> Any:
    """Make transformers run the attention that its modeling files spell out, instead of one of its fused ones."""
    config._attn_implementation = "eager"
    return config


def _last_hidden_state(output: Any) -> torch.Tensor:
    return output.last_hidden_state


def _layers(size: Size) -> dict[str, Any]:
    """What the configurations of transformers have in common."""
    return {"hidden_size": size.width, "num_attention_heads": size.heads, "num_hidden_layers": size.layers}


def _text(size: Size) -> dict[str, Any]:
    return {"vocab_size": size.vocabulary, "max_position_embeddings": max(512, size.length)}


_NO_DROPOUT: Final[dict[str, Any]] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(size: Size) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_layers(size), **_text(size), **_NO_DROPOUT, intermediate_size=4 * size.width)
    inputs = {"input_ids": _tokens(size), "attention_mask": _padding(size)}
    model = BertModel(_as_written(config), add_pooling_layer=False)
    return Case(name="bert", model=model, inputs=inputs, sites=size.layers, output=_last_hidden_state)


def _llama(size: Size) -> Case:
    from transformers import LlamaConfig, LlamaModel

    heads = max(1, size.heads // 4)
    config = LlamaConfig(
        **_layers(size), **_text(size), num_key_value_heads=heads, intermediate_size=3 * size.width, use_cache=False
    )
    inputs = {"input_ids": _tokens(size), "attention_mask": _padding(size)}
    return Case(
        name="llama", model=LlamaModel(_as_written(config)), inputs=inputs, sites=size.layers, output=_last_hidden_state
    )


def _vit(size: Size) -> Case:
    from transformers import ViTConfig, ViTModel

    side = int(size.length**0.5) * 8
    config = ViTConfig(**_layers(size), **_NO_DROPOUT, intermediate_size=4 * size.width, image_size=side, patch_size=8)
    inputs = {"pixel_values": torch.randn(size.batch, 3, side, side)}
    model = ViTModel(_as_written(config), add_pooling_layer=False)
    return Case(name="vit", model=model, inputs=inputs, sites=size.layers, output=_last_hidden_state)


def _t5(size: Size) -> Case:
    from transformers import T5Config, T5Model

    config = T5Config(
        d_model=size.width,
        d_kv=size.width // size.heads,
        num_heads=size.heads,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        d_ff=4 * size.width,
        vocab_size=size.vocabulary,
        dropout_rate=0.0,
        use_cache=False,
    )
    inputs = {
        "input_ids": _tokens(size),
        "attention_mask": _padding(size),
        "decoder_input_ids": _tokens(size)[:, : size.length // 2].contiguous(),
    }
    # The encoder's self-attention, and the decoder's self- and cross-attention.
    return Case(
        name="t5", model=T5Model(_as_written(config)), inputs=inputs, sites=3 * size.layers, output=_last_hidden_state
    )


def _resnet(size: Size) -> Case:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(
        embedding_size=max(16, size.width // 8),
        hidden_sizes=[max(16, size.width // 4), max(32, size.width // 2)],
        depths=[size.layers, size.layers],
        layer_type="basic",
    )
    inputs = {"pixel_values": torch.randn(size.batch, 3, 64, 64)}
    return Case(name="resnet", model=ResNetModel(config), inputs=inputs, sites=0, output=_last_hidden_state)


def _unet(size: Size) -> Case:
    text, side = 3 * size.width // 4, max(16, math.isqrt(size.length))
    inputs = {
        "sample": torch.randn(size.batch, 4, side, side),
        "timestep": torch.randint(0, 1000, (size.batch,)),
        "encoder_hidden_states": torch.randn(size.batch, 77, text),
    }
    model = UNet(width=size.width, heads=size.heads, layers=size.layers, text=text)
    # Self-attention and attention to the text, in each block on both ways and in the middle one.
    return Case(name="unet", model=model, inputs=inputs, sites=2 * (2 * size.layers + 1), output=lambda noise: noise)


MODELS: Final[dict[str, Callable[[Size], Case]]] = {
    "bert": _bert,
    "llama": _llama,
    "vit": _vit,
    "t5": _t5,
    "resnet": _resnet,
    "unet": _unet,
}
