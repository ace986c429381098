"""Which graphs wait for the host, and what would recording them as CUDA graphs save? For a device with CUDA.

    python bench/bench_launches.py [--only unet one train] [--json FILE]

For each model: the time of its kernels alone (by torch's profiler), the time that the host takes to
launch them, and the wall time of a call, compiled by omni plainly and by Inductor with `mode="reduce-overhead"`; and
whether the rule of docs/adr/0023-cuda-graphs-by-themselves.md would record it. Then, whether an output of a recorded
call can be kept: its storage is resized to nothing and back before the next call, and must hold its values after it.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from bench_host import Blocks
from harness import add_common_arguments, interleave, kernel_seconds, machine, markdown_table, wait_for_turn
from torch import nn

# The rule: the host takes longer than the kernels by this part of their time, and by these seconds.
_LONGER: Final = 0.1
_SECONDS: Final = 20e-6


def unet() -> tuple[nn.Module, tuple[torch.Tensor, ...], bool]:
    """Blocks of a UNet, inference."""
    model = Blocks(24, 320).cuda().half()
    return model, (torch.randn(4, 320, 32, 32).cuda().half(), torch.randn(4, 320).cuda().half()), False


def layers(*, training: bool, batch: int, tokens: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], bool]:
    """Twelve layers of an encoder."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().bfloat16()
    return model.train(training), (torch.randn(batch, tokens, 768).cuda().bfloat16(),), training


MODELS: Final[dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...], bool]]]] = {
    "unet": unet,
    "one": lambda: layers(training=False, batch=1, tokens=128),
    "large": lambda: layers(training=False, batch=32, tokens=512),
    "train": lambda: layers(training=True, batch=4, tokens=128),
}


def caller(name: str, **options: Any) -> Callable[[], Any]:
    """A warm call, or training step."""
    torch._dynamo.reset()
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

    for _ in range(5):
        step()
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
    plain, recorded = caller(name, backend="omni"), caller(name, mode="reduce-overhead")
    wait_for_turn("cuda")
    wall = interleave({"omni": plain, "recorded": recorded}, rounds=rounds, seconds=0.2, device="cuda")
    kernels = kernel_seconds(plain)
    host = host_seconds(plain)
    return {
        "model": name,
        "kernels": kernels * 1e3,
        "host": host * 1e3,
        "omni": wall["omni"].median * 1e3,
        "recorded": wall["recorded"].median * 1e3,
        "would record": host > kernels * (1 + _LONGER) and host > kernels + _SECONDS,
    }


def keeps() -> str:
    """Whether an output of a recorded call survives the next call in memory of its own."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x.sin() * 2, x.cos()), mode="reduce-overhead")
    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            first, second = compiled(x)
        view, expected = first[10:20], x.sin() * 2
        storage = first.untyped_storage()
        size, held = storage.nbytes(), storage.clone()
        address = storage.data_ptr()
        storage.resize_(0)
        storage.resize_(size)
        storage.copy_(held)
        torch.compiler.cudagraph_mark_step_begin()
        other = compiled(y)[0]
        torch.cuda.synchronize()
        right = torch.equal(first, expected) and torch.equal(view, expected[10:20])
        right &= torch.allclose(other, y.sin() * 2)
    moved = storage.data_ptr() != address
    del second
    return f"moved: {moved}; the kept output, its view and the next call's are right: {right}"


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
    try:
        kept = keeps()
    except RuntimeError as error:
        kept = f"raised: {str(error).splitlines()[0]}"
    print(f"keeping an output by its storage: {kept}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "keeps": kept}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
