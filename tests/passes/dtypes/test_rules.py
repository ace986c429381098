"""Rules of a policy: which one decides, and that any floating-point operator can be given a dtype."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered import Backend, Block, check, compiled, error, rand
from torch import nn

from omnicomp.options.dtype_policy import parse_dtype_policy
from omnicomp.timeline import NearMiss, Rewrite

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(self.norm(x)).softmax(-1)


def run(function: Any, *args: Any, **policy: Any) -> Backend:
    return check(function, *args, policy=parse_dtype_policy(policy))


def dtypes(backend: Backend) -> dict[str, set[str]]:
    """The dtypes of the rewritten operators, by their modules."""
    found: dict[str, set[str]] = {}
    for event in backend.of(Rewrite):
        found.setdefault(event.module, set()).add(event.target)
    return found


@pytest.mark.parametrize(
    "selector", ["linear", "torch.nn.functional.linear", "aten.linear", "matrix", "lin*", "*", "layers.*"]
)
def test_keep_takes_operators_classes_modules_and_wildcards(selector):
    backend = run(Model(), rand(4, 8), compute="bf16", keep=[selector])
    left = {"head": {"bfloat16"}} if selector == "layers.*" else {}
    assert dtypes(backend) == left


@pytest.mark.parametrize("selector", ["linear_1", "layers.1"])
def test_a_node_and_a_module_are_kept(selector):
    backend = run(Model(), rand(4, 8), compute="bf16", keep=[selector])
    assert set(dtypes(backend)) == {"layers.0", "layers.2", "head"}


def test_node_then_keep_then_ops_then_modules_then_compute():
    policy = {
        "compute": "bf16",
        "modules": {"layers.0": "fp16", "head": "fp16"},
        "ops": {"linear_1": "fp16", "linear_3": "fp16"},
        "keep": ["head", "layers.2"],
    }
    backend = run(Model(), rand(4, 8), **policy)
    # linear_3 is the head: its own rule comes before keep. gelu is in no module of the list but the first.
    assert dtypes(backend) == {"layers.0": {"float16"}, "layers.1": {"float16"}, "head": {"float16"}}
    backend = run(Model(), rand(4, 8), compute="bf16", modules={"layers.*": "fp16"}, ops={"linear": "bf16"})
    assert set().union(*dtypes(backend).values()) == {"bfloat16"}


def test_the_last_entry_of_a_mapping_decides():
    backend = run(Model(), rand(4, 8), modules={"layers.*": "bf16", "layers.1": "fp16"})
    assert dtypes(backend) == {"layers.0": {"bfloat16"}, "layers.1": {"float16"}, "layers.2": {"bfloat16"}}
    backend = run(Model(), rand(4, 8), modules={"layers.1": "fp16", "layers.*": "bf16"})
    assert dtypes(backend)["layers.1"] == {"bfloat16"}


@pytest.mark.parametrize(
    ("selector", "function", "aten"),
    [
        ("softmax", lambda x: x.softmax(-1), "_softmax"),
        ("norm", lambda x: F.layer_norm(x, (8,)), "native_layer_norm"),
        ("gelu", F.gelu, "gelu"),
        ("pointwise", lambda x: x * 2 + x, "mul"),
        ("reduction", lambda x: x.mean(-1), "mean"),
        ("torch.exp", lambda x: torch.exp(x), "exp"),
        ("Tensor.cumsum", lambda x: x.cumsum(-1), "cumsum"),
        ("add", lambda x: x + 1, "add"),
        ("wide", lambda x: torch.var_mean(x, -1)[1], "var_mean"),
    ],
)
def test_any_operator_can_be_given_a_low_dtype(selector, function, aten):
    backend = run(function, rand(4, 8), ops={selector: "bf16"})
    assert backend.seen[aten] == {BF16}
    assert all(f"by ops {selector!r}" in event.detail for event in backend.of(Rewrite))


def test_a_chain_of_operators_stays_in_the_low_dtype():
    backend = run(lambda x: F.gelu(x * 2).view(2, -1).tanh().sum(-1), rand(4, 8), ops={"pointwise": "bf16"})
    assert [n.args[1] for n in backend.casts()] == [BF16, FP32]


def test_two_low_dtypes_in_one_graph():
    q = nn.Linear(8, 8)

    def function(x):
        h = q(x)
        return h @ h.mT, torch.bmm(h[None], h.mT[None]), h

    backend = run(function, rand(8, 8), compute="bf16", ops={"bmm": "fp16"})
    assert backend.seen["bmm"] == {FP16}
    assert backend.seen["mm"] == {BF16}


def test_a_wide_dtype_inside_a_model_of_half_precision():
    model = Model().bfloat16()
    backend = run(model, rand(4, 8).bfloat16(), modules={"head": "fp32"}, ops={"softmax": "fp32"})
    assert backend.seen["_softmax"] == {FP32}
    assert backend.seen["addmm"] == {BF16, FP32}
    assert backend.seen["native_layer_norm"] == {BF16}
    # Nothing between the head and the softmax is rounded.
    assert len(backend.casts(BF16)) == 1


@pytest.mark.parametrize(
    ("function", "aten"),
    [
        (lambda x: x.softmax(-1), "_softmax"),
        (lambda x: F.layer_norm(x, (8,)), "native_layer_norm"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: x.exp(), "exp"),
        (lambda x: x.var(), "var"),
        (lambda x: torch.linalg.vector_norm(x), "linalg_vector_norm"),
        (lambda x: F.cross_entropy(x, torch.arange(4)), "_log_softmax"),
    ],
)
def test_accumulate_in_float64(function, aten):
    x = rand(4, 8)
    fn, backend = compiled(function, parse_dtype_policy({"accumulate": "fp64"}))
    with torch.no_grad():
        actual = fn(x)
    assert backend.seen[aten] == {FP64}
    assert actual.dtype == FP32
    assert error(actual, function(x.double())) < 2**-24


def test_gradients_of_forced_operators():
    policy = parse_dtype_policy({"compute": "bf16", "ops": {"gelu": "fp16"}, "accumulate": "fp64"})
    block, x = Block(), rand(2, 8, 32)
    fn, _ = compiled(block, policy, training=True)
    fn(x).sum().backward()
    got = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block(x).sum().backward()
    for mine, p in zip(got, block.parameters(), strict=True):
        assert mine.dtype == FP32
        assert error(mine, p.grad) < 6e-2 or p.grad.abs().max() < 1e-4


def test_what_writes_views_or_says_its_dtype_stays_and_is_told():
    norm = nn.BatchNorm1d(8)

    def function(x):
        norm(x)
        return x.softmax(-1, dtype=FP32), F.relu(x + 0, inplace=True)

    backend = run(function, rand(4, 8), ops={"norm": "bf16", "softmax": "bf16", "relu": "bf16"})
    assert not backend.of(Rewrite)
    assert [m.reason.code for m in backend.of(NearMiss)] == ["unsupported_op"] * 3
    assert norm.running_mean.abs().sum() > 0


def test_a_forced_dtype_does_not_reach_integers_angles_and_float64():
    def function(x, i, d):
        return (x @ i.float()).sin(), i * 2, d * 2

    args = rand(4, 4), torch.arange(4000, 4016).view(4, 4), rand(4).double()
    fn, backend = compiled(function, parse_dtype_policy({"modules": {"*": "bf16"}}))
    for got, want in zip(fn(*args)[1:], function(*args)[1:], strict=True):
        torch.testing.assert_close(got, want)
    assert "mm" not in {e.detail.split()[0] for e in backend.of(Rewrite)}
    assert "not_equal" in {m.reason.code for m in backend.of(NearMiss)}


def test_the_node_itself_can_be_forced_nevertheless():
    def function(x):
        product = x @ x
        return product.sin()

    assert not compiled_rewrites(function, {"ops": {"matmul": "bf16"}})
    assert compiled_rewrites(function, {"ops": {"product": "bf16"}}) == 1


def compiled_rewrites(function, policy):
    fn, backend = compiled(function, parse_dtype_policy(policy))
    fn(rand(4, 4))
    return len(backend.of(Rewrite))


def test_names_of_functions_are_what_dynamo_calls_them():
    """`x @ w` is `operator.matmul` in the graph; the bare name takes it and `torch.matmul` alike."""
    both = lambda x: (x @ x, torch.matmul(x, x), x.matmul(x))  # noqa: E731
    assert compiled_rewrites(both, {"ops": {"matmul": "bf16"}}) == 3
    assert compiled_rewrites(both, {"ops": {"operator.matmul": "bf16"}}) == 1
    assert compiled_rewrites(both, {"ops": {"torch.matmul": "bf16"}}) == 1
    assert compiled_rewrites(both, {"ops": {"Tensor.matmul": "bf16"}}) == 1
