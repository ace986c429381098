"""The dtype policy: what is lowered, what is not, and what the user gets."""

import collections
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from lowered import BOUND, check, compiled, error, rand
from torch import nn
from torch.utils.checkpoint import checkpoint

from omnicomp.devices import get_device
from omnicomp.passes.base import Pass
from omnicomp.passes.dtype_policy import DTYPES, DtypePolicy
from omnicomp.timeline import NearMiss, Rewrite

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
    assert "test_dtype_policy.py" in rewrite.source


class Block(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        h = self.norm(x)
        a = F.scaled_dot_product_attention(self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h)))
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm(x))))


def test_satisfies_the_protocol():
    assert isinstance(DtypePolicy(), Pass)


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, y: (x @ w).add_(y),
        lambda x, w, y: ((x @ w).view(-1).mul_(2), x @ w)[0] @ y.view(-1),
    ],
)
def test_in_place_on_a_result(function):
    check(function, rand(4, 8), rand(8, 8), rand(4, 8))


def test_in_place_on_results_views_and_operands():
    def function(x, w, y):
        h = x @ w
        view = h.view(-1)
        first = h @ w  # before the write
        view += 1
        second = h @ w  # after it
        x = x.clone()
        third = x @ w
        x[0] = 3
        fourth = x @ w
        fifth = F.relu(x @ w, inplace=True) @ w
        r = x @ w
        dropped = F.dropout(r, 0.5, False)
        dropped += 1
        return first, second, third, fourth, fifth, r @ w, y + first

    check(function, rand(4, 8), rand(8, 8), rand(4, 8))


def test_mutated_input_keeps_its_dtype():
    w = rand(8, 8)

    def function(x):
        before = x @ w
        x.add_(before)
        x.copy_(x @ w)
        return x @ w

    x = rand(4, 8)
    twin = x.clone()
    expected = function(twin)
    fn, _ = compiled(function, training=True)
    actual = fn(x)
    assert x.dtype == torch.float32
    assert error(x, twin) < 2e-2
    assert error(actual, expected) < 2e-2


def test_no_grad_inside_does_not_cut_gradients():
    linear = nn.Linear(8, 8)

    def function(x):
        with torch.no_grad():
            a = linear(x)
        return a + linear(x)

    fn, _ = compiled(function, training=True)
    fn(rand(4, 8)).sum().backward()
    assert linear.weight.grad is not None
    assert linear.bias.grad is not None


def test_float64_half_integers_and_complex_are_left_alone():
    def function(d, h, i, c):
        return d @ d, h @ h, i @ i, c @ c

    fn, backend = compiled(function)
    fn(rand(4, 4).double(), rand(4, 4).half(), torch.ones(4, 4, dtype=torch.long), torch.ones(4, 4, dtype=torch.cfloat))
    assert not backend.modified
    assert not backend.of(NearMiss)


def test_keep_does_nothing():
    fn, backend = compiled(Block(), "keep")
    fn(rand(2, 8, 32))
    assert not backend.modified
    assert not backend.of(Rewrite)


def masked_attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask.expand(2, 2, 6, 6))


def masked_operands(fill, device="cpu"):
    mask = torch.zeros(2, 1, 6, 6)
    mask[0, :, :, 4:] = fill
    mask[1, :, 2] = fill  # a row that is masked throughout
    q, k, v = (rand(2, 2, 6, 16) for _ in range(3))
    v[0, :, 4:] = 1e4  # what is masked stays masked
    return [t.to(device) for t in (q, k, v, mask)]


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf, -1e9])
def test_attention_mask(policy, fill):
    backend = check(masked_attention, *masked_operands(fill), policy=policy)
    assert len(backend.of(Rewrite)) == 1


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf, -1e9])
@pytest.mark.parametrize("policy", DTYPES)
def test_attention_mask_is_clamped_where_the_kernel_needs_the_dtype(policy, fill, monkeypatch):
    monkeypatch.setattr("omnicomp.passes.dtype_policy._WIDE_MASKS", frozenset())
    q, k, v, mask = masked_operands(fill)
    expected = masked_attention(q, k, v, mask)
    fn, backend = compiled(masked_attention, policy)
    actual = fn(q, k, v, mask)
    (cast,) = [n for n in backend.casts(DTYPES[policy]) if n.args[0].name.startswith("masked_fill")]
    assert cast.meta["example_value"].shape == mask.shape  # not of the expanded one
    if policy == "fp16" and math.isfinite(fill):
        # float16's smallest number doesn't swallow the scores: the row attends as if nothing were masked.
        expected[1, :, 2] = F.scaled_dot_product_attention(q, k, v)[1, :, 2]
    assert error(actual, expected) < BOUND[policy]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("policy", DTYPES)
def test_attention_mask_on_cuda(policy, fill):
    operands = masked_operands(fill, "cuda")
    fn, _ = compiled(masked_attention, policy, device=get_device("cuda"))
    actual, expected = fn(*operands), masked_attention(*operands)
    if policy == "fp16":  # see the test above for that row
        actual[1, :, 2] = expected[1, :, 2] = 0
    assert error(actual, expected) < BOUND[policy]


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("wide", [frozenset(), frozenset({"cpu"})])
def test_gradient_of_an_attention_bias(policy, wide, monkeypatch):
    monkeypatch.setattr("omnicomp.passes.dtype_policy._WIDE_MASKS", wide)
    operands = [rand(2, 2, 6, 16).requires_grad_() for _ in range(3)] + [rand(2, 1, 6, 6).requires_grad_()]
    scale = rand(2, 2, 6, 16)
    fn, _ = compiled(masked_attention, policy, training=True)
    actual = torch.autograd.grad((fn(*operands) * scale).sum(), operands)
    expected = torch.autograd.grad((masked_attention(*operands) * scale).sum(), operands)
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        assert error(got, want) < 1.5 * BOUND[policy]


def test_boolean_mask_and_grouped_heads():
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        rand(2, 4, 6, 16),
        rand(2, 2, 6, 16),
        rand(2, 2, 6, 16),
    )


def test_autocast_regions_are_left_alone():
    w = rand(8, 8)

    def function(x):
        y = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            y = (y @ w) @ w
        with torch.autocast("cpu", enabled=False):
            z = x @ w
        return y, z, x @ w

    backend = check(function, rand(4, 8))
    assert len(backend.of(Rewrite)) == 2
    assert [m.reason.code for m in backend.of(NearMiss)] == ["option_ineffective"]


def test_autocast_around_the_call():
    w = rand(8, 8)
    fn, backend = compiled(lambda x: checkpoint(lambda t: t @ w, x, use_reentrant=False))
    with torch.autocast("cpu", torch.bfloat16):
        assert fn(rand(4, 8)).dtype == torch.bfloat16
    assert not backend.modified


def test_functorch_transforms_are_left_alone():
    w = rand(8, 8)
    backend = check(lambda x: torch.vmap(lambda t: t @ w)(x) @ w, rand(4, 8))
    assert len(backend.of(Rewrite)) == 1
    assert [m.reason.code for m in backend.of(NearMiss)] == ["match_ended"]


@pytest.mark.parametrize("policy", DTYPES)
def test_angles_stay_in_float32(policy):
    frequencies = 10000.0 ** -torch.linspace(0, 1, 16)
    w = rand(2, 16)

    def function(positions, x):
        angle = (frequencies[:, None] @ positions[None].float()).T
        both = torch.cat((angle, angle), -1)
        fourier = 200 * math.pi * (x @ w)
        return both.cos(), both.sin(), fourier.sin(), torch.einsum("i,j->ij", positions.float(), frequencies)

    args = torch.arange(4000, 4008), rand(8, 2)
    expected = function(*args)
    fn, backend = compiled(function, policy)
    for got, want in zip(fn(*args), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert not backend.modified
    assert {m.reason.code for m in backend.of(NearMiss)} == {"not_equal"}


def test_bundled_operators_are_told():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    backend = check(lambda x: layer(x, x, x)[0], rand(2, 4, 8))
    assert not backend.modified
    assert [m.reason.code for m in backend.of(NearMiss)] == ["unsupported_op"]


def test_value_cast_up_by_the_user_is_read_before():
    backend = check(lambda x, w: x.float() @ w, rand(4, 8).bfloat16(), rand(8, 8))
    assert len(backend.casts(torch.bfloat16)) == 1


class Device:
    type = "cpu"
    lowerings = ("eager",)

    def __init__(self, **capabilities):
        self._capabilities = dataclasses.replace(get_device("cpu").capabilities(), **capabilities)

    def capabilities(self):
        return self._capabilities


def test_device_without_the_dtype():
    device = Device(compute_dtypes=(torch.float32, torch.float64))
    backend = check(lambda x, w: x @ w, rand(4, 8), rand(8, 8), device=device)
    assert not backend.modified
    (miss,) = backend.of(NearMiss)
    assert miss.reason.code == "option_ineffective"
    assert "bfloat16" in miss.reason.observed
    assert miss.reason.lever


@pytest.mark.parametrize("fast", [True, False])
def test_slow_dtype_is_obeyed_and_told(fast):
    device = Device(fast_dtypes=(torch.bfloat16,) if fast else ())
    backend = check(lambda x, w: x @ w, rand(4, 8), rand(8, 8), device=device)
    (rewrite,) = backend.of(Rewrite)
    assert ("not faster" in rewrite.detail) is not fast


@pytest.mark.model
@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_model(name, policy):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if name == "bert":
        config = transformers.BertConfig(**sizes, vocab_size=128, attn_implementation="sdpa")
        model = transformers.BertModel(config)
    else:
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=2, vocab_size=128, attn_implementation="sdpa", use_cache=False
        )
        model = transformers.LlamaModel(config)
    model.eval()
    ids, mask = torch.randint(128, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, 16:] = 0
    fn, backend = compiled(lambda: model(ids, attention_mask=mask).last_hidden_state, policy)
    with torch.no_grad():
        expected = model.double()(ids, attention_mask=mask).last_hidden_state
        model.float()
        with torch.autocast("cpu", DTYPES[policy]):
            amp = error(model(ids, attention_mask=mask).last_hidden_state, expected)
        actual = fn()
    assert actual.dtype == torch.float32
    assert error(actual, expected) < min(BOUND[policy], 1.5 * amp)
    kinds = collections.Counter(e.detail.split()[0] for e in backend.of(Rewrite))
    assert kinds["linear"] == (13 if name == "bert" else 14)
    assert kinds["scaled_dot_product_attention"] == 2
    assert kinds["matmul"] == 0
