"""What is known of a compiled graph before it is recorded."""

import pytest

from omnicomp._torch.inductor.recordable import _DROPS, _launches


@pytest.mark.parametrize(
    ("call", "drops"),
    [
        ("torch.ops.aten._scaled_dot_product_efficient_attention.default(b0, b1, b2, b3, True, 0.1, False)", True),
        ("torch.ops.aten._scaled_dot_product_flash_attention.default(b0, b1, b2, 0.25, True, scale=0.125)", True),
        ("torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(b0, b1, 0.05, True, scale=0.5)", True),
        ("torch.ops.aten._efficient_attention_forward.default(b0, b1, b2, None, 0.5, 0)", True),
        ("torch.ops.aten._scaled_dot_product_flash_attention.default(b0, b1, b2, 0.0, True, scale=0.125)", False),
        ("torch.ops.aten._scaled_dot_product_efficient_attention.default(b0, b1, b2, b3, True)", False),
        ("triton_attention_0.run(b0, 0.125)\nbuf1 = extern_kernels.addmm(b0, b1, alpha=0.5)", False),
    ],
)
def test_attention_that_drops_out_is_told_from_other_attention(call: str, drops: bool) -> None:
    assert bool(_DROPS.search(f"        buf9 = {call}\n        del b0")) is drops


ONE = """
        # %add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%x, %y), kwargs = {})
        triton_poi_fused_add_0.run(arg0_1, arg1_1, buf0, 12, stream=stream0)
"""


@pytest.mark.parametrize(
    ("call", "launches"),
    [
        (ONE, 1),
        (ONE * 3, 3),
        (f"{ONE}\n        extern_kernels.mm(buf0, arg1_1, out=buf1)", None),
        (f"{ONE}\n        buf2 = torch.ops.aten.sort.default(buf1)", None),
        ("        auto kernel = launch(0);", None),
    ],
)
def test_launches_are_counted_where_all_are_of_generated_kernels(call: str, launches: int | None) -> None:
    head = "aten = torch.ops.aten\npool = torch.ops.inductor._alloc_from_pool\n"
    assert _launches(f"{head}def call(self, args):\n{call}\n        return (buf0, )\n") == launches
