"""Check that PyTorch's own generic tests can be made for a device: `instantiate_device_type_tests`."""

from omnicomp._torch.devices.torch_tests import run_generic_tests
from omnicomp.testing.conformance.base import Session, check, expect

__all__: list[str] = []


@check("framework.device_type_tests", "give the device a name and a module; PyTorch finds the rest by itself")
def _framework(session: Session) -> str:
    ran, wrong = run_generic_tests(session.type)
    expect(ran, f"PyTorch's framework makes no test for {session.type}")
    expect(not wrong, "; ".join(wrong))
    return f"{len(ran)} of PyTorch's generic tests made and run: {', '.join(ran)}"
