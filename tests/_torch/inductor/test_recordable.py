"""What is known of a compiled graph before it is recorded."""

import pytest

from omnicomp._torch.inductor.recordable import _DROPS


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
