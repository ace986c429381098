"""The rewrite: what is cast where, and that values, gradients and dtypes come out right."""

import pytest
import torch
import torch.nn.functional as F
from lowered import BOUND, DTYPES, Block, check, compiled, error, rand
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnicomp.timeline import Rewrite

OPS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), (rand(4, 16), rand(8, 16), rand(8)), "addmm"),
    "linear_3d": (lambda x, w: F.linear(x, w), (rand(2, 4, 16), rand(8, 16)), "mm"),
    "at": (lambda x, w: x @ w, (rand(4, 16), rand(16, 8)), "mm"),
    "square": (lambda x: x @ x, (rand(8, 8),), "mm"),
    "rmatmul": (lambda x, w: x.matmul(w), (rand(2, 4, 16), rand(2, 16, 8)), "bmm"),
    "matmul": (lambda x, w: torch.matmul(x, w), (rand(4, 16), rand(16)), "mv"),
    "mm": (lambda x, w: torch.mm(x, w), (rand(4, 16), rand(16, 8)), "mm"),
    "bmm": (lambda x, w: x.bmm(w), (rand(2, 4, 16), rand(2, 16, 8)), "bmm"),
    "mv": (lambda x, w: torch.mv(x, w), (rand(4, 16), rand(16)), "mv"),
    "addmv": (lambda b, x, w: torch.addmv(b, x, w), (rand(4), rand(4, 16), rand(16)), "addmv"),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), (rand(8), rand(4, 16), rand(16, 8)), "addmm"),
    "addbmm": (lambda b, x, w: torch.addbmm(b, x, w), (rand(4, 8), rand(2, 4, 16), rand(2, 16, 8)), "addbmm"),
    "baddbmm": (
        lambda b, x, w: torch.baddbmm(b, x, w, beta=0.5, alpha=2),
        (rand(2, 4, 8), rand(2, 4, 16), rand(2, 16, 8)),
        "baddbmm",
    ),
    "einsum": (lambda x, w: torch.einsum("bik,bkj->bij", x, w), (rand(2, 4, 16), rand(2, 16, 8)), "bmm"),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (rand(2, 8, 16), rand(4, 8, 3), rand(4)), "convolution"),
    "conv2d": (lambda x, w: F.conv2d(x, w), (rand(2, 8, 9, 9), rand(4, 8, 3, 3)), "convolution"),
    "conv3d": (lambda x, w: F.conv3d(x, w), (rand(1, 4, 5, 5, 5), rand(4, 4, 3, 3, 3)), "convolution"),
    "conv_t1d": (lambda x, w: F.conv_transpose1d(x, w), (rand(2, 8, 16), rand(8, 4, 3)), "convolution"),
    "conv_t2d": (lambda x, w: F.conv_transpose2d(x, w), (rand(2, 8, 9, 9), rand(8, 4, 3, 3)), "convolution"),
    "conv_t3d": (lambda x, w: F.conv_transpose3d(x, w), (rand(1, 4, 5, 5, 5), rand(4, 4, 3, 3, 3)), "convolution"),
    "sdpa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (rand(2, 2, 8, 16), rand(2, 2, 8, 16), rand(2, 2, 8, 16)),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_operator_lowers_forward_and_backward(name, policy):
    function, args, aten = OPS[name]
    args = [a.clone().requires_grad_() for a in args]
    exact_args = [a.detach().double().requires_grad_() for a in args]
    expected = function(*exact_args)
    scale = torch.randn_like(expected)
    (expected * scale).sum().backward()
    fn, backend = compiled(function, policy, training=True)
    actual = fn(*args)
    assert backend.seen[aten] == {DTYPES[policy]}
    (actual * scale.float()).sum().backward()
    assert actual.dtype == torch.float32
    assert error(actual, expected) < BOUND[policy]
    for got, want in zip(args, exact_args, strict=True):
        assert got.grad.dtype == torch.float32
        assert error(got.grad, want.grad) < 1.5 * BOUND[policy]
    (rewrite,) = backend.of(Rewrite)
    assert rewrite.target == str(DTYPES[policy]).removeprefix("torch.")
    assert "float32 -> " in rewrite.detail
    assert rewrite.source
    assert "test_rewrite.py" in rewrite.source


def test_no_cast_between_projections_attention_and_output():
    block, x = Block().eval(), rand(2, 8, 32)
    backend = check(block, x)
    # Six linears with weight and bias, and the two norms' results; up: the two results that enter the residual stream.
    assert len(backend.casts(torch.bfloat16)) == 12 + 2
    assert len(backend.casts(torch.float32)) == 2
    assert len(backend.of(Rewrite)) == 7
    (graph,) = backend.graphs
    assert not [n for n in graph.graph.nodes if n.op.startswith("call_") and not n.users and n.op != "output"]
    for node in graph.graph.nodes:
        assert node.op == "output" or node.meta.get("example_value") is not None
    attention = next(n for n in graph.graph.nodes if n.target is F.scaled_dot_product_attention)
    assert [a.meta["example_value"].dtype for a in attention.args[:3]] == [torch.bfloat16] * 3
    assert all(a.meta.get("stack_trace") for a in (attention, *attention.args[:3]))


@pytest.mark.parametrize("policy", DTYPES)
def test_error_is_bounded_and_no_worse_than_autocast(policy):
    model = nn.Sequential(Block(), Block()).eval()
    x = rand(2, 16, 32)
    model.double()
    exact = model(x.double())
    model.float()
    with torch.no_grad(), torch.autocast("cpu", DTYPES[policy]):
        amp = error(model(x), exact)
    fn, _ = compiled(model, policy)
    with torch.no_grad():
        ours = error(fn(x), exact)
    assert 1e-6 < ours < BOUND[policy]
    assert ours < 1.5 * amp


def test_norms_softmax_and_losses_stay_in_float32():
    norm, linear, batch = nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def loss(x, target):
        h = linear(x)
        h = batch(norm(h)) + F.gelu(h).exp().cumsum(-1) / h.pow(2).mean(-1, keepdim=True)
        logits = linear(h)
        weights = logits.softmax(-1).log()
        return F.cross_entropy(logits, target) + F.mse_loss(weights, h) + weights.var() + F.rms_norm(h, (8,)).sum()

    args = rand(4, 8), torch.randint(8, (4,))
    backend = check(loss, *args)
    seen = backend.seen
    assert seen.pop("addmm") == {torch.bfloat16}
    for name in ("_to_copy", "t", "detach"):
        seen.pop(name, None)
    assert {"native_layer_norm", "_softmax", "_log_softmax", "gelu", "exp", "cumsum", "var"} <= set(seen)
    assert set().union(*seen.values()) == {torch.float32}
    assert len(backend.of(Rewrite)) == 2


def test_weight_is_cast_once():
    weight = nn.Parameter(rand(8, 8))
    backend = check(lambda x: (x @ weight).tanh() @ weight.t() + x @ weight.T, rand(4, 8))
    from_weight = [n for n in backend.casts() if n.args[0].op == "placeholder" and "weight" in n.args[0].name]
    assert len(from_weight) == 1


def test_expanded_operand_is_cast_before_it_is_expanded():
    backend = check(lambda x, w: x @ w.unsqueeze(0).expand(64, 8, 8), rand(64, 4, 8), rand(8, 8))
    assert all(n.args[0].op == "placeholder" for n in backend.casts(torch.bfloat16))


def test_value_read_in_both_dtypes():
    linear = nn.Linear(8, 8)

    def function(x):
        h = linear(x)
        q, k = h.chunk(2, -1)
        return q.softmax(-1), q @ k.mT, h[:, 2:] @ h[:, 2:].mT, F.dropout(h, 0.5, False).neg() @ h

    backend = check(function, rand(8, 8))
    # x, weight and bias once each; up: the linear and the three products.
    assert len(backend.casts(torch.bfloat16)) == 3
    assert len(backend.casts(torch.float32)) == 4


def test_checkpoint_region():
    block = Block()
    fn, backend = compiled(lambda x: checkpoint(block, x, use_reentrant=False).sum(), training=True)
    x = rand(2, 8, 32).requires_grad_()
    fn(x).backward()
    got, x.grad = x.grad, None
    block(x).sum().backward()
    assert got.dtype == torch.float32
    assert error(got, x.grad) < BOUND["bf16"]
    assert len(backend.of(Rewrite)) == 7


def test_gradients_of_a_block():
    block, x, scale = Block(), rand(2, 8, 32), rand(2, 8, 32)

    def gradients(function, x):
        block.zero_grad()
        (function(x) * scale).sum().backward()
        return {name: p.grad.clone() for name, p in block.named_parameters()}

    fn, _ = compiled(block, training=True)
    ours = gradients(fn, x)
    with torch.autocast("cpu", torch.bfloat16):
        amp = gradients(block, x)
    block.double()
    exact = gradients(block, x.double())
    for name, want in exact.items():
        assert ours[name].dtype == torch.float32
        if name != "k.bias":  # zero but for rounding
            assert error(ours[name], want) < 4e-2, name
            assert error(ours[name], want) < 1.5 * error(amp[name], want), name


def test_dynamic_shapes_compile_once():
    fn, backend = compiled(Block().eval(), dynamic=True)
    with torch.no_grad():
        for length in (8, 13, 21):
            assert fn(rand(2, length, 32)).shape == (2, length, 32)
    assert len(backend.graphs) == 1
    before, after = backend.guards
    assert before == after
