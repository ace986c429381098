"""Float8 on the CPU: `_scaled_mm` of torch 2.11 takes one scale a tensor there, that of 2.13 one a row as well."""

import pytest
import torch

FLOAT8 = torch.float8_e4m3fn


def _has_row_scales() -> bool:
    numbers, scales = torch.ones(16, 16).to(FLOAT8), torch.ones(16, 1)
    try:
        torch._scaled_mm(numbers, numbers.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        if "per-tensor" not in str(error):
            raise
        return False
    return True


SCALES = "row" if _has_row_scales() else "tensor"
needs_row_scales = pytest.mark.skipif(SCALES != "row", reason="this torch's CPU kernel has no scales for rows")
BOTH = [pytest.param("row", marks=needs_row_scales), "tensor"]
