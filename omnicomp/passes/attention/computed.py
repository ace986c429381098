"""In which dtype an attention will compute: the program's, or the one that the dtype policy lowers it to afterwards.

Which kernel is the fastest, and whether one is faster than the code as written, depends on that.
"""

import torch

from omnicomp.devices import Device
from omnicomp.options.dtype_policy import DtypePolicy
from omnicomp.passes.attention.site import Site
from omnicomp.passes.dtypes.resolve import resolve
from omnicomp.passes.dtypes.rules import decide

__all__ = ["computed_dtype"]


def computed_dtype(site: Site, policy: DtypePolicy, device: Device, *, training: bool) -> torch.dtype:
    """The dtype of the operands that the kernel will have.

    Both products have to be lowered. What keeps the dtype pass from it nevertheless, such as a bound on the error, is
    not looked at: then a kernel of the program's dtype takes the place of the one that was chosen.
    """
    if site.dtype is not torch.float32 or not policy.rewrites:
        return site.dtype
    resolved, _ = resolve(policy, device, training=training)
    first, second = decide(site.product, resolved), decide(site.output, resolved)
    if first is None or second is None or first.dtype is not second.dtype:
        return site.dtype
    return first.dtype
