"""Whether a device keeps what torch and omnicomp ask of it: `omnicomp conformance DEVICE`, and the same for pytest.

In the test suite of a device's package:

    from omnicomp.testing.conformance import pytest_checks

    test_conformance = pytest_checks("gxu", quick=True)

Without a file of one's own: `pytest -p omnicomp.testing.conformance.plugin --device gxu --pyargs
omnicomp.testing.conformance.test_device`.
"""

from omnicomp.testing.conformance.collected import pytest_checks
from omnicomp.testing.conformance.suite import Report, Result, conformance, results, to_text

__all__ = ["Report", "Result", "conformance", "pytest_checks", "results", "to_text"]
