import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnicomp._torch.repairs.random_numbers import NEEDED

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "product": lambda x: x * random.uniform(0, 1),
    "python's arithmetic": lambda x: x * (random.uniform(0, 1) * 2 + 1),
    "an integer tensor": lambda x: x.long() * random.uniform(1, 2),
    "a tensor of it": lambda x: x + torch.tensor(random.uniform(0, 1)),
    "returned": lambda x: (x * 2, random.uniform(0, 1)),
    "in place": lambda x: x.clone().mul_(random.uniform(0, 1)),
    "an integer": lambda x: x * random.randint(1, 9),
}


def calls(function: Callable[..., Any], dtype: torch.dtype) -> list[Any]:
    random.seed(0)
    return [function(torch.tensor([1.25, -0.5], dtype=dtype)) for _ in range(2)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_have_the_dtypes_and_the_precision_of_eager(name: str, dtype: torch.dtype) -> None:
    program = PROGRAMS[name]
    compiled = torch.compile(program, backend="omni", options={"lowerings": ["eager"]})
    # From torch 2.15 on Dynamo announces a tensor of doubles, whose dtype any backend has to go by.
    eager = program if NEEDED.here else torch.compile(program, backend="eager")
    torch.testing.assert_close(calls(compiled, dtype), calls(eager, dtype), rtol=0, atol=0)


@pytest.mark.inductor
def test_generated_code_reads_a_random_number_as_it_is_passed() -> None:
    program = PROGRAMS["product"]
    torch.testing.assert_close(
        calls(torch.compile(program, backend="omni"), torch.float32), calls(program, torch.float32)
    )


def test_importing_the_package_draws_no_random_number() -> None:
    code = "import random; state = random.getstate(); import omnicomp; assert random.getstate() == state"
    subprocess.run([sys.executable, "-c", code], check=True)
