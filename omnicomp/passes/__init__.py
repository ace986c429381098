"""The passes, in the order in which they run on the Dynamo graph; one file a pass."""

if __name__ != "omnicomp.passes":
    raise ImportError(
        "import omnicomp.passes; the folder passes at the root of the checkout is a link to it, "
        "and importing it by that name would make a second copy of every class"
    )

from typing import Final

from omnicomp.passes.attention_fusion import AttentionFusion
from omnicomp.passes.base import Pass, PassContext, PassResult, run_pipeline
from omnicomp.passes.dtype_policy import DtypePass
from omnicomp.passes.legalise import Legalise
from omnicomp.passes.repairs import (
    RepairAssertions,
    RepairDropout,
    RepairFirstCall,
    RepairLosses,
    RepairOut,
    RepairReturnedInputs,
    RepairStrides,
    RepairTangents,
    RepairUint8Resize,
)

__all__ = ["PIPELINE", "Pass", "PassContext", "PassResult", "run_pipeline"]

# First what the device lacks, so that the others see what will be computed in; and again, for what they put in.
# Attention before dtypes: the dtype policy then lowers the fused operator, and leaves no softmax to keep in float32.
# Repairs of torch at the end, for what all of them leave.
PIPELINE: Final[tuple[Pass, ...]] = (
    Legalise(),
    AttentionFusion(),
    DtypePass(),
    Legalise(),
    RepairLosses(),
    RepairOut(),
    RepairDropout(),
    RepairAssertions(),
    RepairStrides(),
    RepairTangents(),
    RepairReturnedInputs(),
    RepairUint8Resize(),
    RepairFirstCall(),
)
