"""Every report that a test makes is held against the JSON Schema, as this version writes it: no key less, none more.

Machines that tests of a device are run on may not have jsonschema; there only the way back is looked at.
"""

import functools
from typing import Any

try:
    from jsonschema import Draft202012Validator
except ModuleNotFoundError:
    Draft202012Validator = None

from omnicomp.audit import Audit
from omnicomp.audit.schema import generate
from omnicomp.audit.views.jsonform import from_dict, to_dict


@functools.cache
def validator() -> Any:
    return Draft202012Validator and Draft202012Validator(generate(strict=True))


def check(report: dict[str, Any]) -> dict[str, Any]:
    """The report's JSON form, if it is right."""
    schema = validator()
    error = None if schema is None else next(schema.iter_errors(report), None)
    assert error is None, f"the report breaks its schema at {error.json_path}: {error.message}"
    return report


def check_audit(audit: Audit) -> None:
    """A report is right, and reads back as it was."""
    report = check(to_dict(audit))
    assert to_dict(from_dict(report)) == report
