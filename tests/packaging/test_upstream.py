"""The changes of docs/upstream apply to the sources that they are for, and do what they say."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parents[2]

# The module alone: the rest of torchtitan needs Triton, and more.
TORCHTITAN = """
import sys, types
for name, values in {
    "torchtitan": {}, "torchtitan.tools": {}, "torchtitan.models": {}, "torchtitan.models.common": {},
    "torchtitan.config": {"CompileConfig": object}, "torchtitan.distributed.parallel_dims": {"ParallelDims": object},
    "torchtitan.tools.logging": {"logger": types.SimpleNamespace(info=print)},
    "torchtitan.models.common.attention": {"FlexAttention": __import__("torch").nn.Linear},
}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)
import torch
own = {}
exec(open("torchtitan/distributed/compile.py").read(), own)
chosen = own["_maybe_regional_inductor_backend"]
flex, other = torch.nn.Linear(1, 1), torch.nn.ReLU()
assert [chosen(flex, name) for name in ("inductor", "omni")] == ["inductor", "omni"]
assert chosen(other, "eager") == "eager" and callable(chosen(flex, "aot_eager"))
try:
    chosen(flex, "eager")
except ValueError:
    print("refused")
"""


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch")
def test_the_change_to_torchtitan(tmp_path: Path) -> None:
    checkout = os.environ.get("OMNICOMP_TORCHTITAN", "")
    if not checkout:
        pytest.skip("needs torchtitan's sources: OMNICOMP_TORCHTITAN=<a checkout>")
    (tmp_path / "torchtitan" / "distributed").mkdir(parents=True)
    shutil.copy(Path(checkout) / "torchtitan" / "distributed" / "compile.py", tmp_path / "torchtitan" / "distributed")
    change = (ROOT / "docs" / "upstream" / "torchtitan.patch").read_text()
    done = subprocess.run(["patch", "-p1"], cwd=tmp_path, input=change, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    done = python("-c", TORCHTITAN, folder=tmp_path, check=True)
    assert done.stdout.endswith("refused\n")
