"""Which pointwise operators does Inductor round otherwise than eager, also where it is asked not to?

    python bench/sweep_numerics.py [--seconds 600]

Each unary operator of PyTorch's database is compared bit for bit on all float16 and bfloat16 numbers, and on float32
numbers of all magnitudes; each binary one on pairs of those, and polynomials on small degrees. What differs is written
to `omnicomp/options/eager_operators.py`, for `options={"numerics": "eager"}`.
"""

import argparse
import datetime
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

RESULT = Path(__file__).parents[1] / "omnicomp" / "options" / "eager_operators.py"
COMPILED: dict[str, Any] = {
    "backend": "omni",
    "options": {"emulate_precision_casts": True, "eager_numerics.division_rounding": True},
}
ACTIVATIONS = (
    "gelu silu mish hardswish hardsigmoid hardtanh elu selu celu softplus relu6 leaky_relu logsigmoid softshrink"
)
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(0, 1),
    "clamp_min": lambda x: x.clamp_min(0),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    **{f"pow {e}": (lambda x, e=e: x**e) for e in (0.5, -0.5, 2.3, 3)},
    **{f"remainder {n}": (lambda x, n=n: x % n) for n in (3, -0.7)},
    **{f"floor {n}": (lambda x, n=n: x // n) for n in (3, 0.1)},
}


class Called(TorchDispatchMode):
    """The operators of ATen that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


def numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a half precision, or float32 numbers of all magnitudes."""
    if dtype is not torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    any_bits = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(dtype)
    return torch.cat([(torch.arange(-(2**15), 2**15) << 16).to(torch.int32).view(dtype), any_bits, torch.randn(2**16)])


def differs(expected: Any, found: Any) -> bool:
    """Whether two results differ in more than the payload of a NaN."""
    if not isinstance(expected, Tensor):
        return any(map(differs, expected, found))
    if expected.is_complex():
        return False
    if expected.dtype != found.dtype or not expected.is_floating_point():
        return expected.dtype != found.dtype or not torch.equal(expected, found)
    same = (expected == found) & (expected.signbit() == found.signbit()) | (expected.isnan() & found.isnan())
    return not bool(same.all())


def one_operator(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[str, Any] | None:
    """The operator that a function is, and its result; None if it is several, a cast, or not for these inputs."""
    try:
        with Called() as called:
            result = function(*inputs)
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):
        return None
    return (called.names[0], result) if len(called.names) == 1 and called.names[0] != "aten._to_copy" else None


def main() -> None:
    """Sweep, and write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    until = time.monotonic() + parser.parse_args().seconds
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    unary = {op.name: op.op for op in op_db if isinstance(op, UnaryUfuncInfo) and not op.variant_test_name}
    unary |= {name: getattr(F, name) for name in ACTIVATIONS.split()} | NUMBERS
    binary = {op.name: op.op for op in op_db if isinstance(op, BinaryUfuncInfo) and not op.variant_test_name}
    polynomials = {name: binary.pop(name) for name in list(binary) if "polynomial" in name}
    differing: dict[str, set[str]] = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = numbers(dtype)
        pairs = x, x[torch.randperm(len(x))]
        degrees = x, torch.randint(-2, 64, x.shape).to(dtype)  # their kernels count up to it
        for functions, inputs in ((unary, (x,)), (binary, pairs), (polynomials, degrees)):
            eager = {name: found for name, f in functions.items() if (found := one_operator(f, inputs)) is not None}
            names = list(eager)
            for group in (names[start : start + 16] for start in range(0, len(names), 16)):
                if time.monotonic() > until:
                    raise SystemExit("not finished; nothing was written")
                torch.compiler.reset()
                chosen = [functions[name] for name in group]
                compiled = torch.compile(lambda *values, chosen=chosen: [f(*values) for f in chosen], **COMPILED)
                for name, found in zip(group, compiled(*inputs), strict=True):
                    operator, expected = eager[name]
                    if differs(expected, found):
                        differing.setdefault(operator, set()).add(str(dtype)[6:])
                        print(name, operator, dtype, flush=True)
    rows = [f"    {name!r}: {tuple(sorted(dtypes))!r},\n" for name, dtypes in sorted(differing.items())]
    RESULT.write_text(
        '"""Operators that Inductor rounds otherwise than eager; bench/sweep_numerics.py writes this.\n\n'
        f'On {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, with torch {torch.__version__} on a CPU.\n"""\n\n'
        "from typing import Final\n\n"
        '__all__ = ["EAGER_OPERATORS"]\n\n'
        f"EAGER_OPERATORS: Final[dict[str, tuple[str, ...]]] = {{\n{''.join(rows)}}}\n"
        '"""By the name of the operator, the dtypes in which a result differed."""\n'
    )


if __name__ == "__main__":
    main()
