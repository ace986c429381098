"""The folder that omnicomp keeps its own files in."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`OMNICOMP_CACHE_DIR`, or `omnicomp` in Inductor's cache folder, which is made if it is not there."""
    own = os.environ.get("OMNICOMP_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "omnicomp"
