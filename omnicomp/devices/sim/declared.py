"""The dtypes that the simulated device is declared to have, where it is to play a smaller one."""

import os

import torch

from omnicomp.errors import DeviceError

__all__ = ["VARIABLE", "declared_dtypes"]

VARIABLE = "OMNICOMP_SIM_DTYPES"


def declared_dtypes() -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]] | None:
    """Dtypes of `OMNICOMP_SIM_DTYPES`: those computed in, then, behind a `/`, those stored besides.

    `float32,bfloat16/int32,int64` computes in two floats and stores two integers too. Booleans are always stored.

    Returns:
        Computed dtypes, and all stored ones, which include them; None if the variable is not set.

    Raises:
        DeviceError: a name is no dtype of torch's.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    computed, _, besides = text.partition("/")
    compute = _parse(computed)
    return compute, tuple(dict.fromkeys((*compute, *_parse(besides), torch.bool)))


def _parse(names: str) -> tuple[torch.dtype, ...]:
    found: list[torch.dtype] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise DeviceError(f"{VARIABLE}: torch has no dtype {name!r}; write as in float32,bfloat16/int32,int64")
        found.append(dtype)
    return tuple(found)
