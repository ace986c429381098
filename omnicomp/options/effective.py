"""What every option is set to, and who set it, for the timeline."""

import os
from collections.abc import Mapping
from typing import Any, Final

from omnicomp.options.policy import OWN_OPTIONS, Policy
from omnicomp.timeline.values import text_of

__all__ = ["effective_options"]

_ENVIRONMENT: Final = {
    "lowerings": "OMNICOMP_PLACE",
    "check_passes": "OMNICOMP_CHECK_PASSES",
    "verify": "OMNICOMP_VERIFY",
    "verdicts": "OMNICOMP_VERDICTS",
}


def effective_options(policy: Policy, options: Mapping[str, Any] | None) -> tuple[dict[str, str], dict[str, str]]:
    """Every option of a policy as text, and who gave it its value: `options`, `mode …`, `environment …` or `default`.

    Args:
        policy: the validated options.
        options: what the user passed.
    """
    passed = {str(key).replace("-", "_") for key in options or {}}
    values: dict[str, str] = {}
    origins: dict[str, str] = {}
    for name in OWN_OPTIONS:
        values[name] = text_of(getattr(policy, name))
        variable = _ENVIRONMENT.get(name, "")
        by_environment = variable and os.environ.get(variable)
        # Rules of placement of the environment come after those of the option; any other variable gives way to it.
        if by_environment and (name == "lowerings" or name not in passed):
            origins[name] = f"environment {variable}"
        else:
            origins[name] = "options" if name in passed else "default"
    if policy.rules:
        rules = [f"{rule.selector}: {' or '.join(rule.lowerings)}" for rule in policy.rules]
        values["lowerings"] = "; ".join((values["lowerings"], *rules))
    for name, value in policy.inductor.items():
        values[name] = text_of(value)
        origins[name] = "options" if name.replace("-", "_") in passed else f"mode {policy.mode}"
    return values, origins
