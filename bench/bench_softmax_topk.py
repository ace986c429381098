"""Compares the softmax_topk override with what Inductor makes of its reference, over sizes of routers.

Both are called as compiled functions, so both pay for guards and wrappers. Runs are interleaved and the ratio is taken
within each pair, so that a machine that slows down slows both; what is printed are medians.

    python bench/bench_softmax_topk.py            # every size, CPU, and CUDA where there is one
    python bench/bench_softmax_topk.py --quick    # a few sizes, about a minute
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from omnicomp.lowerings.overrides.softmax_topk import check, reference, softmax_topk

ROWS = (1, 16, 256, 4096, 65536)
SIZES = (8, 64, 128, 256)
KS = (2, 8)


def seconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Mean time of a call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def compare(device: str, rows: int, n: int, k: int, rounds: int) -> None:
    """Measure one size and print its line."""
    torch._dynamo.reset()
    logits = torch.randn(rows, n, device=device)

    def theirs(logits: Tensor) -> tuple[Tensor, Tensor]:
        return reference(logits, k)

    def ours(logits: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_topk(logits, k)

    compiled_theirs = torch.compile(theirs, dynamic=False)
    compiled_ours = torch.compile(ours, dynamic=False)
    for _ in range(3):
        expected, got = compiled_theirs(logits), compiled_ours(logits)
    torch.testing.assert_close(got[0], expected[0])

    once = seconds(lambda: compiled_theirs(logits), 2, device)
    repeats = max(2, min(300, int(0.01 / once)))
    pairs = [
        (
            seconds(lambda: compiled_theirs(logits), repeats, device),
            seconds(lambda: compiled_ours(logits), repeats, device),
        )
        for _ in range(rounds)
    ]
    inductor = statistics.median(pair[0] for pair in pairs) * 1e6
    override = statistics.median(pair[1] for pair in pairs) * 1e6
    ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
    verdict = "taken" if check(logits, k) is None else "refused"
    print(f"{device:6} {rows:6} {n:5} {k:3} {inductor:12.1f} {override:12.1f} {ratio:8.2f}x  {verdict}", flush=True)


def main() -> None:
    """Run the sizes asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few sizes and rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this one")
    options = parser.parse_args()
    devices = [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    sizes = itertools.product((16, 4096), (8, 128), (2, 8)) if options.quick else itertools.product(ROWS, SIZES, KS)
    rounds = 9 if options.quick else 25
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; microseconds a call, medians of {rounds}")
    print(f"{'device':6} {'rows':>6} {'n':>5} {'k':>3} {'Inductor':>12} {'override':>12} {'ratio':>9}  check")
    with torch.no_grad():
        for (rows, n, k), device in itertools.product(list(sizes), devices):
            compare(device, rows, n, k, rounds)


if __name__ == "__main__":
    main()
