"""Redirects a program's `torch.compile` calls to omni, for `omnicomp run`."""

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping
from typing import Any

import torch

from omnicomp._torch.dynamo.registrations import backend_names, default_backend, lookup_backend, settle_dynamo

__all__ = ["Redirected", "redirected"]


@dataclasses.dataclass(kw_only=True)
class Redirected:
    """What happened to the calls.

    Attributes:
        sent: how many calls were sent to omni, or named it themselves.
        kept: backends that calls named and kept, with the number of calls.
    """

    sent: int = 0
    kept: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True)
class _Both:
    """The backend with a mode and options together, which `torch.compile` itself refuses to take.

    Equal ones are equal, because Dynamo compiles anew for another backend.
    """

    mode: str
    options: tuple[tuple[str, str], ...]
    values: Mapping[str, Any] = dataclasses.field(compare=False)

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return lookup_backend(_name())(gm, inputs, mode=self.mode, options=self.values)  # type: ignore[call-arg]


@contextlib.contextmanager
def redirected(mode: str | None, options: Mapping[str, Any]) -> Generator[Redirected]:
    """Replace `torch.compile` until the block ends.

    A call that names no backend, or Inductor, gets omni; any other backend is left and counted. `nn.Module.compile`
    and the decorator forms call `torch.compile` and need nothing of their own. Libraries that took the function before
    (`from torch import compile`) keep the original.

    Args:
        mode: replaces the mode of every redirected call; None keeps each call's own.
        options: added to the options of every redirected call; they win over the call's own.
    """
    settle_dynamo()
    original = torch.compile
    counts = Redirected()

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # Dynamo traces a call inside compiled code and inlines what it compiles: it must see its own function.
            return original(model, **kwargs)
        if model is None:
            # torch's own decorator form would come back here, with the backend set already.
            return functools.partial(compile, **kwargs)
        backend = kwargs.get("backend")
        backend = default_backend() if backend is None else backend
        if isinstance(backend, str) and backend in ("inductor", "omni"):
            counts.sent += 1
            kwargs.update(_arguments(kwargs, mode, options))
        else:
            name = backend if isinstance(backend, str) else getattr(backend, "__qualname__", repr(backend))
            counts.kept[name] = counts.kept.get(name, 0) + 1
        return original(model, **kwargs)

    torch.compile = compile  # type: ignore[assignment]
    try:
        yield counts
    finally:
        torch.compile = original


def _arguments(kwargs: Mapping[str, Any], mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Backend, mode and options of a redirected call."""
    own = kwargs.get("options")
    own_mode = kwargs.get("mode")
    if own is not None and own_mode is not None and mode is None:
        # torch.compile refuses this call under any backend: the user is to see the error that it always gave.
        return {"backend": _name()}
    merged = {**(own or {}), **options}
    chosen = mode if mode is not None else own_mode
    if not merged:
        return {"backend": _name(), "mode": chosen, "options": None}
    if chosen is None or chosen == "default":
        return {"backend": _name(), "mode": None, "options": merged}
    # torch.compile takes these two out of the options itself; they never reach a backend.
    own_keys = {key: merged.pop(key) for key in ("guard_filter_fn", "use_aoti") if key in merged} or None
    values = tuple(sorted((key, repr(value)) for key, value in merged.items()))
    return {"backend": _Both(chosen, values, merged), "mode": None, "options": own_keys}


def _name() -> Any:
    """The backend by name; the function itself where omnicomp runs from a checkout that was never installed."""
    if "omni" in backend_names():
        return "omni"
    from omnicomp.backend.pipeline import omni

    return omni
