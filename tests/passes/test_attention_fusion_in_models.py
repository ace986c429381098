"""The attention pass against eager: layouts, gradients, dynamic sizes and real models; never compiled."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from fusion import Backend, compiled, inputs, plain
from tiers import fast

from omnicomp.devices import resolve_device
from omnicomp.options.policy import Policy
from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.passes.base import PassContext, run_pipeline
from omnicomp.timeline import Rewrite, Timeline


def split_heads(x, heads=4):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.scaling = 8**-0.5

    def forward(self, x, mask):
        q, k, v = (split_heads(part) for part in self.project(x).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scaling + mask
        out = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2)
        return self.out(out.reshape(x.shape[0], x.shape[1], 32))


def padding(batch, length):
    mask = torch.zeros(batch, 1, 1, length)
    mask[0, ..., length // 2 :] = torch.finfo(torch.float32).min
    return mask


def gradients(module, output):
    return torch.autograd.grad(output.square().sum(), list(module.parameters()))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_gradients_equal_eager(checkpointed):
    layer = Layer()

    def function(x, mask):
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(layer, x, mask, use_reentrant=False)
        return layer(x, mask)

    x, mask = torch.randn(2, 6, 32), padding(2, 6)
    backend = Backend(training=True)
    result = compiled(function, backend)(x, mask)
    assert len(backend.of(Rewrite)) == 1
    assert (len(list(backend.graphs[0].modules())) > 1) == checkpointed
    eager = layer(x, mask)
    torch.testing.assert_close(result, eager)
    for got, expected in zip(gradients(layer, result), gradients(layer, eager), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_rows_masked_as_a_whole_are_not_multiplied():
    q, k, v, _ = inputs()
    v.requires_grad_()
    mask = torch.zeros(2, 1, 6, 8)
    mask[0, :, :3] = torch.finfo(torch.float32).min
    backend = Backend(training=True)
    result = compiled(plain, backend)(q, k, v, mask)
    assert len(backend.of(Rewrite)) == 1
    expected, got = (torch.autograd.grad(o.square().sum(), v)[0] for o in (plain(q, k, v, mask), result))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def guards(backend):
    """The guards on symbolic sizes that the pass could have added."""
    envs = {
        v.fake_mode.shape_env
        for g in backend.graphs
        for n in g.graph.nodes
        if hasattr(v := n.meta.get("example_value"), "fake_mode")
    }
    return sorted(str(guard.expr) for env in envs for guard in env.guards)


@pytest.mark.parametrize("training", [False, True])
def test_dynamic_sizes_add_no_guards_and_no_recompiles(training):
    layer, found = Layer(), []
    for policy in (Policy(), Policy(disable_passes=("attention_fusion",))):
        torch._dynamo.reset()
        backend = Backend(training=training, policy=policy)
        with torch.set_grad_enabled(training):
            function = compiled(layer, backend, dynamic=True)
            for batch, length in ((2, 6), (3, 9), (5, 16)):
                x, mask = torch.randn(batch, length, 32), padding(batch, length)
                torch.testing.assert_close(function(x, mask), layer(x, mask))
        found.append((len(backend.graphs), guards(backend)))
        assert len(backend.of(Rewrite)) == (not policy.disable_passes)
    assert found[0] == found[1]
    assert found[0][0] == 1


def test_marked_dynamic_length():
    q, k, v, m = inputs(queries=8)
    backend = Backend()
    for x, dim in ((q, 2), (k, 2), (v, 2), (m, 2), (m, 3)):
        torch._dynamo.mark_dynamic(x, dim)
    function = compiled(plain, backend)
    torch.testing.assert_close(function(q, k, v, m), plain(q, k, v, m))
    longer = inputs(queries=12, keys=12)
    torch.testing.assert_close(function(*longer), plain(*longer))
    assert len(backend.graphs) == len(backend.of(Rewrite)) == 1


def test_nodes_without_fake_values_are_left_alone():
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    graph.output(graph.call_function(torch.matmul, (graph.call_function(torch.softmax, (q, -1)), q)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    context = PassContext(graph_id="g0", device=resolve_device("cpu"), timeline=Timeline(), training=False)
    assert not run_pipeline((AttentionFusion(),), module, context)


def small(**more):
    return {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",
        "use_cache": False,
        **more,
    }


def model(name):
    """A small model with random weights and its inputs, padded on the side that the model is padded on."""
    import transformers as tf

    ids, mask = torch.randint(3, 90, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    if name == "bert":
        return tf.BertModel(tf.BertConfig(**small()), add_pooling_layer=False), padded
    if name == "llama":
        padded["attention_mask"] = mask.flip(1)
        return tf.LlamaModel(tf.LlamaConfig(**small(num_key_value_heads=2))), padded
    if name == "vit":
        config = tf.ViTConfig(**small(image_size=16, patch_size=4))
        return tf.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(2, 3, 16, 16)}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
    return tf.T5Model(tf.T5Config(**small(**sizes))), {**padded, "decoder_input_ids": ids[:, :5]}


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: torch.func.grad(lambda x: f(x).sin().sum()),
        lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sin().sum())(x).square().sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.func.jacrev(f),
    ],
    ids=["grad", "grad of grad", "jvp", "jacrev"],
)
def test_derivatives_in_the_graph_are_left_alone(derivative):
    q = torch.randn(1, 2, 3, 4)
    function = derivative(lambda x: torch.softmax(x @ x.mT, -1) @ x)
    backend = Backend(training=True)
    result = compiled(function, backend)(q)
    expected = function(q)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    assert [reason.code for reason in backend.reasons()] == ["not_equal"]


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "sites"), fast([("bert", 2), ("llama", 2), ("vit", 2), ("t5", 6)], lambda case: case[0] == "t5")
)
def test_models_in_inference(name, sites):
    module, arguments = model(name)
    module.eval()
    backend = Backend()
    with torch.no_grad():
        expected = module(**arguments).last_hidden_state
        result = torch.compile(module, backend=backend)(**arguments).last_hidden_state
    assert len(backend.of(Rewrite)) == sites
    assert backend.reasons() == []
    assert all(event.module and event.source for event in backend.of(Rewrite))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    grouped = {n.kwargs.get("enable_gqa", False) for n in backend.attentions()}
    assert grouped == {name == "llama"}


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "sites", "trained", "checkpointed"),
    fast(
        [("bert", 2, 0, False), ("llama", 2, 0, True), ("vit", 2, 0, False), ("t5", 6, 4, False)],
        lambda case: case[0] == "llama",
    ),
)
def test_models_in_training(name, sites, trained, checkpointed):
    module, arguments = model(name)
    module.train()
    if checkpointed:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    backend = Backend(training=True)
    result = torch.compile(module, backend=backend)(**arguments).last_hidden_state
    assert len(backend.of(Rewrite)) == sites
    assert backend.reasons() == []
    # T5's bias is learned, and its cross-attention has none.
    assert [e.target for e in backend.of(Rewrite)].count("omnicomp.attention_with_bias") == trained
    expected = module(**arguments).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    seen = arguments["attention_mask"][..., None] if name in ("bert", "llama") else 1
    parameters = [p for p in module.parameters() if p.requires_grad]
    losses = ((output * seen).square().mean() for output in (expected, result))
    eager, fused = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses)
    for want, got in zip(eager, fused, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
