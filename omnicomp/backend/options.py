"""Options of `torch.compile(..., backend="omni")`, checked by the rooms that know what their values name."""

from collections.abc import Mapping
from typing import Any

from omnicomp import passes
from omnicomp.backend.select.candidates import check_candidates
from omnicomp.lowerings.engines import check_engines
from omnicomp.lowerings.overrides.registry import check_overrides
from omnicomp.options.policy import Policy, parse


def policy_of(mode: str | None, options: Mapping[str, Any] | None) -> Policy:
    """Validate what the user passed, as `parse` does, and that engines, overrides, passes and candidates are there.

    Raises:
        OptionError: a key or a value is wrong; the message names the nearest known one.
    """
    checks = {
        "candidates": check_candidates,
        "engines": check_engines,
        "overrides": check_overrides,
        "passes": passes.check_passes,
    }
    policy = parse(mode, options, checks)
    passes.check_disabled(policy)
    return policy
