"""Real models from transformers, with random weights from a config and attention as the model's source spells it.

They have the hand-written attention of users' own models, which a compiler has to recognise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

__all__ = ["MODELS", "SIZES", "Case", "Size", "build"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How large to build a model.

    Attributes:
        width: hidden size.
        heads: attention heads; grouped models have a quarter as many key/value heads, at least one.
        layers: number of blocks.
        batch: sequences or images in a batch.
        length: tokens in a sequence; images have as many patches, nearly.
        vocabulary: number of tokens known.
    """

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
    """A model with inputs.

    Attributes:
        name: a key of `MODELS`.
        model: the module, in evaluation mode, dropout 0.
        inputs: keyword arguments of its forward.
        sites: number of hand-written attention sites in one forward.
        output: picks the tensor to compare from what the model returns.
    """

    name: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    sites: int
    output: Callable[[Any], torch.Tensor]

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


def _bert(size: Size) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        intermediate_size=4 * size.width,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(512, size.length),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    inputs = {"input_ids": _tokens(size), "attention_mask": _padding(size)}
    model = BertModel(_as_written(config), add_pooling_layer=False)
    return Case(name="bert", model=model, inputs=inputs, sites=size.layers, output=_last_hidden_state)


def _llama(size: Size) -> Case:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 4),
        num_hidden_layers=size.layers,
        intermediate_size=3 * size.width,
        vocab_size=size.vocabulary,
        max_position_embeddings=max(512, size.length),
        use_cache=False,
    )
    inputs = {"input_ids": _tokens(size), "attention_mask": _padding(size)}
    return Case(
        name="llama", model=LlamaModel(_as_written(config)), inputs=inputs, sites=size.layers, output=_last_hidden_state
    )


def _vit(size: Size) -> Case:
    from transformers import ViTConfig, ViTModel

    side = int(size.length**0.5) * 8
    config = ViTConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_hidden_layers=size.layers,
        intermediate_size=4 * size.width,
        image_size=side,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
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


MODELS: Final[dict[str, Callable[[Size], Case]]] = {
    "bert": _bert,
    "llama": _llama,
    "vit": _vit,
    "t5": _t5,
    "resnet": _resnet,
}
