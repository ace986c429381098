"""Compile a Llama whose attention is written by hand, compare omni with Inductor, and print the audit.

    python examples/llama.py [--audit audit.html]

The model is transformers' own, with random weights from a small config and `attn_implementation="eager"`: scores,
scale, mask, softmax and the product with the values, as its source spells them. omni recognises that as attention;
Inductor compiles it as it stands.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import omnicomp


def build(device: str) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """A small Llama with grouped heads, and a batch with a padding mask."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=4,
        intermediate_size=1024,
        vocab_size=2048,
        use_cache=False,
        attn_implementation="eager",
    )
    tokens = torch.randint(1, config.vocab_size, (1, 2048), device=device)
    mask = torch.ones_like(tokens)
    mask[0, -256:] = 0
    return LlamaForCausalLM(config).eval().to(device), {"input_ids": tokens, "attention_mask": mask}


def interleaved(candidates: dict[str, Callable[[], object]], device: str, rounds: int = 9) -> dict[str, list[float]]:
    """Seconds a call, candidates in turn, so that a noisy machine meets all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Compile, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audit", default="audit.html", help="where to write the audit as HTML")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(width=120)

    model, batch = build(device)
    candidates: dict[str, Callable[[], torch.Tensor]] = {}
    with torch.no_grad():
        expected = model(**batch).logits
        for backend in ("inductor", "omni"):
            console.print(f"compiling with backend={backend!r} ...", highlight=False)
            start = time.perf_counter()
            compiled = torch.compile(model, backend=backend)
            try:
                error = (compiled(**batch).logits - expected).abs().max().item()
            except torch._dynamo.exc.BackendCompilerFailed as failure:
                # Without a C++ compiler Inductor can't build anything; omni runs all the same, and its audit says how.
                console.print(f"  failed: {str(failure).splitlines()[0]}", highlight=False, markup=False)
                continue
            console.print(
                f"  {time.perf_counter() - start:.0f} s, largest difference from eager {error:.1e}", highlight=False
            )
            candidates[backend] = lambda compiled=compiled: compiled(**batch).logits
        seconds = interleaved(candidates, device)
    if "inductor" in seconds:
        compare(console, seconds, device)

    audit = omnicomp.audit()
    console.print(audit)
    path = Path(arguments.audit)
    path.write_text(audit.to_html(), encoding="utf-8")
    console.print(f"\nthe same as a page: {path}", highlight=False)


def compare(console: Console, seconds: dict[str, list[float]], device: str) -> None:
    """Print medians, and the median of the ratios of each round."""
    ratio = statistics.median(a / b for a, b in zip(seconds["inductor"], seconds["omni"], strict=True))
    milliseconds = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    console.print(
        f"one forward on {device}: Inductor {milliseconds['inductor']:.0f} ms, omni {milliseconds['omni']:.0f} ms: "
        f"omni is {ratio:.2f} times as fast (median of {len(seconds['omni'])} interleaved rounds)\n",
        highlight=False,
    )


if __name__ == "__main__":
    main()
