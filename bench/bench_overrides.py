"""Compares the overrides of whole computations with what Inductor makes of the program: speed, memory, and errors.

The programs are as users write them, compiled by `torch.compile` with Inductor's backend and with omni. Candidates take
turns, and a ratio is the median over the rounds of the ratio within a round. Memory is the peak above what lived before
the call: activations, temporaries and gradients. Errors are relative norms against float64.

    python bench/bench_overrides.py                          # every size
    python bench/bench_overrides.py --quick --device cpu     # small, about a minute
    python bench/bench_overrides.py --part elementwise       # what was tried and left out
    python bench/bench_overrides.py --all                    # also the sizes that the checks refuse
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import add_common_arguments, interleave, machine, markdown_table, peak_memory, relative_error
from torch import Tensor, nn

import omnicomp
from omnicomp.lowerings.overrides import int8_linear, linear_cross_entropy

# tokens, classes, features, dtype of the weight, autocast, kind
LOSSES = {
    "cuda": [
        (8192, 128256, 2048, torch.bfloat16, False, "train"),
        (16384, 128256, 2048, torch.bfloat16, False, "train"),
        (32768, 128256, 2048, torch.bfloat16, False, "train"),
        (8192, 128256, 4096, torch.bfloat16, False, "train"),
        (16384, 128256, 4096, torch.bfloat16, False, "train"),
        (32768, 128256, 4096, torch.bfloat16, False, "train"),
        (16384, 50304, 768, torch.float32, True, "train"),
        (4096, 50304, 768, torch.bfloat16, False, "train"),
        (4096, 32000, 1024, torch.bfloat16, False, "train"),
        (8192, 32000, 1024, torch.float32, False, "train"),
        (8192, 128256, 4096, torch.bfloat16, False, "frozen"),
        (8192, 128256, 4096, torch.bfloat16, False, "inference"),
        (2048, 128256, 4096, torch.bfloat16, False, "inference"),
    ],
    "cpu": [
        (2048, 32000, 256, torch.float32, False, "train"),
        (2048, 32000, 256, torch.float32, False, "inference"),
        (1024, 32000, 256, torch.bfloat16, False, "train"),
    ],
}
# rows, outputs, features
LAYERS = {
    "cuda": [
        *((rows, 14336, 4096) for rows in (1, 4, 16, 32, 64)),
        *((rows, 4096, 14336) for rows in (1, 16, 64)),
        *((rows, 4096, 4096) for rows in (1, 16, 64)),
        (1, 1024, 4096),
        (16, 1024, 4096),
    ],
    "cpu": [(1, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096), (1, 1024, 4096)],
}


class Head(nn.Module):
    """The last layer of a language model and its loss, as training loops write it."""

    def __init__(self, features: int, classes: int, autocast: str) -> None:
        super().__init__()
        self.lm_head = nn.Linear(features, classes, bias=False)
        self.autocast = autocast

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean loss of hidden (1, tokens, features) and target (1, tokens)."""
        with torch.autocast(self.autocast, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.lm_head(hidden)
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), target.view(-1))


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight, as in gpt-fast."""

    def __init__(self, outputs: int, features: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (outputs, features), dtype=torch.int8, device=device))
        self.register_buffer("scale", (torch.rand(outputs, device=device) * 0.01).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The product of x (rows, features) and the weight."""
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scale


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let the overrides take every size, to see what the checks refuse."""
    saved = dict(linear_cross_entropy._MIN_BYTES), linear_cross_entropy._MIN_SAVING, dict(int8_linear._MIN_WEIGHTS)
    linear_cross_entropy._MIN_BYTES.update(dict.fromkeys(saved[0], 0))
    linear_cross_entropy._MIN_SAVING = 0.0
    int8_linear._MIN_WEIGHTS.update(dict.fromkeys(saved[2], 0))
    try:
        yield
    finally:
        linear_cross_entropy._MIN_BYTES.update(saved[0])
        linear_cross_entropy._MIN_SAVING = saved[1]
        int8_linear._MIN_WEIGHTS.update(saved[2])


def compiled(module: Any, name: str) -> tuple[Callable[..., Any], str]:
    """The compiled module, and a function that says after the first call what the override did."""
    if name == "eager":
        return module
    return torch.compile(module, backend="omni" if name == "omni" else "inductor", dynamic=False)


def verdict() -> str:
    """What the newest graph's rewrites or refusals say."""
    names = [rewrite.name for graph in omnicomp.audit().graphs for rewrite in graph.rewrites]
    return "taken" if names else "refused"


def loss_row(size: tuple[Any, ...], device: str, rounds: int, seconds: float, errors: bool) -> list[str]:
    """Measure one loss."""
    tokens, classes, features, dtype, autocast, what = size
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    module = Head(features, classes, device if autocast else "").to(device, dtype)
    nn.init.normal_(module.lm_head.weight, std=0.05)
    if what != "train":
        module.requires_grad_(False)
    hidden = torch.randn(1, tokens, features, device=device, dtype=dtype, requires_grad=what != "inference")
    target = torch.randint(0, classes, (1, tokens), device=device)
    target[:, ::7] = -100

    def step(function: Callable[..., Any]) -> list[Tensor]:
        hidden.grad = module.lm_head.weight.grad = None
        loss = function(hidden, target)
        if what != "inference":
            loss.backward()
        found = [loss.detach(), hidden.grad, module.lm_head.weight.grad]
        return [value for value in found if value is not None]

    names = ["inductor", "omni"]
    functions = {name: compiled(module, name) for name in names}
    memory, values = {}, {}
    for name in names:
        values[name] = step(functions[name])
        step(functions[name])
        hidden.grad = module.lm_head.weight.grad = None
        memory[name] = peak_memory(lambda name=name: step(functions[name]), device)  # type: ignore[misc]
    values["eager"] = step(module) if errors else []
    hidden.grad = module.lm_head.weight.grad = None
    timing = interleave(
        {name: lambda name=name: step(functions[name]) for name in names},  # type: ignore[misc]
        rounds=rounds,
        seconds=seconds,
        device=device,
    )
    state = verdict()
    texts = []
    if errors:
        hidden.grad = module.lm_head.weight.grad = None
        reference = exact(module, hidden, target, what)
        for index in range(len(reference)):
            own, eager = (relative_error([values[n][index]], [reference[index]]) for n in ("omni", "eager"))
            texts.append(f"{own:.1e} / {eager:.1e}")
    saved = "" if memory["omni"] is None else f"{memory['inductor'] / memory['omni']:.1f}x"
    gib = ["" if memory[name] is None else f"{memory[name]:.2f}" for name in names]
    weight = f"{str(dtype).removeprefix('torch.')}{' autocast' if autocast else ''}"
    return [
        f"{tokens} x {classes} x {features}",
        f"{weight}, {what}",
        *(f"{timing[name].median * 1e3:.2f}" for name in names),
        f"{timing['inductor'].ratio_to(timing['omni']):.2f}x",
        *gib,
        saved,
        state,
        ", ".join(texts),
    ]


def exact(module: Head, hidden: Tensor, target: Tensor, what: str) -> list[Tensor]:
    """The loss and its gradients in float64."""
    x = hidden.detach().double().requires_grad_(what != "inference")
    weight = module.lm_head.weight.detach().double().requires_grad_(what == "train")
    loss = F.cross_entropy(F.linear(x, weight)[0], target[0])
    wanted = [value for value in (x, weight) if value.requires_grad]
    return [loss.detach(), *(torch.autograd.grad(loss, wanted) if wanted else ())]


@torch.no_grad()
def layer_row(size: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int, seconds: float) -> list[str]:
    """Measure one int8 layer; copies of it take turns, so that no weight is in the device's cache."""
    rows, outputs, features = size
    torch.compiler.reset()
    omnicomp.timeline.clear()
    torch.manual_seed(0)
    copies = max(1, min(8, 2**29 // (outputs * features))) if device == "cuda" else 1
    module = nn.ModuleList(Int8Linear(outputs, features, dtype, device) for _ in range(copies))
    x = torch.randn(rows, features, device=device, dtype=dtype)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    stack = Stack()
    functions = {name: compiled(stack, name) for name in ("inductor", "omni")}
    results = {name: function(x)[0] for name, function in functions.items()}
    exact_result = F.linear(x.double(), module[0].weight.double()) * module[0].scale.double()
    error = relative_error([results["omni"]], [exact_result])
    own = relative_error([stack(x)[0]], [exact_result])
    calls = {name: lambda function=function: function(x) for name, function in functions.items()}
    state = verdict()
    wall = interleave(calls, rounds=rounds, seconds=seconds, device=device)
    cells = [f"{rows} x {outputs} x {features}", str(dtype).removeprefix("torch.")]
    for name in calls:
        cells.append(f"{wall[name].median / copies * 1e6:.1f}")
    cells.append(f"{wall['inductor'].ratio_to(wall['omni']):.2f}x")
    if device == "cuda":
        replays = {name: captured(call) for name, call in calls.items()}
        timing = interleave(replays, rounds=rounds, seconds=seconds, device=device)
        cells += [f"{timing[name].median / copies * 1e6:.1f}" for name in calls]
        cells.append(f"{timing['inductor'].ratio_to(timing['omni']):.2f}x")
    else:
        cells += ["", "", ""]
    return [*cells, state, f"{error:.1e} / {own:.1e}"]


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A call as a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    graph.kept = kept  # type: ignore[attr-defined]
    return graph.replay


@torch.no_grad()
def elementwise_rows(rounds: int, seconds: float) -> list[list[str]]:
    """What Inductor reaches in computations that were considered, against the time of moving their bytes."""
    device, dtype = "cuda", torch.bfloat16
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        wide = total.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, total

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def products(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, gate), F.linear(x, up)

    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    x, weight = make(4, 4096, 4096), make(4096)
    q, k, angle = make(4, 32, 4096, 128), make(4, 8, 4096, 128), make(4096, 128)
    gate, up = make(14336, 4096), make(14336, 4096)
    cases: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], int]] = [
        ("RMSNorm and residual, 16384 x 4096", norm, (x, x.clone(), weight), 8 * x.numel()),
        (
            "rotary embedding of q and k, 4 x 4096 x (32 + 8) x 128",
            rotary,
            (q, k, angle, angle),
            4 * (q.numel() + k.numel()),
        ),
    ]
    timing = interleave({"copy": lambda: copy.copy_(source)}, rounds=rounds, seconds=seconds, device=device)
    bandwidth = 2 * source.numel() / timing["copy"].median
    lines = []
    for name, function, inputs, size in cases:
        torch.compiler.reset()
        call = torch.compile(function, dynamic=False)
        replay = captured(lambda call=call, inputs=inputs: call(*inputs))
        found = interleave({"inductor": replay}, rounds=rounds, seconds=seconds, device=device)["inductor"].median
        limit = size / bandwidth
        lines.append([name, f"{found * 1e6:.1f}", f"{limit * 1e6:.1f}, its bytes copied", f"{limit / found:.2f}"])
    torch.compiler.reset()
    call = torch.compile(swiglu, dynamic=False)
    inputs = (x[0], gate, up)
    replays = {
        "inductor": captured(lambda: call(*inputs)),
        "products": captured(lambda: products(*inputs)),
    }
    found = interleave(replays, rounds=rounds, seconds=seconds, device=device)
    ratio = found["products"].median / found["inductor"].median
    lines.append(
        [
            "SwiGLU, 4096 x 4096 x 14336",
            f"{found['inductor'].median * 1e6:.1f}",
            f"{found['products'].median * 1e6:.1f}, its two products alone",
            f"{ratio:.2f}",
        ]
    )
    return lines


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--part", choices=("loss", "int8", "elementwise"), help="only this one")
    parser.add_argument("--all", action="store_true", help="also sizes that the checks refuse")
    parser.add_argument("--no-errors", action="store_true", help="leave out float64")
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 15)
    seconds = 0.02 if options.quick else 0.1
    device = options.device
    print(machine(device), flush=True)
    with unchecked() if options.all else contextlib.nullcontext():
        if options.part in (None, "loss"):
            header = ["tokens x classes x features", "weight", "Inductor, ms", "omni, ms", "speed"]
            header += ["Inductor, GiB", "omni, GiB", "memory", "override", "errors omni / eager"]
            sizes = LOSSES[device][:1] if options.quick else LOSSES[device]
            table = []
            for size in sizes:
                affordable = size[0] * size[1] < 2**31  # in float64 the logits alone take 16 GiB then
                table.append(loss_row(size, device, rounds, seconds, affordable and not options.no_errors))
                print(" | ".join(table[-1]), flush=True)
                if device == "cuda":
                    torch.cuda.empty_cache()
            print(markdown_table(header, table))
        if options.part in (None, "int8"):
            header = ["rows x outputs x features", "dtype", "Inductor, us", "omni, us", "speed"]
            header += ["Inductor, graph, us", "omni, graph, us", "speed", "override", "error omni / eager"]
            dtypes = (torch.bfloat16,) if device == "cuda" else (torch.bfloat16, torch.float32)
            sizes_of = LAYERS[device][:1] if options.quick else LAYERS[device]
            table = []
            for dtype in dtypes:
                for layer in sizes_of:
                    table.append(layer_row(layer, dtype, device, rounds, seconds))
                    print(" | ".join(table[-1]), flush=True)
            print(markdown_table(header, table))
        if options.part in (None, "elementwise") and device == "cuda":
            print(markdown_table(["what", "Inductor, us", "limit, us", "reached"], elementwise_rows(rounds, seconds)))


if __name__ == "__main__":
    main()
