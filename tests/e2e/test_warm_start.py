"""A second process, started warm from the caches, tells the same story as the first."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from processes import python

PROGRAM = """
import json, sys, torch, omnicomp
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(torch.digamma(torch.tanh(self.first(x)) + 3)).softmax(-1)

@omnicomp.override(op=torch.ops.aten.digamma.default, dtypes=(torch.float32,))
def fast_digamma(x):
    return torch.special.digamma(x)

@omnicomp.override(op=torch.ops.aten.tanh.default, dtypes=(torch.float64,))
def fast_tanh(x):
    return torch.tanh(x)

torch.manual_seed(0)
torch.compiler.config.cache_key_tag = sys.argv[3]
model = Model()
compiled = torch.compile(model, backend=sys.argv[1])
loss = compiled(torch.randn(4, 8)).square().sum()
loss.backward()
with torch.no_grad():
    compiled(torch.randn(int(sys.argv[2]), 8))
    compiled(torch.randn(int(sys.argv[2]) + 1, 8))
counters = dict(torch._dynamo.utils.counters["aot_autograd"])
print(json.dumps({
    "loss": float(loss),
    "hits": counters.get("autograd_cache_hit", 0),
    "misses": counters.get("autograd_cache_miss", 0),
    "stable": omnicomp.audit().stable(),
    "levels": omnicomp.timeline.backend_timeline(),
    "ran": sorted(e.subgraph for e in omnicomp.timeline.events() if e.type == "ran"),
    "hit_events": sum(e.type == "cache" and e.verdict == "hit" for e in omnicomp.timeline.events()),
}))
"""


def run(program: Path, tag: str, backend: str = "omni", rows: int = 5, *, fresh: bool = False) -> dict[str, Any]:
    """Run the program in a process of its own.

    A fresh tag makes the caches cold as a fresh folder would, without compiling Inductor's C++ headers again.
    """
    result = python(program, backend, rows, tag, fresh=fresh, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.inductor
def test_a_warm_start_shows_the_audit_of_the_cold_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tag = uuid.uuid4().hex
    cold, warm = run(program, tag), run(program, tag, fresh=True)
    assert (cold["hits"], cold["misses"]) == (0, 2)
    assert (warm["hits"], warm["misses"]) == (2, 0), "AOTAutograd's cache skipped our callbacks"
    assert warm["hit_events"] == 3, "forward and backward of one graph, inference of the other"
    assert warm["stable"] == cold["stable"]
    checked = [each["name"] for graph in warm["stable"]["graphs"] for each in graph["certificates"]]
    assert checked == ["fast_digamma", "fast_digamma"]
    assert warm["levels"] == cold["levels"]
    assert (
        warm["ran"]
        == cold["ran"]
        == [
            "g0.backward.0",
            "g0.forward.0",
            "g0.forward.0/fast_digamma",
            "g1.inference.0",
            "g1.inference.0/fast_digamma",
        ]
    )
    assert warm["loss"] == cold["loss"]


@pytest.mark.inductor
def test_artefacts_of_inductor_and_of_omni_are_never_taken_for_each_other(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tag = uuid.uuid4().hex
    run(program, tag, "inductor")
    ours = run(program, tag)
    assert (ours["hits"], ours["misses"]) == (0, 2)
    theirs = run(program, tag, "inductor")
    assert (theirs["hits"], theirs["misses"]) == (2, 0)
    assert theirs["ran"] == []
