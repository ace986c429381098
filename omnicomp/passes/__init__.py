"""The passes, in the order in which they run on the Dynamo graph; one file a pass."""

if __name__ != "omnicomp.passes":
    raise ImportError(
        "import omnicomp.passes; the folder passes at the root of the checkout is a link to it, "
        "and importing it by that name would make a second copy of every class"
    )


from typing import Final

from omnicomp.passes.base import Pass, PassContext, PassResult, run_pipeline

__all__ = ["PIPELINE", "Pass", "PassContext", "PassResult", "run_pipeline"]

PIPELINE: Final[tuple[Pass, ...]] = ()
