"""What verification adds to a first call: of every subgraph (`verify="first"`), and of overrides, which is the default.

A part of `bench_overhead.py`. Each round is a process of its own, without caches: what an earlier process verified is
known, and would not be verified again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

HEADER = ["first call", "off s", "on s", "added, as a share", "off / off", "own ms", "own ms / off"]

PROGRAM = """
import json, os, sys, time, torch
sys.path[:0] = [{folder!r}]
import omnicomp, omnicomp.runtime.verify
from omnicomp.testing.models import build
from omnicomp.timeline import Verification, current

device = {device!r}

@omnicomp.override(op=torch.ops.aten.cumsum.default)
def bench_cumsum(x, dim, *, dtype=None):
    n = x.shape[-1]
    return x @ torch.ones(n, n, device=x.device, dtype=x.dtype).triu()

if {model!r} == "an override":
    run, inputs = lambda x: x.exp().cumsum(-1).sin() + 1, dict(x=torch.rand(512, 128, device=device))
else:
    case = build({model!r}, "tiny").to(device, torch.float32)
    run, inputs = case.model, case.inputs
# What is spent on comparing subgraphs, without the call that is compared.
own = [0.0]

def counted(self, call, inputs, original=omnicomp.runtime.verify.Verifier._verify):
    def timed(args):
        begin = time.perf_counter()
        outputs = call(args)
        own[0] -= time.perf_counter() - begin
        return outputs
    begin = time.perf_counter()
    outputs = original(self, timed, inputs)
    own[0] += time.perf_counter() - begin
    return outputs

omnicomp.runtime.verify.Verifier._verify = counted
# Inductor's own start-up is paid before the clock starts.
torch.compile(torch.sin, backend="omni")(torch.ones(3, device=device))
times = []
with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
    for verify in {order!r}:
        torch.compiler.reset()
        start = time.perf_counter()
        torch.compile(run, backend="omni", options=dict(verify=verify))(**inputs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
print(json.dumps([times, own[0] + sum(event.seconds for event in current() if isinstance(event, Verification))]))
"""


def bench_verify(arguments: argparse.Namespace) -> list[list[str]]:
    """A row for each model with `verify="first"`, and one for an override with the default.

    The first compilation of a process is thrown away, as it pays for imports; the order of the rest alternates.
    """
    rows: list[list[str]] = []
    rounds = arguments.rounds or (2 if arguments.quick else 6)
    for model, asked in (*((model, "first") for model in arguments.models), ("an override", "overrides")):
        found: list[tuple[float, float, float, float]] = []
        with tempfile.TemporaryDirectory() as cache:
            for number in range(rounds + 1):
                order = ["off", "off", asked, "off"] if number % 2 else ["off", asked, "off", "off"]
                times, own = _process(arguments.device, model, order, cache)
                plain = [seconds for seconds, verify in zip(times[1:], order[1:], strict=True) if verify == "off"]
                if number > 0:  # the first round fills the cache of C++ objects
                    found.append((statistics.mean(plain), times[order.index(asked)], plain[1] / plain[0], own))
        off, on, noise, own = (statistics.median(values) for values in zip(*found, strict=True))
        share = statistics.median(with_it / without - 1 for without, with_it, _, _ in found)
        rows.append(
            [
                f'{model}, verify="{asked}"',
                f"{off:.2f}",
                f"{on:.2f}",
                f"{share:+.3f}",
                f"{noise:.3f}",
                f"{own * 1e3:.1f}",
                f"{own / off:.3f}",
            ]
        )
    return rows


def _process(device: str, model: str, order: list[str], cache: str) -> Any:
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = PROGRAM.format(folder=folder, model=model, device=device, order=order)
    with tempfile.TemporaryDirectory() as verdicts:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMNICOMP_CACHE_DIR": verdicts}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
    return json.loads(result.stdout.splitlines()[-1])
