"""Which graphs wait for the host, and what would recording them as CUDA graphs save? For a device with CUDA.

    python bench/bench_launches.py [--only unet one train vit-1] [--json FILE]

For each model: the time of its kernels alone (by torch's profiler), the time that the host takes to launch them, and
the wall time of a call, compiled by omni without recordings, with `cudagraphs="auto"`, the same without its bound on
memory, and by Inductor, also with `mode="reduce-overhead"`; and which parts were recorded or why not, with the memory
that recordings hold.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from attention_builders import SIZES as SIZES_OF_MORE
from attention_models import built
from bench_host import Blocks
from bench_models import GPU_SIZES
from harness import add_common_arguments, interleave, kernel_seconds, machine, markdown_table, wait_for_turn
from torch import nn

import omnicomp
from omnicomp.audit.views.rows import recording_line
from omnicomp.testing.models import Case
from omnicomp.timeline import CudaGraph


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...], bool]:
    """Blocks of a UNet, inference."""
    model = Blocks(24, 320).cuda().half()
    return model, (torch.randn(4, 320, 32, 32).cuda().half(), torch.randn(4, 320).cuda().half()), False


def layers(*, training: bool, batch: int, tokens: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], bool]:
    """Twelve layers of an encoder."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().bfloat16()
    return model.train(training), (torch.randn(batch, tokens, 768).cuda().bfloat16(),), training


class Published(nn.Module):
    """A model of transformers that takes its inputs by place, and returns one tensor."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.names, self.output = case.model, [*case.inputs], case.output

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The output of the case."""
        return self.output(self.model(**dict(zip(self.names, inputs, strict=True))))


def published(
    name: str, *, batch: int, training: bool = False, **sizes: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...], bool]:
    """A model of `bench_attention.py` in bfloat16, for a batch of its own."""
    size = dataclasses.replace({**GPU_SIZES, **SIZES_OF_MORE}[name], batch=batch, **sizes)
    case = built(name, size, "cuda").to("cuda", torch.bfloat16)
    return Published(case).train(training), tuple(case.inputs.values()), training


BERT_BASE: Final = {"width": 768, "heads": 12, "length": 128}

MODELS: Final[dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...], bool]]]] = {
    "unet": unet,
    "one": lambda: layers(training=False, batch=1, tokens=128),
    "large": lambda: layers(training=False, batch=32, tokens=512),
    "train": lambda: layers(training=True, batch=4, tokens=128),
    "swin-1": lambda: published("swin", batch=1),
    "swin-8": lambda: published("swin", batch=8),
    "vit-1": lambda: published("vit", batch=1),
    "vit-8": lambda: published("vit", batch=8),
    "bert-train": lambda: published("bert", batch=4, training=True, **BERT_BASE),
}


def caller(name: str, **options: Any) -> Callable[[], Any]:
    """A warm call, or training step."""
    torch.manual_seed(0)
    model, inputs, training = MODELS[name]()
    compiled = torch.compile(model, **options)

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        if not training:
            with torch.no_grad():
                return compiled(*inputs)
        compiled(*inputs).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        return None

    for _ in range(30):
        step()
    torch.cuda.synchronize()
    return step


def host_seconds(call: Callable[[], Any]) -> float:
    """Seconds until a call returns, with the device idle before: the median of nine."""
    found: list[float] = []
    for _ in range(9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return sorted(found)[4]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One row."""
    torch._dynamo.reset()
    omnicomp.timeline.clear()
    plain = caller(name, backend="omni", options={"cudagraphs": "never"})
    auto = caller(name, backend="omni", options={"cudagraphs": "auto"})
    told = [event for event in omnicomp.timeline.events() if isinstance(event, CudaGraph)]
    free = caller(name, backend="omni", options={"cudagraphs": "auto", "cudagraphs_bytes": 2**34})
    rivals = {"inductor": caller(name), "reduce-overhead": caller(name, mode="reduce-overhead")}
    wait_for_turn("cuda")
    candidates = {"omni": plain, "auto": auto, "auto, 16 GB": free, **rivals}
    wall = interleave(candidates, rounds=rounds, seconds=0.2, device="cuda")
    return {
        "model": name,
        "kernels": kernel_seconds(plain) * 1e3,
        "host": host_seconds(plain) * 1e3,
        "host, auto": host_seconds(auto) * 1e3,
        "host, auto, 16 GB": host_seconds(free) * 1e3,
        **{each: time.median * 1e3 for each, time in wall.items()},
        "recorded": "; ".join(f"{event.part}: {recording_line(event)}" for event in told),
        "MB held": max((event.bytes for event in told), default=0) / 1e6,
    }


def main() -> None:
    """Run as the docstring of the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device != "cuda":
        raise SystemExit("launches are those of CUDA: there is no such device here")
    rows = [measure(name, arguments.rounds or (3 if arguments.quick else 7)) for name in arguments.only]
    print(machine("cuda"))
    cells = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print(markdown_table([*rows[0]], cells))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
