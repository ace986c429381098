"""`wrap_module`: one module is compiled by omni, with everything that the backend does when something fails."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from omnicomp.devices import resolve_device
from omnicomp.devices.base import move_module, prepared
from omnicomp.errors import OptionError

Module = TypeVar("Module", bound=nn.Module)


class WrappedModule(nn.Module):
    """A module compiled by omni. Its attributes and its `state_dict` are those of the module inside."""

    def __init__(self, module: nn.Module, tag: str, options: Mapping[str, Any]) -> None:
        """Hold a module under its tag.

        Args:
            module: the module to call.
            tag: its name in the audit, and for overrides and rules that name a module.
            options: omnicomp's.
        """
        super().__init__()
        self._tag = tag
        self.add_module(tag, module)
        self.register_state_dict_post_hook(_without_tag)
        self.register_load_state_dict_pre_hook(_with_tag)
        self.train(module.training)
        self.compile(backend="omni", options={**options, "tag": tag})

    @property
    def wrapped(self) -> nn.Module:
        """The module itself, which runs eager."""
        return self._modules[self._tag]  # pyright: ignore[reportReturnType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._modules[self._tag](*args, **kwargs)  # pyright: ignore[reportOptionalCall]

    def __getattr__(self, name: str) -> Any:
        """What the module has and `nn.Module` has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__["_modules"].get(self.__dict__.get("_tag"))
            if held is None:
                raise
            return getattr(held, name)


def wrap_module(
    module: nn.Module,
    tag: str | None = None,
    *,
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> WrappedModule:
    """Compile one module: by overrides, by what compiles for its device, else eager.

    It is compiled in its first call, as under `torch.compile`. Until then nothing was tried, and the timeline
    has no events. What cannot be compiled runs eager, with its reason in the timeline.

    Args:
        module: what to run; it is changed by what `Device.prepare` changes for its device, and keeps its parameters.
        tag: a name without dots: of the module in the audit (its children are `tag.child`) and in the three-level
            timeline, and what an override with `module="tag"` and a rule on module paths match. The name of the class
            in lower case by default.
        device: a device to move the module to and to require; None takes that of its first parameter.
        options: omnicomp's, as for `torch.compile(..., options=...)`.
        config: what the device's `prepare` is told of how the module will be used; omnicomp reads nothing of it.

    Returns:
        A module with the same parameters, buffers, `state_dict` and attributes.

    Raises:
        DeviceError: there is no such device here.
        OptionError: the tag is no name.
    """
    name = type(module).__name__.lower() if tag is None else tag
    if not name or "." in name or hasattr(nn.Module, name):
        raise OptionError(f"tag {name!r} can't be the name of a module: use one without dots, such as 'unet'")
    parameter = next(iter(module.parameters()), None)
    target = resolve_device(device or (parameter.device.type if parameter is not None else "cpu"))
    if device is not None:
        module = move_module(module, torch.device(device))
    return WrappedModule(prepared(target, module, config or {}), name, options or {})


def _without_tag(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    del metadata
    _rename(state, f"{prefix}{wrapper._tag}.", prefix)


def _with_tag(wrapper: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    del rest
    _rename(state, prefix, f"{prefix}{wrapper._tag}.")


def _rename(state: dict[str, Any], old: str, new: str) -> None:
    """Exchange the prefix of the keys that have it, in place."""
    for key in [key for key in state if key.startswith(old)]:
        state[new + key.removeprefix(old)] = state.pop(key)
