"""The passes, in the order in which they run on the Dynamo graph; one file a pass."""

if __name__ != "omnicomp.passes":
    raise ImportError(
        "import omnicomp.passes; the folder passes at the root of the checkout is a link to it, "
        "and importing it by that name would make a second copy of every class"
    )

from typing import Any, Final

from omnicomp.errors import OptionError
from omnicomp.options.checks import did_you_mean
from omnicomp.options.policy import Policy
from omnicomp.passes import registry
from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.passes.base import Pass, PassContext, PassResult, digest, run_pipeline
from omnicomp.passes.dtype_policy import DtypePass
from omnicomp.passes.few_rows import FewRows
from omnicomp.passes.legalise import Legalise
from omnicomp.passes.registry import Plugin, plugins
from omnicomp.passes.repairs import (
    RepairAssertions,
    RepairDropout,
    RepairFirstCall,
    RepairKeptSizes,
    RepairLosses,
    RepairOut,
    RepairReturnedInputs,
    RepairStrides,
    RepairTangents,
    RepairUint8Resize,
)

__all__ = [
    "PIPELINE",
    "Pass",
    "PassContext",
    "PassResult",
    "check_disabled",
    "check_passes",
    "keys",
    "pipeline",
    "plugins",
    "run_pipeline",
]

# First what the device lacks, so that the others see what will be computed in; and again, for what they put in.
# Attention before dtypes: the dtype policy then lowers the fused operator, and leaves no softmax to keep in float32.
# Few rows behind dtypes, which decide what the layers compute in.
# Repairs of torch at the end, for what all of them leave.
PIPELINE: Final[tuple[Pass, ...]] = (
    Legalise(),
    AttentionFusion(),
    DtypePass(),
    Legalise(),
    FewRows(),
    RepairLosses(),
    RepairOut(),
    RepairDropout(),
    RepairAssertions(),
    RepairStrides(),
    RepairTangents(),
    RepairReturnedInputs(),
    RepairUint8Resize(),
    RepairKeptSizes(),
    RepairFirstCall(),
)


def pipeline(policy: Policy) -> tuple[tuple[Pass, ...], tuple[Plugin, ...]]:
    """The passes that a policy asks for, in order: `PIPELINE` and others; and the plugins that can't be used."""
    return registry.chosen(PIPELINE, policy.passes)


def check_passes(name: str, value: Any) -> tuple[Pass, ...] | None:
    """The option `passes`: `Pass` objects, and names of those that packages declare.

    Raises:
        OptionError: an entry is neither, or named twice, or has no place in the order.
    """
    return registry.select(PIPELINE, name, value)


def check_disabled(policy: Policy) -> None:
    """The option `disable_passes`: names of passes that are there, or would be if they could be used.

    Raises:
        OptionError: there is no pass of a name.
    """
    items = (*PIPELINE, *(policy.passes or ()), *(plugin.item for plugin in plugins() if plugin.item is not None))
    known = dict.fromkeys([*(item.name for item in items), *(plugin.name for plugin in plugins())])
    for name in policy.disable_passes:
        if name not in known:
            raise OptionError(f"disable_passes: there is no pass named {name!r}{did_you_mean(name, tuple(known))}")


def keys(policy: Policy) -> dict[str, tuple[str, str]]:
    """What the passes of a policy are known by in the keys of caches: by name, a version to show and a hash."""
    own = {id(item) for item in PIPELINE}
    items = pipeline(policy)[0]
    return {item.name: ("", digest((item,))) if id(item) in own else registry.key_of(item) for item in items}
