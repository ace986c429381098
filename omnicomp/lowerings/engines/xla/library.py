"""JAX, imported when it is first used, and its values as the operator table sees them."""

import os
from typing import Any, Final

import torch

from omnicomp.lowerings.engines.lazy import Lazy

jnp: Final[Any] = Lazy("jax.numpy")
lax: Final[Any] = Lazy("jax.lax")

_PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
HIGHEST: Final = "highest"


class _Package:
    """JAX itself; before it is first imported it is told to take GPU memory as it needs it, not most of it at once."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        os.environ.setdefault(_PREALLOCATE, "false")
        import jax  # pyright: ignore[reportMissingImports]

        return getattr(jax, name)


jax: Final[Any] = _Package()


def as_jax(dtype: torch.dtype) -> Any:
    """JAX's dtype for one of torch's."""
    return jnp.dtype(getattr(jnp, "bool_" if dtype == torch.bool else str(dtype).removeprefix("torch.")))


def precision_of(kind: str) -> Any:
    """How products of float32 are computed: as torch is set to for `matmul` or `conv` on CUDA; exactly on the CPU.

    XLA's default on CUDA is TF32, torch's is not for matrix products.
    """
    from omnicomp._torch.devices.precision import tf32_settings

    products, convolutions = tf32_settings()
    allowed = (products if kind == "matmul" else convolutions) == "tf32"
    return lax.Precision.DEFAULT if allowed else lax.Precision.HIGHEST
