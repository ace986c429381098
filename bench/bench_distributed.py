"""Training on several GPUs: tokens a second, peak memory, build time and losses of eager, Inductor and omni.

    python bench/bench_distributed.py [--ranks N] [--kinds ddp fsdp …] [--spellings eager sdpa flex]
    python bench/bench_distributed.py --device cpu --quick      # two gloo processes and a tiny model

A Llama of about a billion parameters and 4096 tokens a sequence, unless `--quick`. Each row is a job of its own, one
process a GPU (NCCL; NVLink multicast stays off) or CPU process (gloo), from a cache folder with nothing but precompiled
headers: `build` is what the first step takes longer than a later one. `ddp` and `fsdp` compile the model as a whole;
`fsdp-layers`, `tp-layers` and `fsdp+tp` (tensor parallel over pairs of ranks) compile layer by layer. Candidates take
turns, and ratios are medians over the rounds of tokens a second over Inductor's. Losses are of the last step, averaged
over ranks; `off` is how far the losses of all steps are from eager's, at most.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from harness import add_common_arguments, machine, markdown_table

CANDIDATES: Final = ("eager", "inductor", "omni")
KINDS: Final = ("ddp", "fsdp", "fsdp-layers", "tp-layers", "fsdp+tp")
HEADERS: Final = "precompiled_headers"
SPELLINGS: Final = ("eager", "sdpa", "flex")

PROGRAM = """
import json, math, os, sys, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

what = json.loads(sys.argv[1])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KIND, SPELLING, NAME, DEVICE = what["kind"], what["spelling"], what["candidate"], what["device"]
cuda = DEVICE == "cuda"
if cuda:
    torch.cuda.set_device(RANK)
dist.init_process_group("nccl" if cuda else "gloo")
if NAME == "omni":
    import omnicomp
width, heads, length = what["width"], what["heads"], what["length"]

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, width // heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        half = torch.arange(0, width // heads, 2, device=x.device)
        angle = torch.arange(t, device=x.device)[:, None] / 10000 ** (half / (width // heads))
        cos, sin = (each.repeat(1, 2).to(x.dtype) for each in (angle.cos(), angle.sin()))
        q, k = (e * cos + torch.cat((-e.chunk(2, -1)[1], e.chunk(2, -1)[0]), -1) * sin for e in (q, k))
        if SPELLING == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif SPELLING == "flex":
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            y = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.attention = nn.RMSNorm(width), nn.RMSNorm(width), Attention()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, mask):
        x = x + self.attention(self.one(x), mask)
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(what["words"], width), nn.Linear(width, what["words"], bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(what["layers"])), nn.RMSNorm(width)

    def forward(self, tokens, mask):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

torch.manual_seed(0)
with torch.device(DEVICE):
    model = Model()
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=DEVICE)
if KIND in ("tp-layers", "fsdp+tp"):
    pairs = 2 if KIND == "fsdp+tp" else SIZE
    mesh = init_device_mesh(DEVICE, (SIZE // pairs, pairs), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        split = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        split |= {"gate": ColwiseParallel(), "up": ColwiseParallel()}
        split |= {"attention.o": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], split)
    shards, data = mesh["dp"], RANK // pairs
else:
    shards, data = init_device_mesh(DEVICE, (SIZE,)), RANK
compiled = NAME != "eager"
if compiled and KIND not in ("ddp", "fsdp"):
    for block in model.blocks:
        block.compile(backend=NAME)
if "fsdp" in KIND:
    how = {"mesh": shards}
    if cuda:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
if KIND == "ddp":
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
call = torch.compile(model, backend=NAME) if compiled and KIND in ("ddp", "fsdp") else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda and "tp" not in KIND)
generator = torch.Generator().manual_seed(data)
precision = torch.autocast(DEVICE, torch.bfloat16, enabled=cuda and "fsdp" not in KIND)
times, losses = [], []
if cuda:
    torch.cuda.reset_peak_memory_stats()
for step in range(what["steps"]):
    tokens = torch.randint(what["words"], (what["batch"], length + 1), generator=generator).to(DEVICE)
    dist.barrier()
    start = time.perf_counter()
    with precision:
        loss = F.cross_entropy(call(tokens[:, :-1], mask).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if cuda:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(float(total) / SIZE)
steady = sorted(times[2:])[len(times[2:]) // 2]
if cuda:
    peak = torch.cuda.max_memory_allocated()
else:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
peaks = torch.tensor([float(peak)], device=DEVICE)
dist.all_reduce(peaks, dist.ReduceOp.MAX)
ways = SIZE // pairs if KIND in ("tp-layers", "fsdp+tp") else SIZE
found = {
    "tokens": ways * what["batch"] * length / steady, "build": times[0] - steady, "peak": float(peaks),
    "losses": losses, "parameters": sum(p.numel() for p in model.parameters()),
}
if NAME == "omni":
    events = omnicomp.timeline.events()
    found["fused"] = sum(e.type == "rewrite" and e.kind == "attention" for e in events)
    found["fallbacks"] = [e.reason.sentence for e in events if e.type == "retreat"]
if RANK == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


def run(what: dict[str, Any], ranks: int, seconds: float, headers: Path) -> dict[str, Any]:
    """Run a job; what its rank 0 measured, or why it failed.

    Args:
        what: to run.
        ranks: how many processes.
        seconds: that it may take.
        headers: a folder for Inductor's precompiled headers, which jobs share.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).resolve().parents[1])]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "cache", HEADERS)
        if headers.is_dir():
            shutil.copytree(headers, cache)
        processes: list[subprocess.Popen[str]] = []
        outputs: list[Path] = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "NCCL_NVLS_ENABLE": "0",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(paths),
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
            }
            environment.pop("OMNICOMP_CACHE_DIR", None)
            outputs.append(Path(folder, f"{rank}.txt"))
            with outputs[-1].open("w") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", PROGRAM, json.dumps(what)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )
        deadline = time.monotonic() + seconds
        try:
            printed = [each.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for each in processes]
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s"}
        finally:
            for process in processes:
                process.kill()
            if cache.is_dir() and not headers.is_dir():
                shutil.copytree(cache, headers)
        if any(process.returncode for process in processes):
            told = [path.read_text().strip().splitlines() for path in outputs]
            return {"failed": next((lines[-1] for lines in told if lines), "no message")[:160]}
        found: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
        return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each kind, spelling and candidate."""
    lines: list[list[str]] = []
    for key in dict.fromkeys((r["ranks"], r["kind"], r["spelling"], r["candidate"]) for r in rows):
        same = [r for r in rows if (r["ranks"], r["kind"], r["spelling"]) == key[:3]]
        own = [r for r in same if r["candidate"] == key[3]]
        good = [r for r in own if "tokens" in r]
        head = [str(key[0]), *key[1:]]
        if not good:
            lines.append([*head, own[0].get("failed", ""), *[""] * 5])
            continue
        base = {r["round"]: r["tokens"] for r in same if r["candidate"] == "inductor" and "tokens" in r}
        eager = next((r["losses"] for r in same if r["candidate"] == "eager" and "tokens" in r), None)
        ratios = [r["tokens"] / base[r["round"]] for r in good if r["round"] in base]
        off = "" if eager is None else f"{max(abs(a - b) for a, b in zip(good[0]['losses'], eager, strict=True)):.1e}"
        lines.append(
            [
                *head,
                f"{statistics.median(r['tokens'] for r in good):.0f}",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                f"{max(r['peak'] for r in good) / 2**20:.0f}",
                f"{statistics.median(r['build'] for r in good):.1f}",
                f"{good[0]['losses'][-1]:.4f}",
                off,
            ]
        )
    header = ["ranks", "kind", "attention", "candidate", "tokens/s", "/ Inductor", "peak MiB", "build s", "loss", "off"]
    return markdown_table(header, lines)


def main() -> None:
    """Print a row for each kind, spelling and candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--ranks", nargs="+", type=int, help="how many processes; all GPUs, or two on the CPU")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--spellings", nargs="+", choices=SPELLINGS)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--limit", type=float, default=1200, help="seconds that a job may take")
    parser.add_argument("--json", metavar="FILE", help="write every measurement to a file")
    arguments = parser.parse_args()
    cuda, quick = arguments.device == "cuda", arguments.quick
    counts = arguments.ranks or [torch.cuda.device_count() if cuda else 2]
    # torch's FlexAttention has no gradients on the CPU.
    spellings = arguments.spellings or [each for each in SPELLINGS if cuda or each != "flex"]
    rounds = arguments.rounds or (1 if quick else 3)
    size = {"width": 2048, "heads": 16, "layers": 18, "words": 32000, "length": 4096, "batch": 1, "steps": 20}
    if quick:
        size = {"width": 64, "heads": 4, "layers": 2, "words": 256, "length": 64, "batch": 2, "steps": 5}
    start = time.perf_counter()
    print(f"{machine(arguments.device)}, {rounds} rounds", flush=True)
    rows: list[dict[str, Any]] = []
    shared = tempfile.TemporaryDirectory()
    headers = Path(shared.name, HEADERS)
    for ranks in counts:
        kinds = [kind for kind in arguments.kinds if kind != "fsdp+tp" or ranks % 2 == 0]
        for kind in kinds:
            for spelling in spellings:
                for number in range(rounds):
                    for candidate in arguments.candidates[:: 1 if number % 2 == 0 else -1]:
                        row = {"ranks": ranks, "kind": kind, "spelling": spelling, "candidate": candidate}
                        what = {**row, **size, "device": arguments.device}
                        rows.append({**row, "round": number, **run(what, ranks, arguments.limit, headers)})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    print(f"({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
