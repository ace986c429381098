"""Options of `torch.compile(..., backend="omni")`, checked by the rooms that know what their values name."""

from collections.abc import Mapping
from typing import Any

from omnicomp import passes
from omnicomp.lowerings.overrides.registry import check_overrides
from omnicomp.options.policy import Policy, parse


def policy_of(mode: str | None, options: Mapping[str, Any] | None) -> Policy:
    """Validate what the user passed, as `parse` does, and that engines, overrides, passes and candidates are there.

    Raises:
        OptionError: a key or a value is wrong; the message names the nearest known one.
    """
    checks = {
        "candidates": _check_candidates,
        "engines": _check_engines,
        "overrides": check_overrides,
        "passes": passes.check_passes,
    }
    policy = parse(mode, options, checks)
    passes.check_disabled(policy)
    return policy


def _check_candidates(name: str, value: Any) -> tuple[str, ...] | None:
    from omnicomp.backend.select.candidates import check_candidates

    return check_candidates(name, value)


def _check_engines(name: str, value: Any) -> dict[str, dict[str, Any]]:
    from omnicomp.lowerings.engines import check_engines

    return check_engines(name, value)
