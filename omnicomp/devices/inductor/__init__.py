"""Inductor for a device from outside, from one declaration.

    from omnicomp.devices.inductor import DeviceSpec, LaunchLimits, register

    register(DeviceSpec(name="gxu", scheduling="triton", op_overrides={...}, launch=LaunchLimits(num_warps=1)))

`registration("gxu")` tells what is registered, piece by piece. `DeviceCppScheduling` and `DeviceWrapper` are bases for
a device that generates something else.
"""

from omnicomp._torch.devices.codegen import DeviceCppScheduling, DeviceWrapper
from omnicomp.devices.inductor.registration import register
from omnicomp.devices.inductor.report import Piece, registration
from omnicomp.devices.inductor.spec import DeviceSpec, LaunchLimits, RegistrationError

__all__ = [
    "DeviceCppScheduling",
    "DeviceSpec",
    "DeviceWrapper",
    "LaunchLimits",
    "Piece",
    "RegistrationError",
    "register",
    "registration",
]
