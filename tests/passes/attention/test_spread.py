"""Attention of distributed tensors: each rank's own heads are fused, and what is spread otherwise stays as it is."""

import json

import pytest
import torch
from processes import python

PROGRAM = """
import json, math, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import omnicomp

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
given = json.loads(sys.argv[1])
place = {"heads": (Shard(1),) * 3, "batches": (Shard(0),) * 3, "queries": (Shard(2), Replicate(), Replicate()),
         "values": (Shard(1), Shard(1), Replicate()), "all": (Shard(2),) * 3, "nothing": (Replicate(),) * 3}

def attention(q, k, v):
    return (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v

def run(call):
    torch.manual_seed(0)
    # Beside a batch of more than one, DTensor's product with replicated values ends the graph (torch 2.13).
    one = given["place"] == "values"
    shapes = [(1, 8 if where == Replicate() else 4) if one else (2, 4) for where in place[given["place"]]]
    inputs = [DTensor.from_local(torch.randn(*shape, 6, 16), mesh, [where], run_check=False).requires_grad_()
              for shape, where in zip(shapes, place[given["place"]])]
    result = call(*inputs)
    result.to_local().pow(2).sum().backward()
    return [result, *(each.grad for each in inputs)]

if given["patched"]:
    def other(*args, **kwargs):
        raise AssertionError("the program calls no such function")
    F.scaled_dot_product_attention = other
plain = [torch.randn(2, 4, 6, 16) for _ in range(3)] if given["patched"] else None
options = {"lowerings": ["eager"]}
compiled = torch.compile(attention, backend="omni", options=options)
equal = []
if plain:
    equal = [torch.allclose(compiled(*plain), attention(*plain), atol=1e-5)]
else:
    for own, its in zip(run(compiled), run(attention)):
        equal += [own.placements == its.placements, torch.allclose(own.to_local(), its.to_local(), atol=1e-5)]
events = omnicomp.timeline.events()
print(json.dumps({
    "equal": all(equal), "fused": [e.target for e in events if e.type == "rewrite"],
    "missed": [e.reason.sentence for e in events if e.type == "near_miss"],
    "observed": [e.reason.observed for e in events if e.type == "near_miss"],
    "retreats": [e.reason.sentence for e in events if e.type == "retreat"],
}))
"""


def run(place: str, *, patched: bool = False) -> dict[str, list[str]]:
    given = json.dumps({"place": place, "patched": patched})
    done = python("-c", PROGRAM, given, check=True, timeout=120)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], found
    assert not found["retreats"], found
    return found


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo of torch 2.11 fails on a product of tensors sharded along heads"
)
@pytest.mark.parametrize("place", ["heads", *(pytest.param(p, marks=pytest.mark.slow) for p in ("batches", "nothing"))])
def test_whole_heads_of_a_rank_are_fused(place: str) -> None:
    found = run(place)
    assert found["fused"] == ["scaled_dot_product_attention"]
    assert not found["missed"]


@pytest.mark.parametrize("place", ["queries", pytest.param("all", marks=pytest.mark.slow)])
def test_what_is_spread_otherwise_stays_with_the_reason(place: str) -> None:
    found = run(place)
    assert not found["fused"]
    assert "spread over ranks" in found["missed"][0]


@pytest.mark.slow
def test_values_that_are_replicated_beside_sharded_keys_are_named() -> None:
    found = run("values")
    assert not found["fused"]
    assert found["observed"] == ["queries Shard(dim=1), keys Shard(dim=1), values Replicate()"]


def test_a_function_in_the_place_of_torchs_attention_is_not_called_by_a_rewrite() -> None:
    """Context parallel replaces `torch.nn.functional.scaled_dot_product_attention` while a model is traced."""
    assert run("heads", patched=True)["fused"] == ["scaled_dot_product_attention"]
