"""Train a small Llama on several processes, with the calls of torchtitan in its order.

    torchrun --nproc-per-node 2 examples/train/llama.py --backend omni --tp 1 --checkpoint selective --attention written

Tensor parallel, then activation checkpointing of each layer, then `layer.compile(backend=…, fullgraph=True)`, then
FSDP2. It runs on GPUs with NCCL, and else on CPUs with gloo. `--attention flex` is FlexAttention, of which torch has no
backward on CPUs: there it prints the losses of forwards.
"""

import argparse
import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 128
ATTENTION = ("written", "sdpa", "flex")


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """FlexAttention's mask."""
    return q >= k


class Attention(nn.Module):
    """Causal attention, spelt in one of three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """Attend; the number of heads is that of this rank's shard."""
        size = WIDTH // HEADS
        q, k, v = (w(x).view(*x.shape[:2], -1, size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.kind == "flex":
            out = flex_attention(q, k, v, block_mask=mask)
        elif self.kind == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            out = (q @ k.transpose(-2, -1) / size**0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.wo(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(kind)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x), mask)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """The model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, mask: Any) -> Tensor:
        """Logits."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of selective checkpointing: results of matrix products are kept."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def prepare(model: Llama, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    """Tensor parallel, checkpointing, compilation and FSDP2, in torchtitan's order."""
    if arguments.tp > 1:
        for layer in model.layers:
            split = {f"attention.w{name}": ColwiseParallel() for name in "qkv"} | {"attention.wo": RowwiseParallel()}
            split |= {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], split)
    if arguments.checkpoint != "none":
        how: dict[str, Any] = {"preserve_rng_state": False}
        if arguments.checkpoint == "selective":
            how["context_fn"] = lambda: create_selective_checkpoint_contexts(save_products)
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer, **how)
    if arguments.backend != "none":
        for layer in model.layers:
            layer.compile(backend=arguments.backend, fullgraph=True)
    if mesh["dp"].size() > 1:
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, arguments.dtype), reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def main() -> None:
    """Train, and print the loss of each step on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="omni", help="none for eager")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--checkpoint", choices=("none", "full", "selective"), default="selective")
    parser.add_argument("--attention", choices=ATTENTION, default="written")
    parser.add_argument("--dtype", default="float32", help="of FSDP2's parameters")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (world // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Llama(arguments.attention).to(device)
    prepare(model, mesh, arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device) if arguments.attention == "flex" else None
    forwards = arguments.attention == "flex" and device == "cpu"
    for step in range(arguments.steps):
        tokens = torch.randint(WORDS, (2, LENGTH), generator=generator).to(device)
        with torch.no_grad() if forwards else contextlib.nullcontext():
            logits = model(tokens, mask)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        if not forwards:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {float(loss.detach()):.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
