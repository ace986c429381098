"""Kernels in Inductor's generated Triton code that cast, and compute nothing else."""

import contextlib
import dataclasses
import re
from collections.abc import Generator
from unittest import mock

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.MULTILINE | re.DOTALL)
_LAUNCH = re.compile(r"^\s+(\w+)\.run\((.*)\)$", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:extern_kernels\.|torch\.ops\.|buf\d+ = torch\.ops\.)", re.MULTILINE)
_STEP = re.compile(r"^\s+tmp\d+ = (.*)$", re.MULTILINE)
_MOVE = re.compile(r"tl\.load\(.*|tmp\d+\.to\(tl\.\w+\)|tmp\d+")
_TENSOR = re.compile(r"'(?:in|out)_ptr\d+': '\*(\w+)'")
_BUFFER = re.compile(r"\b(?:primals_\d+|arg\d+_\d+|tangents_\d+|buf\d+)\b")


@dataclasses.dataclass
class Kernels:
    """How many kernels one call launches.

    Attributes:
        launches: of Triton's kernels, and calls of libraries.
        of_inputs: casts of what the graph is given: weights, in training.
        of_outputs: casts that are results of a backward: gradients.
        others: casts of anything else.
    """

    launches: int = 0
    of_inputs: int = 0
    of_outputs: int = 0
    others: int = 0

    def __str__(self) -> str:
        return f"{self.launches}, {self.of_inputs} + {self.of_outputs} + {self.others} casts"


@contextlib.contextmanager
def generated_code() -> Generator[list[str]]:
    """Collect the code of the graphs that Inductor compiles, or finds in its cache, meanwhile."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", codes.append):
        yield codes


def count(codes: list[str]) -> Kernels:
    """Count the kernels of all graphs together; each graph once, and casts by what they read or write."""
    total = Kernels()
    for code in dict.fromkeys(codes):
        casts = {name for name, body in _KERNEL.findall(code) if _only_casts(body)}
        returned = set(_BUFFER.findall(code[code.rfind("return (") :]))
        backward = "tangents_" in code
        total.launches += len(_EXTERN.findall(code))
        for name, given in _LAUNCH.findall(code):
            total.launches += 1
            if name not in casts:
                continue
            buffers = _BUFFER.findall(given)
            if buffers[0].startswith(("primals_", "arg")):
                total.of_inputs += 1
            elif backward and returned.intersection(buffers[1:]):
                total.of_outputs += 1
            else:
                total.others += 1
    return total


def _only_casts(body: str) -> bool:
    steps = _STEP.findall(body)
    loads = sum(step.startswith("tl.load(") for step in steps)
    stores = body.count("tl.store(")
    dtypes = set(_TENSOR.findall(body))
    return loads == 1 and stores == 1 and len(dtypes) > 1 and all(_MOVE.fullmatch(step) for step in steps)
