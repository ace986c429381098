"""What happens to one Dynamo graph, from capture to a compiled function: `omnicomp.backend.pipeline` is the way in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnicomp.backend.pipeline import omni

__all__ = ["omni"]


def __getattr__(name: str) -> Any:
    """Import the backend when it is first used: it needs torch's compiler."""
    if name == "omni":
        from omnicomp.backend.pipeline import omni

        return omni
    raise AttributeError(f"module 'omnicomp.backend' has no attribute {name!r}")
