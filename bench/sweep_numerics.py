"""Of which pointwise operators does Inductor's code give eager's bits, where it is asked to round as eager does?

    python bench/sweep_numerics.py [--seconds 3600] [--dtypes float32 bfloat16]

Each operator of one or two operands is compared bit for bit: on all float16 and bfloat16 numbers and float32 numbers of
all magnitudes, and on pairs of these; contiguous and transposed, and of a length that leaves a rest beside vectors.
Several operators share generated code, as in a model. Random programs of the operators that never differed follow. The
result is `omnicomp/lowerings/exact_operators.py`, for `options={"numerics": "eager"}`; dtypes that are not asked for
are left as they are there.
"""

import argparse
import datetime
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._python_dispatch import TorchDispatchMode

from omnicomp.analysis.accuracy import differences
from omnicomp.lowerings.exact import key_of
from omnicomp.lowerings.exact_operators import EXACT_OPERATORS

RESULT = Path(__file__).parents[1] / "omnicomp" / "lowerings" / "exact_operators.py"
COMPILED: dict[str, Any] = {
    "backend": "omni",
    "options": {
        "emulate_precision_casts": True,
        "eager_numerics.division_rounding": True,
        "use_joint_graph_passes": False,
        "progress": False,
    },
}
GROUP = 24  # functions in one compilation
ACTIVATIONS = (
    "gelu silu mish hardswish hardsigmoid hardtanh elu selu celu softplus relu6 leaky_relu logsigmoid softshrink"
)
_aten: Any = torch.ops.aten
UNARY: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda x: x.clamp(0, 1),
    "clamp_min": lambda x: x.clamp_min(0),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rsub": lambda x: 1 - x,
    **{f"pow {e}": (lambda x, e=e: x**e) for e in (0.5, -0.5, 2, 2.3, 3)},
    **{f"add {n}": (lambda x, n=n: x + n) for n in (1e-6, 0.1, 3)},
    **{f"sub {n}": (lambda x, n=n: x - n) for n in (0.1, 1)},
    **{f"mul {n}": (lambda x, n=n: x * n) for n in (0.1, 1 / 3, 0.044715, -2)},
    **{f"div {n}": (lambda x, n=n: x / n) for n in (0.1, 3, 0.9, 7.0)},
    **{
        f"{name} {n}": (lambda x, n=n, f=f: f(x, n))
        for n in (0.1, 3)
        for name, f in (
            ("gt", torch.gt),
            ("lt", torch.lt),
            ("ge", torch.ge),
            ("le", torch.le),
            ("eq", torch.eq),
            ("ne", torch.ne),
        )
    },
    **{f"remainder {n}": (lambda x, n=n: x % n) for n in (3, -0.7)},
    **{f"floor {n}": (lambda x, n=n: x // n) for n in (3, 0.1)},
}
BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add 0.3": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub 0.3": lambda x, y: torch.sub(x, y, alpha=0.3),
    "lerp 0.3": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.3),
    "threshold_backward": lambda x, y: _aten.threshold_backward(x, y, 0),
    "gelu_backward": lambda x, y: _aten.gelu_backward(x, y),
    "gelu_backward tanh": lambda x, y: _aten.gelu_backward(x, y, approximate="tanh"),
    "silu_backward": lambda x, y: _aten.silu_backward(x, y),
    "sigmoid_backward": lambda x, y: _aten.sigmoid_backward(x, y),
    "tanh_backward": lambda x, y: _aten.tanh_backward(x, y),
    "hardswish_backward": lambda x, y: _aten.hardswish_backward(x, y),
    "hardtanh_backward": lambda x, y: _aten.hardtanh_backward(x, y, -1, 1),
    "leaky_relu_backward": lambda x, y: _aten.leaky_relu_backward(x, y, 0.01, False),
}


class Called(TorchDispatchMode):
    """The operators of ATen that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.append(key_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a half precision, or float32 numbers of all magnitudes."""
    if dtype is torch.int64:
        return torch.cat([torch.arange(-(2**15), 2**15), torch.randint(-(2**40), 2**40, (2**16,))])
    if dtype is not torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    any_bits = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(dtype)
    return torch.cat([(torch.arange(-(2**15), 2**15) << 16).to(torch.int32).view(dtype), any_bits, torch.randn(2**16)])


def one_operator(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[str, Any] | None:
    """The operator that a function is, and its result; None if it is several, a cast, or not for these inputs."""
    try:
        with Called() as called:
            result = function(*inputs)
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):
        return None
    return (
        (called.names[0], result)
        if len(called.names) == 1 and not called.names[0].startswith("aten._to_copy")
        else None
    )


def layouts(*inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """The numbers contiguous, transposed, and some of them, of a length that is no multiple of a vector's.

    Then each pair of zeros, ones, infinities, NaN and the smallest numbers, in vectors, and one by one: code for what
    is left beside vectors may order zeros otherwise.
    """
    tiny = torch.finfo(inputs[0].dtype).tiny if inputs[0].is_floating_point() else 2
    special = torch.tensor([0.0, -0.0, 1, -1, float("inf"), -float("inf"), float("nan"), tiny, -tiny])
    special = (special if inputs[0].is_floating_point() else torch.tensor([0, 1, -1, 2, -2])).to(inputs[0].dtype)
    pairs = torch.cartesian_prod(special, special).unbind(-1)[: len(inputs)]
    return [
        inputs,
        tuple(x.reshape(-1, 128).t() for x in inputs),
        tuple(x[torch.randperm(len(x))[:1003]] for x in inputs),
        tuple(x.repeat(16) for x in pairs),
        tuple(x.repeat_interleave(3).reshape(-1, 3)[:, :2] for x in pairs),
    ]


def compare(functions: dict[str, Callable[..., Any]], variants: list[tuple[Tensor, ...]]) -> list[str]:
    """The names of the functions that differ in a bit, all compiled together."""
    torch.compiler.reset()
    chosen = list(functions.values())

    def together(*variants: Any) -> Any:
        return [f(*inputs) for f in chosen for inputs in variants]

    found, expected = torch.compile(together, **COMPILED)(*variants), together(*variants)
    count = len(variants)
    names = enumerate(functions)
    return [n for i, n in names if differences(found[i * count :][:count], expected[i * count :][:count])]


def program(seed: int, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A random program of some functions, each of which takes what was computed before; returns every value."""
    draw = random.Random(seed)
    steps = [(draw.choice(list(functions)), draw.random(), draw.random()) for _ in range(30)]

    def run(*inputs: Tensor) -> list[Tensor]:
        values = [*inputs]
        for name, first, second in steps:
            operands = [values[int(at * len(values))] for at in (first, second)][: 1 if name in UNARY else 2]
            values.append(functions[name](*operands))
        return values

    return run


def sweep(dtype: torch.dtype, until: float) -> dict[str, bool]:
    """The operators of ATen that were compared, and whether none of their functions differed."""
    unary = {op.name: op.op for op in op_db if isinstance(op, UnaryUfuncInfo) and not op.variant_test_name}
    unary |= {name: getattr(F, name) for name in ACTIVATIONS.split()}
    unary = {name: f for name, f in unary.items() if "special" not in name} | UNARY
    UNARY.update(unary)
    binary = {op.name: op.op for op in op_db if isinstance(op, BinaryUfuncInfo) and not op.variant_test_name}
    binary = {name: f for name, f in binary.items() if "special" not in name and "polynomial" not in name} | BINARY
    x = numbers(dtype)
    pairs = x, x[torch.randperm(len(x))]
    exact: dict[str, bool] = {}
    chained: dict[str, Callable[..., Any]] = {}
    for functions, inputs in ((unary, (x,)), (binary, pairs)):
        operators = {name: found[0] for name, f in functions.items() if (found := one_operator(f, inputs)) is not None}
        names = list(operators)
        for group in (names[start : start + GROUP] for start in range(0, len(names), GROUP)):
            if time.monotonic() > until:
                raise SystemExit("not finished; nothing was written")
            differing = compare({name: functions[name] for name in group}, layouts(*inputs))
            print(dtype, len(group), "compared; these differ:", *differing, flush=True)
            for name in group:
                exact[operators[name]] = exact.get(operators[name], True) and name not in differing
        chained |= {name: functions[name] for name in names}
    chained = {
        name: f
        for name, f in chained.items()
        if (found := one_operator(f, (x,) if name in UNARY else pairs))
        and exact[found[0]]
        and getattr(found[1], "dtype", None) == dtype
    }
    programs = {f"program {seed}": program(seed, chained) for seed in range(4)}
    for name, f in programs.items():
        if compare({name: lambda *inputs, f=f: f(*inputs)[-1]}, layouts(*pairs)):
            raise SystemExit(f"{name} of {dtype} differs, though its operators do not: {', '.join(chained)}")
    return exact


def main() -> None:
    """Sweep, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16", "int64"])
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    table = {name: set(dtypes).difference(arguments.dtypes) for name, dtypes in EXACT_OPERATORS.items()}
    for dtype in arguments.dtypes:
        for name, equal in sweep(getattr(torch, dtype), until).items():
            if equal:
                table.setdefault(name, set()).add(dtype)
    rows = [f"    {name!r}: {tuple(sorted(dtypes))!r},\n" for name, dtypes in sorted(table.items()) if dtypes]
    RESULT.write_text(
        '"""Operators of which Inductor\'s code gives eager\'s bits; bench/sweep_numerics.py writes this.\n\n'
        f'On {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, with torch {torch.__version__} on a CPU.\n"""\n\n'
        "from typing import Final\n\n"
        f"EXACT_OPERATORS: Final[dict[str, tuple[str, ...]]] = {{\n{''.join(rows)}}}\n"
        '"""By the operator, and whether it takes a number of the program, the dtypes in which no result differed."""\n'
    )


if __name__ == "__main__":
    main()
