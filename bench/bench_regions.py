"""Which regions of real models are built once, are the values those of the whole build, and at what speed?

    python bench/bench_regions.py [--quick] [--models llama vit] [--build] [--training] [--json FILE]
    LAYERS=8 WIDTH=1024 HEADS=16 TOKENS=512 DTYPE=bfloat16 python bench/bench_regions.py --device cuda --build

The models are those of transformers, timm and diffusers by their configurations, shrunk, with random weights; what is
not installed is left out, and said. Without `--build`, Inductor's code generation is replaced by the graph that it
would get, so that structure and values of many models take seconds: values are compared with those of
`regions="never"`, which have to be equal in every bit. With it, both are built by Inductor, and their calls take turns:
`speed` is the time of `never` over that of `always`, and `compile` the time of the first call with `always` over that
with `never`, behind a small function whose build pays what a process pays once.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from harness import add_common_arguments, interleave, machine, markdown_table, wait_for_turn
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves

import omnicomp
from omnicomp._torch.fx import copy_module
from omnicomp._torch.inductor import compile_fx
from omnicomp.timeline.events import Retreat

LAYERS: Final = int(os.environ.get("LAYERS", "6"))
WIDTH: Final = int(os.environ.get("WIDTH", "64"))
TOKENS: Final = int(os.environ.get("TOKENS", "32"))
HEADS: Final = int(os.environ.get("HEADS", "4"))
DTYPE: Final = getattr(torch, os.environ.get("DTYPE", "float32"))

_SMALL: Final[dict[str, Any]] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 2 * WIDTH,
    "vocab_size": 256,
    "max_position_embeddings": 4 * TOKENS,
}
_DECODER: Final[dict[str, Any]] = {
    **_SMALL,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH // HEADS,
    "pad_token_id": 0,
}
SIDE: Final = int(os.environ.get("SIDE", "32"))
_IMAGE: Final[dict[str, Any]] = {**_SMALL, "image_size": SIDE, "patch_size": 8}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with inputs, made when it is its turn."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def _tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(1, 256, (2, TOKENS))}


def _both() -> dict[str, Any]:
    return {**_tokens(), "decoder_input_ids": torch.randint(1, 256, (2, TOKENS // 2))}


def _pixels(side: int = SIDE) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, side, side)}


def _transformers(kind: str, inputs: Callable[[], dict[str, Any]], config: dict[str, Any]) -> Model:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModel

        made = AutoConfig.for_model(kind, **config)
        for name in ("use_cache", "layerdrop", "mask_time_prob", "apply_spec_augment"):
            if hasattr(made, name):
                setattr(made, name, type(getattr(made, name))(0))
        return AutoModel.from_config(made)

    return Model(make, inputs)


def _timm(name: str, side: int = 64, **options: Any) -> Model:
    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=10, **options)

    return Model(make, lambda: {"x": torch.randn(2, 3, side, side)})


def _diffusers(name: str, inputs: Callable[[], dict[str, Any]], **config: Any) -> Model:
    def make() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**config)

    return Model(make, inputs)


def _noise(channels: int, text: int, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "hidden_states": torch.randn(1, channels, 16, 16),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": torch.randn(1, 8, text),
        "return_dict": False,
        **{name: torch.randn(size) for name, size in more.items()},
    }


MODELS: Final[dict[str, Model]] = {
    **{
        kind: _transformers(kind, _tokens, _DECODER)
        for kind in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma2",
            "gemma3_text",
            "phi3",
            "olmo2",
            "granite",
            "gpt_neox",
        )
    },
    "gpt_neox": _transformers("gpt_neox", _tokens, _SMALL),
    "gpt2": _transformers(
        "gpt2",
        _tokens,
        {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 4 * TOKENS, "vocab_size": 256},
    ),
    "opt": _transformers("opt", _tokens, {**_SMALL, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": _transformers(
        "bloom", _tokens, {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": 256}
    ),
    "mamba": _transformers("mamba", _tokens, {**_SMALL, "state_size": 8}),
    **{kind: _transformers(kind, _tokens, _SMALL) for kind in ("bert", "roberta", "electra", "albert", "deberta-v2")},
    "distilbert": _transformers(
        "distilbert",
        _tokens,
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 2 * WIDTH, "vocab_size": 256},
    ),
    "t5": _transformers(
        "t5",
        _both,
        {
            "d_model": WIDTH,
            "d_kv": WIDTH // HEADS,
            "d_ff": 2 * WIDTH,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "vocab_size": 256,
        },
    ),
    "bart": _transformers(
        "bart",
        _both,
        {
            "d_model": WIDTH,
            "vocab_size": 256,
            "max_position_embeddings": 4 * TOKENS,
            **{
                f"{side}_{name}": value
                for side in ("encoder", "decoder")
                for name, value in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}.items()
            },
        },
    ),
    "vit": _transformers("vit", _pixels(), _IMAGE),
    "dinov2": _transformers("dinov2", _pixels(), _IMAGE),
    "siglip_vision_model": _transformers("siglip_vision_model", _pixels(), _IMAGE),
    "swin": _transformers(
        "swin",
        _pixels(64),
        {"image_size": 64, "embed_dim": 16, "depths": [2, 2, 6], "num_heads": [2, 2, 4], "window_size": 4},
    ),
    "convnext": _transformers("convnext", _pixels(64), {"depths": [2, 2, 6, 2], "hidden_sizes": [8, 16, 32, 64]}),
    "timm resnet50": _timm("resnet50"),
    "timm efficientnet_b0": _timm("efficientnet_b0"),
    "timm mixer_s32_224": _timm("mixer_s32_224", 224),
    "timm vit_tiny": _timm("vit_tiny_patch16_224", 64, img_size=64),
    "timm convnext_atto": _timm("convnext_atto"),
    "diffusers UNet2DCondition": _diffusers(
        "UNet2DConditionModel",
        lambda: {
            "sample": torch.randn(1, 4, 16, 16),
            "timestep": 10,
            "encoder_hidden_states": torch.randn(1, 8, 32),
            "return_dict": False,
        },
        block_out_channels=(32, 64),
        layers_per_block=3,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    ),
    "diffusers SD3Transformer2D": _diffusers(
        "SD3Transformer2DModel",
        _noise(4, 32, pooled_projections=(1, 64)),
        sample_size=16,
        in_channels=4,
        num_layers=LAYERS,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
    ),
    "diffusers PixArtTransformer2D": _diffusers(
        "PixArtTransformer2DModel",
        _noise(4, 32),
        sample_size=16,
        num_layers=LAYERS,
        attention_head_dim=16,
        num_attention_heads=4,
        cross_attention_dim=64,
        caption_channels=32,
        use_additional_conditions=False,
    ),
}


def _interpreted(module: Any, inputs: Any, *_: Any, **more: Any) -> Any:
    """In place of Inductor: the graph that it would have got."""
    graph = copy_module(module)

    def call(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return graph(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextlib.contextmanager
def _generating(build: bool) -> Generator[None]:
    if build:
        yield
    else:
        with mock.patch.object(compile_fx, "compile_part", _interpreted):
            yield


@dataclasses.dataclass
class Side:
    """One of the two: its call, its values, and what the audit says."""

    call: Callable[[], Any]
    values: list[torch.Tensor]
    first: float
    repeats: dict[str, int]
    left: list[str]


def side(model: nn.Module, inputs: dict[str, Any], regions: str, arguments: argparse.Namespace) -> Side:
    """Compile a model, and call it once."""
    omnicomp.timeline.clear()
    compiled = torch.compile(model, backend="omni", options={"regions": regions})

    def call() -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.set_grad_enabled(arguments.training):
            results = [v for v in tree_leaves(compiled(**inputs)) if isinstance(v, torch.Tensor)]
        if not arguments.training:
            return results
        model.zero_grad(set_to_none=True)
        sum(v.float().square().mean() for v in results if v.requires_grad).backward()  # type: ignore[union-attr]
        return [v.detach() for v in results] + [p.grad for p in model.parameters() if p.grad is not None]

    start = time.perf_counter()
    values = call()
    first = time.perf_counter() - start
    rows = [row for graph in omnicomp.audit().graphs for row in graph.subgraphs]
    repeats = {f"{row.part} {where}": count for row in rows for where, count in row.repeats.items()}
    left = list(dict.fromkeys(row.left_whole.sentence for row in rows if row.left_whole is not None))
    if failed := [event for event in omnicomp.timeline.events() if isinstance(event, Retreat)]:
        raise RuntimeError(f"not built as a whole: {failed[0].reason.sentence}")
    return Side(call, values, first, repeats, left)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is found in one model."""
    torch.compiler.reset()  # once: behind another one the first side would be compiled again while it is timed
    torch.manual_seed(0)
    item = MODELS[name]
    model, inputs = item.make().to(arguments.device, DTYPE), item.inputs()
    model.train(arguments.training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    tensors = {key: v.to(arguments.device) for key, v in inputs.items() if isinstance(v, torch.Tensor)}
    inputs |= {key: v.to(DTYPE) if v.is_floating_point() else v for key, v in tensors.items()}
    with _generating(arguments.build):
        sides: dict[str, Side] = {}
        for regions in ("never", "always"):
            with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder):
                sides[regions] = side(model, inputs, regions, arguments)
        never, always = sides["never"], sides["always"]
        pairs = list(zip(always.values, never.values, strict=True))
        found: dict[str, Any] = {
            "model": name,
            "repeats": always.repeats,
            "left": always.left,
            "equal": all(torch.equal(a, b) for a, b in pairs),
            "error": max(float((a.double() - b.double()).norm() / (b.double().norm() + 1e-30)) for a, b in pairs),
        }
        if arguments.build:
            rounds = arguments.rounds or (5 if arguments.quick else 15)
            for _ in range(30 if arguments.device == "cuda" else 0):  # until CUDA graphs are recorded
                for each in sides.values():
                    each.call()
            wait_for_turn(arguments.device)
            times = interleave(
                {regions: each.call for regions, each in sides.items()},
                rounds=rounds,
                seconds=0.2,
                device=arguments.device,
            )
            found["speed"] = times["never"].ratio_to(times["always"])
            found["compile"] = always.first / never.first
            found["never"] = times["never"].median
    return found


def _row(found: dict[str, Any]) -> list[str]:
    if "failed" in found:
        return [found["model"], found["failed"], "", "", "", ""]
    regions = "; ".join(f"{where.replace('|', ' ')} x {count}" for where, count in found["repeats"].items())
    return [
        found["model"],
        regions or "; ".join(found["left"]) or "none, and too small to tell",
        "equal" if found["equal"] else f"{found['error']:.1e}",
        f"{found['speed']:.2f}" if "speed" in found else "",
        f"{found['compile']:.2f}" if "compile" in found else "",
        f"{1e3 * found['never']:.2f}" if "never" in found else "",
    ]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=None)
    parser.add_argument("--build", action="store_true", help="build by Inductor, and time")
    parser.add_argument("--training", action="store_true", help="a forward and a backward")
    parser.add_argument("--json", metavar="FILE", help="write every measurement to a file")
    arguments = parser.parse_args()
    names = arguments.models or list(MODELS)[: 3 if arguments.quick else None]
    start, rows = time.perf_counter(), []
    print(f"{machine(arguments.device)}, {'training step' if arguments.training else 'inference'}", flush=True)
    if arguments.build:
        with torch.no_grad():
            torch.compile(torch.sin, backend="omni")(torch.ones(64, 64, device=arguments.device))
    for name in names:
        try:
            rows.append(measure(name, arguments))
        except Exception as error:
            rows.append({"model": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"})
        gc.collect()
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(rows, indent=1))
        print(json.dumps(rows[-1]), flush=True)
    header = ["model", "regions", "values", "speed", "compile", "`never` ms"]
    print(markdown_table(header, [_row(found) for found in rows]))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
