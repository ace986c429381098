import copy
import dataclasses
import math

import pytest
import torch
from flex_forms import (
    FORMS,
    FlexBackend,
    apply,
    at,
    both,
    causal_term,
    compare,
    exact,
    index,
    number,
    operands,
    read,
    reference,
    scores,
    window,
)
from tiers import fast
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import create_block_mask

from omnicomp._torch.autograd.aot_autograd import compile_graph
from omnicomp._torch.autograd.flex import FLEX, backward_without_kernel, fast_tanh, fitting_tile, float32_tiles
from omnicomp._torch.fx import boxed, copy_module
from omnicomp.analysis.nodes import submodules
from omnicomp.backend.pipeline import omni
from omnicomp.passes.attention.flex import insert_flex, unsupported
from omnicomp.passes.attention.flex_blocks import are_contiguous, find_blocks, grid, ordered
from omnicomp.passes.attention.flex_values import Backend, Indices, Values, is_constant
from omnicomp.passes.attention.terms import OPERATIONS, Apply, Axis, Read

CPU = torch.device("cpu")


def compiled(form, backend, **options):
    return torch.compile(
        lambda *a: reference(form, *a), backend=backend, fullgraph=True, **{"dynamic": False, **options}
    )


def check_gradients(arguments, copies, out, want):
    gradient = torch.randn_like(out)
    out.backward(gradient)
    want.backward(gradient.double())
    for argument, copied in zip(arguments, copies, strict=True):
        if argument.requires_grad:
            torch.testing.assert_close(argument.grad.double(), copied.grad, rtol=1e-4, atol=1e-5)


def graphs_with_flex(module):
    return [
        m
        for m in module.modules()
        if isinstance(m, GraphModule) and m.graph.find_nodes(op="call_function", target=FLEX)
    ]


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (208, 304)])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_values_of_the_dense_program(name, queries, keys):
    form, backend = FORMS[name], FlexBackend(FORMS[name], aot_eager)
    arguments = operands(form, q=queries, k=keys)
    with torch.no_grad():
        out = compiled(form, backend)(*arguments)
    torch.testing.assert_close(out.double(), reference(form, *exact(arguments)), rtol=1e-5, atol=1e-5)
    assert len(graphs_with_flex(backend.modules[0])) == 1


@pytest.mark.parametrize("name", ["softcap", "alibi", "padding", "bias", "grid"])
def test_gradients_reach_operands_and_biases(name):
    form = FORMS[name]
    arguments = operands(form, q=208, k=304, grad=True)
    copies = exact(arguments)
    out = compiled(form, FlexBackend(form, aot_eager))(*arguments)
    check_gradients(arguments, copies, out, reference(form, *copies))


def test_gradients_of_computed_and_broadcast_tensors_in_the_backward_without_kernel():
    form = FORMS["learned"]

    def build(module, inputs, *, is_backward, is_inference):
        target = torch.ops.higher_order.flex_attention_backward
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.target = backward_without_kernel
        return boxed(module)

    arguments = operands(form, grad=True)
    copies = exact(arguments)
    out = compiled(form, FlexBackend(form, lambda m, i: compile_graph(m, i, build)))(*arguments)
    check_gradients(arguments, copies, out, reference(form, *copies))


def test_the_operator_of_the_instruction_for_tanh_is_differentiable(monkeypatch):
    monkeypatch.setattr("omnicomp._torch.autograd.flex.tanh_of_scores", lambda *_: fast_tanh())
    form, backend = FORMS["softcap"], FlexBackend(FORMS["softcap"], aot_eager)
    arguments = operands(form, grad=True)
    copies = exact(arguments)
    out = compiled(form, backend)(*arguments)
    check_gradients(arguments, copies, out, reference(form, *copies))
    modifiers = [node.target for module in submodules(backend.modules[0]) for node in module.graph.nodes]
    assert fast_tanh() in modifiers
    assert torch.tanh not in modifiers


@pytest.mark.parametrize(
    "name", fast(["alibi", "bottom_right", "document", "padding"], ["bottom_right", "document"].__contains__)
)
def test_one_graph_serves_all_lengths(name):
    form, backend = FORMS[name], FlexBackend(FORMS[name], aot_eager)
    run = compiled(form, backend, dynamic=None)
    for queries, keys in ((208, 304), (384, 640), (130, 900)):
        arguments = operands(form, q=queries, k=keys)
        for tensor in arguments:
            for dim, size in enumerate(tensor.shape):
                if size in (queries, keys):
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with torch.no_grad():
            out = run(*arguments)
        torch.testing.assert_close(out.double(), reference(form, *exact(arguments)), rtol=1e-5, atol=1e-5)
    assert len(backend.modules) == 1


def test_a_row_without_keys_is_zero():
    form = dataclasses.replace(FORMS["causal"], terms=lambda b, h, q, k: (None, compare("lt", index(*k), index(*q))))
    arguments = operands(form)
    with torch.no_grad():
        out = compiled(form, FlexBackend(form, aot_eager))(*arguments)
    assert (out[:, :, 0] == 0).all()
    assert (out[:, :, 1:] != 0).any(-1).all()


def test_the_log_sum_exp_is_natural():
    form = FORMS["causal"]
    query, key, value = operands(form)
    with torch.no_grad():
        lse = compiled(form, FlexBackend(form, aot_eager, return_lse=True))(query, key, value)
    dense = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(query.shape[-1])
    dense = dense.masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -math.inf)
    torch.testing.assert_close(lse, dense.logsumexp(-1))


def test_half_precision_is_as_exact_as_eager():
    def rounded(b, h, q, k):
        half = apply("cast", scores(), dtype=torch.bfloat16)
        added = apply("add", half, read(0, at(*h), at(*q), at(*k), dtype=torch.float32), dtype=torch.float32)
        return added, causal_term(q, k)

    form = dataclasses.replace(
        FORMS["bias"],
        terms=rounded,
        dense=lambda s, b, h, q, k, m: (s + m[h, q, k].to(s.dtype)).masked_fill(k > q, -math.inf),
        grads=False,
    )
    arguments = operands(form, dtype=torch.bfloat16)
    with torch.no_grad():
        out = compiled(form, FlexBackend(form, aot_eager))(*arguments)
    want = reference(form, *exact(arguments))
    assert (out - want).abs().max() <= (reference(form, *arguments) - want).abs().max()


@pytest.mark.parametrize("name", ["softcap", "window", "padding"])
def test_layers_share_one_block_mask_and_one_graph_of_each_kind(name):
    form, backend = FORMS[name], FlexBackend(FORMS[name], aot_eager, layers=3)
    arguments = operands(form)
    with torch.no_grad():
        out = compiled(form, backend)(*arguments)
    want, *rest = exact(arguments)
    for _ in range(3):
        want = reference(form, want, *rest)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    module = backend.modules[0]
    assert len(list(submodules(module))) == 2
    nodes = module.graph.find_nodes(op="call_function", target=FLEX)
    assert len(nodes) == 3
    assert len({node.args[4][2:-1] for node in nodes}) == 1
    constants = [name for name in vars(module) if name.startswith("flex_blocks")]
    assert len(constants) == (0 if name == "padding" else 1)


def test_another_mask_or_a_place_further_up_gets_blocks_of_its_own():
    causal, narrow = FORMS["causal"], FORMS["window"]

    def insert(module, inputs):
        placeholders = module.graph.find_nodes(op="placeholder")
        output, shared = module.graph.output_node(), {}
        spec = FlexBackend(causal, None).spec(*placeholders)
        late, _ = insert_flex(module, output, spec, shared)
        other, _ = insert_flex(module, output, FlexBackend(narrow, None).spec(*placeholders), shared)
        early, _ = insert_flex(module, placeholders[-1].next, spec, shared)
        output.args = ((late, other, early),)
        module.graph.lint()
        module.recompile()
        return aot_eager(module, inputs)

    arguments = operands(causal)
    with torch.no_grad():
        late, other, early = torch.compile(
            lambda q, k, v: (q.sin(), q.cos(), q.tan() + k.sum() + v.sum()), backend=insert
        )(*arguments)
        torch.testing.assert_close(late, reference(causal, *arguments))
        torch.testing.assert_close(other, reference(narrow, *arguments))
    assert torch.equal(late, early)


def test_the_eager_lowering_cuts_and_runs_the_graph():
    form = FORMS["alibi"]
    arguments = operands(form, q=208, k=304)
    options = {"lowerings": ["eager"]}
    with torch.no_grad():
        out = compiled(form, FlexBackend(form, lambda m, i: omni(m, i, options=options)))(*arguments)
    torch.testing.assert_close(out.double(), reference(form, *exact(arguments)), rtol=1e-5, atol=1e-5)


def test_inside_a_checkpointed_region():
    form = FORMS["window"]

    def insert(module, inputs):
        (body,) = submodules(module)
        FlexBackend(form, None).insert(body)
        return aot_eager(module, inputs)

    def region(*arguments):
        return torch.utils.checkpoint.checkpoint(lambda *a: reference(form, *a), *arguments, use_reentrant=False)

    arguments = operands(form, grad=True)
    copies = exact(arguments)
    out = torch.compile(region, backend=insert, fullgraph=True)(*arguments)
    check_gradients(arguments, copies, out, reference(form, *copies))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy_module])
def test_copies_of_the_graph_compute_the_same(duplicate):
    form = FORMS["softcap"]
    arguments = operands(form)
    with torch.no_grad():
        out = compiled(form, FlexBackend(form, lambda m, i: duplicate(m).forward))(*arguments)
    torch.testing.assert_close(out.double(), reference(form, *exact(arguments)), rtol=1e-5, atol=1e-5)


@pytest.mark.inductor
def test_inductor_compiles_it_for_the_cpu_and_caches_it():
    form = FORMS["padding"]
    arguments = operands(form, b=3, q=208, k=304)
    want = reference(form, *exact(arguments))
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        with torch.no_grad():
            out = compiled(form, FlexBackend(form, compile_fx))(*arguments)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0


MASKS = {
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (q - k < 300),
    "two_windows": lambda b, h, q, k: (q - k).abs() < 150 + 200 * h,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(512, 640), (500, 601), (100, 300)])
def test_blocks_are_those_of_create_block_mask(name, queries, keys):
    heads = 2 if name == "two_windows" else 1
    sizes, shape = (1, heads, queries, keys), (1, heads, -(-queries // 128), -(-keys // 128))
    found, valid = grid(call, sizes, {1, 2, 3}, (0, shape[2]), shape[3], CPU, int)
    blocks = find_blocks(call, MASKS[name](*found), valid)
    tensors = ordered(call, *blocks, shape, CPU, int, training=True)
    want = create_block_mask(MASKS[name], 1, heads, queries, keys, device="cpu")
    fields = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    fields += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    for field, tensor in zip(fields, tensors, strict=True):
        assert torch.equal(tensor, getattr(want, field)), field
        assert tensor.is_contiguous()
    if (queries, name) == (512, "causal"):
        assert are_contiguous(tensors)
    if (queries, name) == (512, "window"):
        assert not are_contiguous(tensors)


def value_of(op, args, kinds, *, second=None):
    """An operation on tensors as the values of reads; `second` is a number for the last operand."""
    reads = [Read(dtype=kind, value=place, at=()) for place, kind in enumerate(kinds)]
    terms = (*reads[:-1], number(second, kinds[-1])) if second is not None else tuple(reads)
    backend = Backend(call=call, index=(), read=lambda leaf, _: args[leaf.value], number=lambda n: n)
    return Values(Indices((), (), (), ()), backend)(Apply(dtype=torch.float64, op=op, args=terms))


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_of_terms_has_a_value(op):
    tensor = torch.rand(5) + 0.5
    kinds = [torch.bool if op in ("and", "or", "xor", "not") else torch.float32] * OPERATIONS[op]
    kinds = [torch.bool, *kinds[1:]] if op == "where" else kinds
    args = [tensor > 0.6 + i / 5 if kind == torch.bool else tensor * (i + 1) for i, kind in enumerate(kinds)]
    want = args[0].double() if op == "cast" else EXPECTED[op](*args)
    torch.testing.assert_close(value_of(op, args, kinds), want)
    if kinds == [torch.float32] * 2:
        torch.testing.assert_close(value_of(op, args, kinds, second=2.0), EXPECTED[op](args[0], torch.tensor(2.0)))


SOFTPLUS = torch.nn.functional.softplus
EXPECTED = {
    **{op: getattr(torch, op) for op in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "neg", "abs", "exp")},
    **{
        op: getattr(torch, op) for op in ("eq", "ne", "lt", "le", "gt", "ge", "log", "tanh", "sigmoid", "sqrt", "rsqrt")
    },
    **{op: getattr(torch, op) for op in ("relu", "sin", "cos", "erf", "floor", "reciprocal", "log1p")},
    **{op: getattr(torch, op) for op in ("nan_to_num", "where")},
    **{"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not},
    **{"floordiv": torch.floor_divide, "mod": torch.remainder, "softplus": SOFTPLUS},
}


def test_indices_recognise_runs_of_digits():
    a, b, c, one = Axis("a", 2), Axis("b", 3), Axis("c", 5), Axis("one", 1)
    indices = Indices((), (), (a, one, b, c), ())
    assert indices.runs(at(a, b, c)) == [(2, 1, None, 1)]
    assert indices.runs(at(a, b)) == [(2, 5, None, 1)]
    assert indices.runs(at(b, one, c)) == [(2, 1, 15, 1)]
    assert sorted(indices.runs(at(c, a))) == [(2, 1, 5, 2), (2, 15, None, 1)]
    with pytest.raises(ValueError, match="neither of the batch"):
        indices.runs(at(Axis("x", 7)))


def test_masks_of_data_or_symbols_are_no_constants():
    q, k = (Axis("q", 8),), (Axis("k", 8),)
    assert is_constant(window(q, k, 3))
    assert not is_constant(both(causal_term(q, k), read(0, at(*k), dtype=torch.bool)))
    assert not is_constant(scores())


def test_a_mask_of_scores_is_refused():
    form = dataclasses.replace(
        FORMS["causal"], terms=lambda b, h, q, k: (None, compare("gt", scores(), number(0.0, torch.float32)))
    )
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="can't depend on the scores"):
        compiled(form, FlexBackend(form, aot_eager))(*operands(form))


def spec_of(*, training=False, **sizes):
    graph = torch.fx.Graph()
    backend = FlexBackend(FORMS["causal"], None)
    made = operands(FORMS["causal"], **sizes)
    nodes: list[Node] = []
    for name, tensor in zip(("q", "k", "v"), made, strict=True):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["example_value"] = tensor
    with torch.set_grad_enabled(training):
        return backend.spec(*nodes)


@pytest.mark.parametrize(
    ("reason", "sizes", "dropout"),
    [
        ("dropout", {}, 0.1),
        ("backward", {"training": True}, 0.0),
        ("dtype", {"dtype": torch.float64}, 0.0),
        ("heads", {"h": 3, "hk": 2}, 0.0),
        ("blocks of 128 keys, and 100 do not fill one", {"k": 100}, 0.0),
    ],
)
def test_what_it_can_not_take_has_a_reason(reason, sizes, dropout, monkeypatch):
    monkeypatch.setattr("omnicomp._torch.autograd.flex.check_cpu_supported", lambda: True)
    assert reason in (unsupported(spec_of(**sizes), dropout=dropout) or "")
    assert unsupported(spec_of()) is None


def test_a_machine_without_code_generator_has_a_reason(monkeypatch):
    monkeypatch.setattr("omnicomp._torch.autograd.flex.check_cpu_supported", lambda: False)
    assert "AVX2" in (unsupported(spec_of()) or "")


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("room", [232448, 101376, 49152])
def test_tiles_for_float32_fit_the_memory_of_a_multiprocessor(room, width, tf32):
    options = float32_tiles(room, width, tf32=tf32)
    row = 4 * (64 if width <= 64 else 128)
    assert (options.get("fwd_BLOCK_M", 0) + 2 * options.get("fwd_BLOCK_N", 0)) * row <= room
    assert 2 * (options.get("bwd_BLOCK_M1", 0) + options.get("bwd_BLOCK_N1", 0)) * row <= room
    assert len(options) == 10 or (room < 232448 and not {"fwd_BLOCK_M", "bwd_BLOCK_M1"} <= options.keys())


@pytest.mark.parametrize(
    ("room", "row", "value_row", "options"),
    [
        (232448, 192 * 4, 128 * 4, {"fwd_BLOCK_N": 64, "fwd_num_stages": 2}),
        (166912, 192 * 4, 128 * 4, {"fwd_BLOCK_N": 64, "fwd_num_stages": 1}),
        (101376, 192 * 4, 192 * 4, {"fwd_BLOCK_N": 32, "fwd_num_stages": 1}),
        (232448, 80 * 4, 80 * 4, {}),
        (49152, 224 * 4, 224 * 4, {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "fwd_num_stages": 1}),
    ],
)
def test_a_tile_fits_the_memory_of_a_multiprocessor(room, row, value_row, options):
    assert fitting_tile(room, row, value_row) == options
    queries, keys = options.get("fwd_BLOCK_M", 64), options.get("fwd_BLOCK_N", 64)
    assert queries * row + options.get("fwd_num_stages", 3) * keys * (row + value_row) <= room
