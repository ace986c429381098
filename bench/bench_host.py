"""What does the host do in a call of a compiled graph of many kernels, under omni and under Inductor?

    python bench/bench_host.py [--blocks 24] [--training] [--top 15]

A graph of many small kernels (blocks of a small UNet: normalization, convolution, time embedding, attention, skip) is
called until it is warm. Then the calls of Python and C functions in one call are counted, which no other process
disturbs and which tell by name what one backend adds; and the thread's CPU time, of which the least of many calls is
reported. `objects` are those that the graph adds to what Python's garbage collector walks, and `collection` is the time
of a full one with all that is there by then. On CUDA thread time is the host's part alone, as the device is not waited
for; on the CPU the kernels run in it, and with both backends they are the same.
"""

import argparse
import collections
import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from harness import add_common_arguments, machine, markdown_table
from torch import nn


class Block(nn.Module):
    """A block of a UNet, in the order in which diffusers has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.into, self.out = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.merge = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] and [B, C] to [B, C, H, W]."""
        h = self.into(nn.functional.silu(self.first(x))) + self.time(nn.functional.silu(time))[:, :, None, None]
        x = x + self.out(nn.functional.silu(self.second(h)))
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        q, k, v = (
            make(tokens).unflatten(-1, (4, -1)).transpose(1, 2) for make in (self.queries, self.keys, self.values)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.merge(seen).transpose(1, 2).unflatten(-1, x.shape[2:])


class Blocks(nn.Module):
    """Blocks behind each other, half of them with a skip to their counterpart."""

    def __init__(self, count: int, width: int = 32) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(Block(width) for _ in range(count // 2)) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """[B, 32, H, W] and [B, 32] to [B, 32, H, W]."""
        kept: list[torch.Tensor] = []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop(), time)
        return x


def caller(backend: str, arguments: argparse.Namespace) -> Callable[[], Any]:
    """A warm call."""
    torch.manual_seed(0)
    model = Blocks(arguments.blocks).to(arguments.device)
    x, time = torch.randn(1, 32, 8, 8, device=arguments.device), torch.randn(1, 32, device=arguments.device)
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        if arguments.training:
            compiled(x, time).sum().backward()
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                compiled(x, time)

    for _ in range(4):
        step()
    return step


def counted(call: Callable[[], Any]) -> collections.Counter[str]:
    """How often which function is called in one call, of Python and of C."""
    found: collections.Counter[str] = collections.Counter()

    def notice(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            found[f"{code.co_filename.rpartition('/')[2]}:{getattr(code, 'co_qualname', code.co_name)}"] += 1
        elif event == "c_call":
            found[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    gc.disable()
    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def collected() -> tuple[int, float]:
    """Objects that the garbage collector walks, and seconds of thread time that a full collection takes."""
    for _ in range(3):
        gc.collect()
    start = time.thread_time()
    gc.collect()
    return len(gc.get_objects()), time.thread_time() - start


def least(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of the thread's CPU time of each, called in turn: the least of all rounds."""
    best = dict.fromkeys(calls, float("inf"))
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time_ns()
            call()
            best[name] = min(best[name], (time.thread_time_ns() - start) / 1e3)
    gc.enable()
    return best


def _sums(counts: collections.Counter[str]) -> tuple[int, int]:
    """Calls of Python and of C functions."""
    of_c = sum(count for name, count in counts.items() if name.startswith("C "))
    return counts.total() - of_c, of_c


def main() -> None:
    """Run as the docstring of the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--top", type=int, default=15, help="functions to list that omni calls more often")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    backends = ("inductor", "omni")
    for backend in backends:  # what is imported and built once a process
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(8, device=arguments.device))
    calls: dict[str, Callable[[], Any]] = {}
    held: dict[str, tuple[int, float]] = {}
    for backend in backends:
        before = collected()[0]
        calls[backend] = caller(backend, arguments)
        after, seconds = collected()
        held[backend] = after - before, seconds
    counts = {backend: counted(call) for backend, call in calls.items()}
    times = least(calls, arguments.rounds or (50 if arguments.quick else 300))
    rows = [
        [
            backend,
            *map(str, _sums(counts[backend])),
            f"{times[backend]:.0f}",
            str(held[backend][0]),
            f"{held[backend][1] * 1e3:.0f}",
        ]
        for backend in calls
    ]
    print(machine(arguments.device))
    header = ["backend", "Python calls", "C calls", "thread time, us", "objects", "collection, ms"]
    print(markdown_table(header, rows))
    more = {name: count - counts["inductor"][name] for name, count in counts["omni"].items()}
    for name, count in sorted(more.items(), key=lambda item: -item[1])[: arguments.top]:
        if count > 0:
            print(f"+{count:5d}  {name}")


if __name__ == "__main__":
    main()
