"""What Inductor makes of the casts: they are fused into what makes a value or reads it."""

import re

import pytest
import torch
from lowered import Block, rand
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.inductor

KERNEL = re.compile(r"(cpp_fused_\w+) = async_compile\.cpp_pybinding\(\[(.*?)\]")
CALL = r"^\s+{}\((.*)\)$"
# In the name of a kernel that moves or casts, and computes nothing.
MOVES = re.compile(r"_?_to_copy|__?unsafe_view|view|transpose|permute|t(?=_)|\d+$|cpp_fused|_")


def cast_only(code):
    """The calls of kernels that compute nothing: name, the buffers that it reads, and those that it writes."""
    for name, types in KERNEL.findall(code):
        if MOVES.sub("", name):
            continue
        for call in re.findall(CALL.format(name), code, re.MULTILINE):
            buffers = re.findall(r"\b(?:primals_|buf|tangents_)\d+", call)
            pairs = list(zip(buffers, types.split(", "), strict=False))  # sizes come last, and are no buffers
            yield name, [b for b, t in pairs if "const" in t], [b for b, t in pairs if "const" not in t]


@pytest.fixture
def codes():
    torch.manual_seed(0)
    model, x = Block(), rand(2, 16, 32)
    # Without the weights that are cast once, their casts are in the graph as well.
    options = {"dtype_policy": {"preset": "bf16", "weights": "call"}}
    run = torch.compile(model, backend="omni", options=options)

    def train():
        run(x).sum().backward()

    # The code is generated in each run; what the C++ compiler makes of it is taken from the cache.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        return run_and_get_code(train)[1]


def test_activations_have_no_cast_kernel(codes):
    forward, backward = codes
    assert KERNEL.findall(forward)
    assert "BFloat16" in forward
    for name, read, _ in cast_only(forward):
        assert all(value.startswith("primals_") for value in read), f"{name} casts no weight, but {read}"
    outputs = backward[backward.rindex("return (") :]
    for name, _, written in cast_only(backward):
        assert all(re.search(rf"\b{value}\b", outputs) for value in written), f"{name} casts no gradient: {written}"


def test_a_cast_kernel_would_be_seen():
    code = (
        "cpp_fused__to_copy_t_1 = async_compile.cpp_pybinding(['const float*', 'at::BFloat16*'], ...\n"
        "        cpp_fused__to_copy_t_1(buf0, buf1)\n"
    )
    assert list(cast_only(code)) == [("cpp_fused__to_copy_t_1", ["buf0"], ["buf1"])]
    assert not list(cast_only(code.replace("_t_1", "_gelu_1")))
