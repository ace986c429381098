"""FlexAttention's kernels for a CUDA device, as the attention pass inserts them."""

import pytest
import torch
from flex_forms import FORMS, FlexBackend, exact, operands, reference
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(form, arguments, **options):
    function = torch.compile(
        lambda *a: reference(form, *a),
        backend=FlexBackend(form, compile_fx),
        fullgraph=True,
        **{"dynamic": False, **options},
    )
    return function(*arguments)


def in_float32(form, arguments):
    """The dense program, with all arithmetic in float32, and the result in the dtype of the queries."""
    query, key, value, *rest = arguments
    return reference(form, query.float(), key.float(), value.float(), *rest).to(query.dtype)


def check(form, arguments, gradients):
    copies = exact(arguments)
    plain, own = ([a.detach().requires_grad_(a.requires_grad) for a in arguments] for _ in range(2))
    with torch.set_grad_enabled(gradients):
        out, want, near = run(form, arguments), reference(form, *copies), in_float32(form, plain)
        eager = reference(form, *own)
    eps = torch.finfo(out.dtype).eps
    assert (out - want).abs().max() <= 2 * (near - want).abs().max() + eps
    if gradients:
        gradient = torch.randn_like(out)
        for result in (out, want, eager):
            result.backward(gradient.to(result.dtype))
        for argument, copied, other in zip(arguments, copies, own, strict=True):
            if argument.requires_grad:
                # Kernel and eager round the gradient of each score to the dtype of the queries: where a gradient is
                # the sum over many scores that cancel, eager's own error says how far that leads.
                # In float32 the order of the sums counts as well.
                few = 16 if out.dtype == torch.float32 else 4
                bound = few * eps * copied.grad.abs().max() + 2 * (other.grad - copied.grad).abs().max()
                assert (argument.grad - copied.grad).abs().max() <= bound


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_as_exact_as_its_dtype(name, gradients):
    form = FORMS[name]
    sizes = {"b": 3, "q": 496, "k": 496, "d": 64, "device": "cuda", "dtype": torch.bfloat16}
    check(form, operands(form, grad=gradients, **sizes), gradients)


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 2, "h": 32, "hk": 8, "q": 2048, "k": 2048, "d": 64},
        {"b": 3, "hk": 4, "q": 1008, "k": 1680, "d": 64},
        {"h": 8, "q": 16, "k": 1024, "d": 64},
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_block_mask_per_row_of_the_batch(sizes, gradients):
    form = FORMS["padding"]
    check(form, operands(form, grad=gradients, device="cuda", dtype=torch.float16, **sizes), gradients)


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (80, 80), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_sizes(size, value_size, dtype):
    form = FORMS["window"]
    check(form, operands(form, q=512, k=512, d=size, dv=value_size, device="cuda", dtype=dtype, grad=True), True)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_learned_bias_of_every_pair_fits_the_memory_of_a_multiprocessor(size):
    for name in ("bias", "grid"):
        arguments = operands(FORMS[name], q=496, k=496, d=size, device="cuda", dtype=torch.bfloat16, grad=True)
        check(FORMS[name], arguments, True)
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["alibi", "bottom_right", "padding"])
def test_one_graph_serves_all_lengths(name):
    form = FORMS[name]
    backend = FlexBackend(form, compile_fx)
    function = torch.compile(lambda *a: reference(form, *a), backend=backend, fullgraph=True)
    for length, longer in ((496, 600), (1000, 1300)):
        arguments = operands(form, q=length, k=longer, d=64, device="cuda", dtype=torch.bfloat16)
        for tensor in arguments:
            for dim, size in enumerate(tensor.shape):
                if size in (length, longer):
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        with torch.no_grad():
            out = function(*arguments)
        assert (out - reference(form, *exact(arguments))).abs().max() < 0.04
    assert len(backend.modules) == 1


@pytest.mark.parametrize(("dtype", "fast"), [(torch.bfloat16, True), (torch.float32, False)])
def test_half_precision_scores_take_the_instruction_for_tanh(dtype, fast):
    form = FORMS["softcap"]
    arguments = operands(form, d=64, device="cuda", dtype=dtype)
    function = torch.compile(lambda *a: reference(form, *a), backend=FlexBackend(form, compile_fx), fullgraph=True)
    with torch.no_grad():
        _, sources = run_and_get_code(function, *arguments)
    assert ("tanh.approx.f32" in sources[0]) is fast
