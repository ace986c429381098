"""PyTorch's framework for tests of any device type, which its own test suite and out-of-tree devices use."""

import os
import unittest
from typing import Any
from unittest import mock

import torch

from omnicomp._torch import opinfo


def run_generic_tests(device_type: str) -> tuple[list[str], list[str]]:
    """Make a few generic tests for a device type and run them: a device argument, dtypes, and operators' entries.

    Returns:
        Names of the tests that ran, and a line for each that failed.

    Raises:
        OmnicompError: a package is missing that the framework imports.
    """
    opinfo.names("add")  # imports the framework without leaving torch's settings frozen
    from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, ops
    from torch.testing._internal.common_utils import TestCase

    class TestOmnicomp(TestCase):
        def test_device(self, device: str) -> None:
            self.assertEqual(torch.ones(2, device=device).device.type, torch.device(device).type)  # noqa: PT009

        @dtypes(torch.float32, torch.int64)  # pyright: ignore[reportUntypedFunctionDecorator]
        def test_sum(self, device: str, dtype: torch.dtype) -> None:
            self.assertEqual(torch.ones(3, dtype=dtype, device=device).sum().item(), 3)  # noqa: PT009

        @ops([opinfo.find("add")], allowed_dtypes=(torch.float32,))  # pyright: ignore[reportUntypedFunctionDecorator]
        def test_samples(self, device: str, dtype: torch.dtype, op: Any) -> None:
            for sample in op.sample_inputs(device, dtype):
                wanted = op(sample.input.cpu(), *(_to_cpu(each) for each in sample.args), **sample.kwargs)
                self.assertEqual(op(sample.input, *sample.args, **sample.kwargs).cpu(), wanted)  # noqa: PT009

    scope: dict[str, Any] = {"__name__": __name__, "TestOmnicomp": TestOmnicomp}
    with mock.patch.dict(os.environ, {"PYTORCH_TESTING_DEVICE_ONLY_FOR": ""}):
        instantiate_device_type_tests(TestOmnicomp, scope, only_for=(device_type,), allow_mps=True, allow_xpu=True)
    made = [each for each in scope.values() if isinstance(each, type) and issubclass(each, unittest.TestCase)]
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(each) for each in made)
    names = [test.id().rsplit(".", 1)[-1] for each in suite for test in each]  # pyright: ignore[reportGeneralTypeIssues]
    result = unittest.TestResult()
    suite.run(result)
    return names, [f"{test.id()}: {text.strip().splitlines()[-1]}" for test, text in result.failures + result.errors]


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
