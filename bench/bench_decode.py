"""How near to the memory's speed is one token? Llama-like models on transformers' StaticCache, greedy.

    python bench/bench_decode.py [--size 1b] [--batch 1] [--context 1024] [--spelling sdpa] [--generate] [--json FILE]

Eager, Inductor and omni, both also with `mode="reduce-overhead"` on CUDA, take turns in generating `--tokens` tokens,
each from its own cache, which is set back before a turn. A token's time is wall time on CUDA, and the thread's CPU time
with one thread on the CPU, which other processes do not disturb. The limit is the time in which the device copies as
many bytes as a token has to read: all weights but the table of embeddings, and the keys and values that are filled;
the bandwidth of a copy is measured, and counts what is read and what is written. `kernels` is the time of a token's
kernels alone, by torch's profiler. Each candidate's tokens have to be eager's in float32 (`--check`); `--exact` tells
the largest error of a step's logits, against float64. `--generate` runs transformers' `generate` with a static cache,
and compares its tokens and time.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from harness import add_common_arguments, kernel_seconds, machine, markdown_table, wait_for_turn

SIZES: Final[dict[str, dict[str, int]]] = {
    "tiny": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1376, "vocab_size": 4096},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 16, "intermediate_size": 14336, "vocab_size": 32000},
}
HEADS: Final = {"tiny": (8, 4), "1b": (32, 8), "8b": (32, 8)}


def build(arguments: argparse.Namespace) -> Any:
    """The model, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, shared = HEADS[arguments.size]
    config = LlamaConfig(
        **{**SIZES[arguments.size], **({"num_hidden_layers": arguments.layers} if arguments.layers else {})},
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=arguments.context,
        attn_implementation=arguments.spelling,
    )
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).eval()


class Decoder:
    """One candidate: a model in one form, and its cache, which holds `filled` tokens of a prompt."""

    def __init__(self, model: Any, arguments: argparse.Namespace, **options: Any) -> None:
        from transformers import StaticCache

        self.arguments = arguments
        self.step = torch.compile(model, **options) if options else model
        torch.manual_seed(1)
        shape = (arguments.batch, arguments.filled)
        prompt = torch.randint(model.config.vocab_size, shape, device=arguments.device)
        self.cache = StaticCache(config=model.config, max_cache_len=arguments.context)
        self.first = model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.first = self.first[:, -1].argmax(-1, keepdim=True)

    def logits(self, token: torch.Tensor) -> torch.Tensor:
        """[batch, 1, vocabulary] of one step."""
        return self.step(token, past_key_values=self.cache, use_cache=True).logits

    def restart(self) -> None:
        """The cache as it was behind the prompt; what is written beyond is hidden."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.arguments.filled)

    def __call__(self) -> list[torch.Tensor]:
        """The next tokens, from the prompt on."""
        self.restart()
        return self.decode()

    def decode(self) -> list[torch.Tensor]:
        """The next tokens, from where the cache is."""
        token, found = self.first, []
        for _ in range(self.arguments.tokens):
            torch.compiler.cudagraph_mark_step_begin()
            token = self.logits(token)[:, -1].argmax(-1, keepdim=True)
            found.append(token)
        return found


def bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes, the best of ten."""
    size = 2**30 if device == "cuda" else 2**27
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        start = now(device)
        target.copy_(source)
        best = min(best, now(device) - start)
    return 2 * size / best


def now(device: str) -> float:
    """Seconds: wall time once the device is idle, or the thread's own on the CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()


def bytes_of_a_token(model: Any, arguments: argparse.Namespace) -> int:
    """What has to be read for one token of each sequence, halfway through the tokens."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= model.get_input_embeddings().weight.numel() * model.dtype.itemsize
    config = model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    keys = arguments.filled + arguments.tokens // 2
    return weights + 2 * arguments.batch * keys * heads * config.num_hidden_layers * model.dtype.itemsize


def candidates(model: Any, arguments: argparse.Namespace) -> dict[str, Decoder]:
    """Each form in which the model is to be timed."""
    forms: dict[str, dict[str, Any]] = {
        "eager": {},
        "inductor": {"backend": "inductor"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
        "omni": {"backend": "omni"},
        "omni, reduce-overhead": {"backend": "omni", "mode": "reduce-overhead"},
    }
    if arguments.device == "cpu":
        del forms["reduce-overhead"], forms["omni, reduce-overhead"]
    made: dict[str, Decoder] = {}
    for name in arguments.only or forms:
        torch._dynamo.reset()
        made[name] = Decoder(copy.deepcopy(model) if name != "eager" else model, arguments, **forms[name])
        for _ in range(3):  # a mode that records needs three
            made[name]()
    return made


def turn(decoder: Decoder, arguments: argparse.Namespace) -> float:
    """Seconds a token in one turn."""
    decoder.restart()
    start = now(arguments.device)
    decoder.decode()
    return (now(arguments.device) - start) / arguments.tokens


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all candidates, and compare their tokens."""
    model = build(arguments)
    made = candidates(model, arguments)
    wait_for_turn(arguments.device)
    limit = bytes_of_a_token(model, arguments) / bandwidth(arguments.device)
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds):
        for name in made if number % 2 == 0 else reversed(made):
            times[name].append(turn(made[name], arguments))
    rows: list[dict[str, Any]] = []
    expected = torch.cat(made["eager"]()) if "eager" in made else None
    for name, decoder in made.items():
        seconds = min(times[name]) if arguments.device == "cpu" else sorted(times[name])[rounds // 2]
        same = None if expected is None else bool(torch.equal(torch.cat(decoder()), expected))
        if arguments.check and same is False and arguments.dtype == "float32":
            raise SystemExit(f"{name}: the tokens are not eager's")
        rows.append({
            "candidate": name,
            "milliseconds": seconds * 1e3,
            "share": limit / seconds,
            "kernels": None if arguments.device == "cpu" else kernel_seconds(decoder) / arguments.tokens,
            "same": same,
            "error": error(decoder, model, arguments) if arguments.exact else None,
        })  # fmt: skip
    return {"limit": limit * 1e3, "rows": rows}


def error(decoder: Decoder, model: Any, arguments: argparse.Namespace) -> float:
    """The largest difference of a step's logits from those of the same weights in float64."""
    wide = Decoder(copy.deepcopy(model).double(), arguments)
    decoder.restart()
    return float((decoder.logits(wide.first).double() - wide.logits(wide.first)).abs().max())


def generate(arguments: argparse.Namespace) -> list[list[str]]:
    """Tokens and seconds of `generate` with a static cache."""
    rows: list[list[str]] = []
    expected: Any = None
    forms: dict[str, dict[str, Any]] = {
        "eager": {},
        "inductor": {"backend": "inductor"},
        "omni": {"backend": "omni"},
        "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    }
    for name, form in list(forms.items())[: 3 if arguments.device == "cpu" else None]:
        if arguments.only and name not in arguments.only:
            continue
        torch._dynamo.reset()
        model = build(arguments)
        if form:
            model.forward = torch.compile(model.forward, **form)
        torch.manual_seed(1)
        prompt = torch.randint(model.config.vocab_size, (arguments.batch, 16), device=arguments.device)
        settings: dict[str, Any] = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": arguments.tokens,
            "min_new_tokens": arguments.tokens,
            "do_sample": False,
            "cache_implementation": "static",
            "disable_compile": True,  # what transformers would compile by itself
        }
        try:
            model.generate(prompt, **settings)
            start = now(arguments.device)
            tokens = model.generate(prompt, **settings)
            seconds = now(arguments.device) - start
        except RuntimeError as error:  # under `reduce-overhead`: what torch overwrote is read
            rows.append([name, f"raises {type(error).__name__}", "-"])
            continue
        expected = tokens if expected is None else expected
        rows.append([name, f"{seconds / arguments.tokens * 1e3:.3f}", "yes" if torch.equal(tokens, expected) else "no"])
    return rows


def main() -> None:
    """Run as the docstring of the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="other than the size has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048, help="slots of the cache")
    parser.add_argument("--filled", type=int, default=100, help="of which the prompt takes")
    parser.add_argument("--tokens", type=int, default=32, help="generated in a turn")
    parser.add_argument("--spelling", choices=["eager", "sdpa"], default="sdpa")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--only", nargs="*", help="candidates")
    parser.add_argument("--check", action="store_true", help="fail where tokens differ in float32")
    parser.add_argument("--exact", action="store_true", help="errors against float64")
    parser.add_argument("--generate", action="store_true", help="transformers' generate, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    with torch.no_grad():
        found = measure(arguments)
        print(machine(arguments.device))
        print(f"{arguments.size}, {arguments.dtype}, batch {arguments.batch}, {arguments.spelling}, context "
              f"{arguments.context}, filled {arguments.filled}; limit {found['limit']:.3f} ms")  # fmt: skip
        header = ["candidate", "ms a token", "share of the limit", "kernels, ms", "same tokens", "error"]
        print(markdown_table(header, [_cells(row) for row in found["rows"]]))
        if arguments.generate:
            print(markdown_table(["generate", "ms a token", "same tokens"], generate(arguments)))
    if arguments.json:
        arguments.json.write_text(json.dumps({**vars(arguments), **found}, default=str, indent=1), encoding="utf-8")


def _cells(row: dict[str, Any]) -> list[str]:
    def number(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}g}"

    kernels = row["kernels"] and row["kernels"] * 1e3
    same = {None: "-", True: "yes", False: "no"}[row["same"]]
    times = [f"{row['milliseconds']:.3f}", f"{100 * row['share']:.0f} %", number(kernels)]
    return [row["candidate"], *times, same, number(row["error"])]


if __name__ == "__main__":
    main()
