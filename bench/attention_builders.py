"""More models for `bench_attention.py`: transformers' own from a config, and two that are spelled out as people do."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnicomp.testing.models import Case, Size

SIZES: Final = {
    "gemma2": Size(width=2048, heads=8, layers=4, batch=1, length=8192, vocabulary=32000),
    "bloom": Size(width=2048, heads=32, layers=4, batch=2, length=2048, vocabulary=32000),
    "gpt2": Size(width=1024, heads=16, layers=8, batch=8, length=1024, vocabulary=50257),
    "qwen3": Size(width=2048, heads=16, layers=6, batch=1, length=4096, vocabulary=32000),
    "mistral": Size(width=2048, heads=16, layers=4, batch=1, length=8192, vocabulary=32000),
    "mixtral": Size(width=1024, heads=16, layers=4, batch=1, length=2048, vocabulary=32000),
    "gpt_oss": Size(width=1024, heads=32, layers=4, batch=1, length=4096, vocabulary=32000),
    "modernbert": Size(width=768, heads=12, layers=9, batch=8, length=1024, vocabulary=50368),
    "deberta": Size(width=768, heads=12, layers=6, batch=8, length=512, vocabulary=32000),
    "whisper": Size(width=1024, heads=16, layers=6, batch=4, length=1500, vocabulary=51865),
    "sam": Size(width=768, heads=12, layers=12, batch=2, length=4096, vocabulary=0),
    "swin": Size(width=128, heads=4, layers=24, batch=32, length=3136, vocabulary=0),
    "nanogpt": Size(width=768, heads=12, layers=12, batch=8, length=1024, vocabulary=50304),
    "unet": Size(width=320, heads=8, layers=2, batch=4, length=4096, vocabulary=0),
}
"""On a GPU. Images have as many patches as `length`."""


def hand_written(config: Any) -> Any:
    """The config, with the attention that the model's source spells out."""
    config._attn_implementation = "eager"
    return config


def _case(name: str, model: nn.Module, inputs: dict[str, Tensor], size: Size) -> Case:
    return Case(name=name, model=model, inputs=inputs, sites=size.layers, output=lambda out: out.last_hidden_state)


def _tokens(size: Size) -> dict[str, Tensor]:
    tokens = torch.randint(1, size.vocabulary, (size.batch, size.length))
    return {"input_ids": tokens, "attention_mask": torch.ones(size.batch, size.length, dtype=torch.long)}


def _text(config_name: str, name: str, **of: Callable[[Size], Any]) -> Callable[[Size], Case]:
    """A language model of transformers: what most configs have in common, and what this one has."""

    def make(size: Size) -> Case:
        import transformers

        common = {
            "hidden_size": size.width,
            "num_attention_heads": size.heads,
            "num_hidden_layers": size.layers,
            "intermediate_size": 3 * size.width,
            "vocab_size": size.vocabulary,
            "max_position_embeddings": max(512, size.length),
            "pad_token_id": 0,
        }
        config = getattr(transformers, f"{config_name}Config")(**common | {k: f(size) for k, f in of.items()})
        config.use_cache = False
        return _case(name, getattr(transformers, f"{config_name}Model")(hand_written(config)), _tokens(size), size)

    return make


def _gemma2(size: Size) -> Case:
    return _text(
        "Gemma2",
        "gemma2",
        num_key_value_heads=lambda s: s.heads // 2,
        head_dim=lambda s: s.width // s.heads,
        query_pre_attn_scalar=lambda s: s.width // s.heads,
        intermediate_size=lambda s: 4 * s.width,
        sliding_window=lambda s: s.length // 2,  # every other layer; at the GPU's size it is Gemma 2's own 4096
    )(size)


def _bloom(size: Size) -> Case:
    from transformers import BloomConfig, BloomModel

    config = BloomConfig(
        hidden_size=size.width,
        n_head=size.heads,
        n_layer=size.layers,
        vocab_size=size.vocabulary,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    return _case("bloom", BloomModel(hand_written(config)), _tokens(size), size)


def _gpt2(size: Size) -> Case:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_embd=size.width,
        n_head=size.heads,
        n_layer=size.layers,
        n_positions=max(512, size.length),
        vocab_size=size.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return _case("gpt2", GPT2Model(hand_written(config)), _tokens(size), size)


def _whisper(size: Size) -> Case:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        vocab_size=size.vocabulary,
        max_source_positions=size.length,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    tokens = torch.randint(1, size.vocabulary, (size.batch, min(448, size.length)))
    features = torch.randn(size.batch, config.num_mel_bins, 2 * size.length)
    case = _case("whisper", WhisperModel(hand_written(config)), {}, size)
    return dataclasses.replace(case, inputs={"input_features": features, "decoder_input_ids": tokens})


def _sam(size: Size) -> Case:
    from transformers import SamVisionConfig, SamVisionModel

    side = 16 * math.isqrt(size.length)
    config = SamVisionConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        image_size=side,
        global_attn_indexes=list(range(size.layers // 4 - 1, size.layers, max(1, size.layers // 4))),
    )
    pixels = {"pixel_values": torch.randn(size.batch, 3, side, side)}
    return _case("sam", SamVisionModel(hand_written(config)), pixels, size)


def _swin(size: Size) -> Case:
    from transformers import SwinConfig, SwinModel

    deep = size.layers >= 24  # Swin-B
    side = 224 if deep else 56
    config = SwinConfig(
        embed_dim=size.width,
        depths=[2, 2, 18, 2] if deep else [2, 2],
        num_heads=[size.heads * 2**n for n in range(4 if deep else 2)],
        image_size=side,
        drop_path_rate=0.0,
    )
    pixels = {"pixel_values": torch.randn(size.batch, 3, side, side)}
    return _case("swin", SwinModel(hand_written(config), add_pooling_layer=False), pixels, size)


class _Output:
    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state


class _ByHand(nn.Module):
    """A model whose attention is spelled out, or a call, as transformers' setting says."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = type("Config", (), {"_attn_implementation": "eager"})()

    def set_attn_implementation(self, name: str) -> None:
        """`eager` or `sdpa`; another leaves the setting as it is."""
        if name in ("eager", "sdpa"):
            self.config = type("Config", (), {"_attn_implementation": name})()
            for module in self.modules():
                if hasattr(module, "fused"):
                    module.fused = name == "sdpa"  # type: ignore[assignment]


class _CausalBlock(nn.Module):
    """A block of nanoGPT, whose mask is a buffer of ones."""

    bias: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.fused = size.heads, False
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.register_buffer("bias", torch.tril(torch.ones(size.length, size.length))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        x = x + self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _NanoGPT(_ByHand):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(_CausalBlock(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, input_ids: Tensor) -> _Output:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return _Output(self.norm(self.blocks(self.tokens(input_ids) + self.places(places))))


def _nanogpt(size: Size) -> Case:
    tokens = {"input_ids": torch.randint(1, size.vocabulary, (size.batch, size.length))}
    return _case("nanogpt", _NanoGPT(size), tokens, size)


class _Attention(nn.Module):
    """Attention as diffusers' processor without `scaled_dot_product_attention` computes it."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads, self.fused = heads, False
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        q, k, v = self.q(x), self.k(context), self.v(context)
        if self.fused:
            q, k, v = (t.view(batch, -1, self.heads, size).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
            return self.out(y)
        q, k, v = (
            t.reshape(batch, -1, self.heads, size).permute(0, 2, 1, 3).reshape(batch * self.heads, -1, size)
            for t in (q, k, v)
        )
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=size**-0.5)
        y = torch.bmm(scores.softmax(dim=-1).to(v.dtype), v)
        y = y.reshape(batch, self.heads, length, size).permute(0, 2, 1, 3).reshape(batch, length, width)
        return self.out(y)


class _Transformer(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.group = nn.GroupNorm(min(32, width), width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = _Attention(width, width, heads), _Attention(width, context, heads)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        batch, width, rows, columns = image.shape
        x = self.enter(self.group(image)).permute(0, 2, 3, 1).reshape(batch, rows * columns, width)
        normed = self.norms[0](x)
        x = x + self.own(normed, normed)
        x = x + self.cross(self.norms[1](x), context)
        value, gate = self.up(self.norms[2](x)).chunk(2, dim=-1)
        x = x + self.down(value * F.gelu(gate))
        return image + self.leave(x.reshape(batch, rows, columns, width).permute(0, 3, 1, 2))


class _Residual(nn.Module):
    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(min(32, before), before), nn.GroupNorm(min(32, width), width)
        self.conv1, self.conv2 = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.short = nn.Conv2d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.short(x) + self.conv2(F.silu(self.norm2(y)))


class _UNet(_ByHand):
    """The layers of Stable Diffusion 1.5's UNet, without the embedding of time."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        widths, heads = [size.width * n for n in (1, 2, 4, 4)], size.heads
        self.enter, self.leave = nn.Conv2d(4, widths[0], 3, padding=1), nn.Conv2d(widths[0], 4, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before, skips = widths[0], [widths[0]]
        for level, width in enumerate(widths):
            for _ in range(size.layers):
                attention = _Transformer(width, context, heads) if level < 3 else None
                self.down.append(nn.ModuleList([_Residual(before, width), *([attention] if attention else [])]))
                before = width
                skips.append(width)
            if level < 3:
                self.down.append(nn.ModuleList([nn.Conv2d(width, width, 3, stride=2, padding=1)]))
                skips.append(width)
        self.middle = nn.ModuleList(
            [_Residual(before, before), _Transformer(before, context, heads), _Residual(before, before)]
        )
        for level, width in reversed(list(enumerate(widths))):
            for number in range(size.layers + 1):
                attention = _Transformer(width, context, heads) if level < 3 else None
                block: list[nn.Module] = [_Residual(before + skips.pop(), width), *([attention] if attention else [])]
                if number == size.layers and level:
                    block.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)))
                self.up.append(nn.ModuleList(block))
                before = width

    def forward(self, sample: Tensor, context: Tensor) -> _Output:
        x = self.enter(sample)
        skips = [x]
        for block in self.down:
            x = _through(block, x, context)
            skips.append(x)
        x = _through(self.middle, x, context)
        for block in self.up:
            x = _through(block, torch.cat([x, skips.pop()], 1), context)
        return _Output(self.leave(x))


def _through(block: Any, x: Tensor, context: Tensor) -> Tensor:
    for layer in block:
        x = layer(x, context) if isinstance(layer, _Transformer) else layer(x)
    return x


def _unet(size: Size) -> Case:
    side, context = max(8, math.isqrt(size.length) // 8 * 8), 768
    sample = torch.randn(size.batch, 4, side, side)
    inputs = {"sample": sample, "context": torch.randn(size.batch, 77, context)}
    return _case("unet", _UNet(size, context), inputs, size)


_GROUPED: Final[dict[str, Callable[[Size], Any]]] = {
    "num_key_value_heads": lambda size: max(1, size.heads // 4),
    "head_dim": lambda size: size.width // size.heads,
}
BUILDERS: Final[dict[str, Callable[[Size], Case]]] = {
    "gemma2": _gemma2,
    "bloom": _bloom,
    "gpt2": _gpt2,
    "qwen3": _text("Qwen3", "qwen3", **_GROUPED),
    "mistral": _text("Mistral", "mistral", **_GROUPED, sliding_window=lambda s: s.length // 8),
    "mixtral": _text("Mixtral", "mixtral", **_GROUPED, num_local_experts=lambda s: 4),
    "gpt_oss": _text(
        "GptOss",
        "gpt_oss",
        num_key_value_heads=lambda s: max(1, s.heads // 8),
        head_dim=lambda s: 64 if s.width >= 1024 else 16,
        num_local_experts=lambda s: 4,
        num_experts_per_tok=lambda s: 2,
    ),
    "modernbert": _text("ModernBert", "modernbert", intermediate_size=lambda s: 3 * s.width // 2),
    "deberta": _text(
        "DebertaV2",
        "deberta",
        relative_attention=lambda s: True,
        pos_att_type=lambda s: ["p2c", "c2p"],
        hidden_dropout_prob=lambda s: 0.0,
        attention_probs_dropout_prob=lambda s: 0.0,
        intermediate_size=lambda s: 4 * s.width,
        position_buckets=lambda s: 256,
        share_att_key=lambda s: True,
    ),
    "whisper": _whisper,
    "sam": _sam,
    "swin": _swin,
    "nanogpt": _nanogpt,
    "unet": _unet,
}
"""What `omnicomp.testing.models` does not have, by name."""
