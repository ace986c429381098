"""Engines against Inductor: subgraphs on each engine, and whole models under measured choice.

    python bench/bench_engines.py [--quick] [--cases mlp conv_net] [--engines openvino frozen] [--clock cpu]
    python bench/bench_engines.py --models bert resnet

A number is Inductor's time over the candidate's, so more than 1 is faster. Each is a median over interleaved rounds;
`inductor again` is a second copy of Inductor's and shows the noise. The clock `cpu` is the time that the process has
used, which is what can be compared on a machine that does other work; use it with one thread.
"""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Timing, add_common_arguments, geometric_mean, machine, markdown_table, relative_error
from torch import nn

import omnicomp
from omnicomp.errors import EngineError
from omnicomp.lowerings.engines import resolve_engine
from omnicomp.testing.models import MODELS, SIZES, build
from omnicomp.timeline import Ran


@dataclasses.dataclass
class Subject:
    """Something to run: a module with its inputs."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]

    def __call__(self, call: Any) -> Any:
        """Run it, or what it was compiled to."""
        return call(*self.inputs)


class Depthwise(nn.Module):
    """Depthwise and pointwise 1-D convolutions, as in speech models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv1d(width, width, 31, padding=15, groups=width)
        self.norm, self.point = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(batch, width, length)` in and out."""
        return x + self.point(nn.functional.silu(self.norm(self.depth(x))))


class Pointwise(nn.Module):
    """A chain of transcendental functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape in and out."""
        for _ in range(4):
            x = torch.tanh(x) * torch.sigmoid(x) + x
        return x


class Block(nn.Module):
    """A residual block of two convolutions with normalisation."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wide) for _ in range(2))
        same = stride == 1 and narrow == wide
        short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide))
        self.short = nn.Identity() if same else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(batch, channels, height, width)` in and out."""
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.short(x) + self.norms[1](self.second(y)))


class Encoder(nn.Module):
    """A transformer layer, normalisation last, as BERT's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(batch, length, width)` in and out."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(attended))
        return self.norms[1](x + self.down(nn.functional.gelu(self.up(x))))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(batch, length, width)` in and out."""
        return self.cell(x)[0]


def conv_net() -> nn.Module:
    """ResNet-18 (He et al., 2015)."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    widths = [64, 64, 128, 256, 512]
    blocks: list[nn.Module] = []
    for index, (narrow, wide) in enumerate(itertools.pairwise(widths)):
        blocks += [Block(narrow, wide, 1 if index == 0 else 2), Block(wide, wide, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), *blocks, head)


def mobile_block(width: int) -> nn.Module:
    """Depthwise separable 2-D convolutions."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.Hardswish()]
        layers += [nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers)


def mlp(width: int) -> nn.Module:
    """Three linear layers with GELU."""
    wide = 4 * width
    return nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, width))


CASES: dict[str, Callable[[], Subject]] = {
    "conv_net": lambda: Subject(conv_net(), (torch.randn(1, 3, 224, 224),)),
    "mlp": lambda: Subject(mlp(1024), (torch.randn(8, 1024),)),
    "encoder": lambda: Subject(Encoder(768, 12), (torch.randn(1, 128, 768),)),
    "pointwise": lambda: Subject(Pointwise(), (torch.randn(1024, 1024),)),
    "depthwise": lambda: Subject(mobile_block(96), (torch.randn(1, 96, 56, 56),)),
    "conv1d": lambda: Subject(Depthwise(256), (torch.randn(1, 256, 1000),)),
    "lstm": lambda: Subject(Recurrent(256), (torch.randn(1, 32, 256),)),
}


def compiled(module: nn.Module, name: str) -> Any:
    """A module compiled for one candidate."""
    if name.startswith("inductor"):
        return torch.compile(module, backend="inductor")
    if name in ("measure", "tuned"):
        return torch.compile(module, backend="omni", options={"lowerings": name})
    engine, _, setting = name.partition("+")
    options: dict[str, Any] = {"lowerings": [engine, "inductor", "eager"]}
    if setting:
        options["engines"] = {engine: {setting: True}}
    return torch.compile(module, backend="omni", options=options)


def time_all(runs: dict[str, Callable[[], Any]], rounds: int, seconds: float, clock: str) -> dict[str, Timing]:
    """Time candidates in turn, by one of two clocks."""
    read = time.process_time if clock == "cpu" else time.perf_counter
    calls: dict[str, int] = {}
    for name, run in runs.items():
        start = time.perf_counter()
        for _ in range(3):
            run()
        calls[name] = max(1, round(seconds * 3 / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(reversed(runs)):
            start = read()
            for _ in range(calls[name]):
                runs[name]()
            times[name].append((read() - start) / calls[name])
    return {name: Timing(rounds=tuple(values)) for name, values in times.items()}


def where_it_ran(since: int) -> str:
    """The lowerings that the last compiled graphs ran on."""
    seen = [event for event in omnicomp.timeline.events()[since:] if isinstance(event, Ran)]
    return "+".join(dict.fromkeys(event.lowering for event in seen))


def measure(subject: Subject, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, str]:
    """One row: what each candidate reaches, as text."""
    torch.compiler.reset()
    subject.module.eval()
    with torch.no_grad():
        expected = subject(subject.module)
        runs: dict[str, Callable[[], Any]] = {}
        notes: dict[str, str] = {}
        for name in names:
            torch._dynamo.reset_code_caches() if hasattr(torch._dynamo, "reset_code_caches") else None
            call, since = compiled(subject.module, name), len(omnicomp.timeline.events())
            start = time.perf_counter()
            result = subject(call)
            notes[name] = f"{time.perf_counter() - start:.1f} s"
            error = relative_error([result], [expected])
            if error > 1e-4:
                notes[name] += f" WRONG {error:.0e}"
            if not name.startswith("inductor"):
                notes[name] += f" {where_it_ran(since)}"
            for _ in range(3):
                subject(call)
            runs[name] = lambda call=call: subject(call)
        rounds = arguments.rounds or (3 if arguments.quick else 9)
        times = time_all(runs, rounds, 0.05 if arguments.quick else 0.3, arguments.clock)
    base = times["inductor"]
    row = {name: 1 / times[name].ratio_to(base) for name in names}
    print(" ".join(f"{n}={row[n]:.2f} ({notes[n]})" for n in names), f"[{base.median * 1e3:.2f} ms]", flush=True)
    return {name: f"{value:.2f}" for name, value in row.items()}


def main() -> None:
    """Print one table, and geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--cases", nargs="*", default=None, choices=list(CASES))
    parser.add_argument("--models", nargs="*", default=None, choices=list(MODELS))
    parser.add_argument("--size", default="cpu", choices=list(SIZES))
    parser.add_argument("--engines", nargs="*", default=None, help="names of engines, `frozen+cpp_wrapper`, `measure`")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    arguments = parser.parse_args()
    names = ["inductor", "inductor again", *(arguments.engines or [])]
    if arguments.engines is None:
        names += [
            "frozen",
            "frozen+cpp_wrapper",
            *filter(_is_there, ("openvino", "onnxruntime", "xla", "tvm")),
            "measure",
        ]
    print(f"{machine('cpu')}, clock {arguments.clock}")
    rows: dict[str, dict[str, str]] = {}
    for case in list(CASES) if arguments.cases is None and arguments.models is None else arguments.cases or []:
        torch.manual_seed(0)
        print(case, end=": ")
        rows[case] = measure(CASES[case](), names, arguments)
    for model in arguments.models or []:
        case = build(model, "tiny" if arguments.quick else arguments.size)
        print(model, end=": ")
        subject = Subject(_Picked(case.model, case.output, list(case.inputs)), tuple(case.inputs.values()))
        rows[model] = measure(subject, names, arguments)
    means = [f"{geometric_mean([float(row[name]) for row in rows.values()]):.2f}" for name in names]
    table = [[case, *row.values()] for case, row in rows.items()]
    print(markdown_table(["", *names], [*table, ["geometric mean", *means]]))


class _Picked(nn.Module):
    """A model that takes its inputs in order and returns the tensor that is compared."""

    def __init__(self, model: nn.Module, output: Callable[[Any], torch.Tensor], names: list[str]) -> None:
        super().__init__()
        self.model, self.output, self.names = model, output, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.output(self.model(**dict(zip(self.names, values, strict=True))))


def _is_there(engine: str) -> bool:
    try:
        return not resolve_engine(engine).missing()
    except EngineError:
        return False


if __name__ == "__main__":
    main()
