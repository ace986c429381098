"""Torch's operator for a whole encoder layer gets a fake kernel, so that Dynamo's graph goes on at symbolic sizes."""

from typing import Any, Final

import torch
from torch import Tensor

from omnicomp._torch.repairs.needed import Needed

NEEDED: Final = Needed(first="2.11", fixed="2.13", issue="https://github.com/pytorch/pytorch/issues/183841")

_NAME: Final = "aten::_transformer_encoder_layer_fwd"
_library: Final = torch.library.Library("aten", "IMPL")


def put_fake_layer() -> None:
    """Register it, once for the process."""
    if NEEDED.here and not torch._C._dispatch_has_kernel_for_dispatch_key(_NAME, "Meta"):
        _library.impl(_NAME.removeprefix("aten::"), _layer, "Meta")


def _layer(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    del args, kwargs
    return torch.empty_like(src)
