"""Inductor for the simulated device: the C++ kernels of the CPU's generator, run inside a launch of the device."""

from omnicomp.devices.inductor import DeviceSpec, register

SPEC = DeviceSpec(name="sim", scheduling="cpp", kernel_call="torch.sim.launch")


def enable() -> None:
    """Register the device with Inductor; `torch.sim` has to be there."""
    register(SPEC)
