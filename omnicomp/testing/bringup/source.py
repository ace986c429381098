"""The model that is brought up: one of omnicomp's by name, or a function of the user's."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from omnicomp.errors import OmnicompError, nearest
from omnicomp.testing import models
from omnicomp.testing.named import find_function

__all__ = ["Subject", "check_name", "load"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with inputs, on the CPU.

    Attributes:
        model: the module.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def loss(self, result: Any) -> torch.Tensor:
        """A number to differentiate: the `loss` that the model returns, or the mean square of what it returns.

        Raises:
            OmnicompError: nothing that it returns has a history.
        """
        given = getattr(result, "loss", None)
        if isinstance(given, torch.Tensor):
            return given
        leaves = [leaf for leaf in tree_leaves(_plain(result)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not leaves:
            raise OmnicompError("nothing that the model returns can be differentiated; leave --train out")
        return torch.stack([leaf.abs().square().mean() for leaf in leaves]).sum()


def _plain(result: Any) -> Any:
    """The structure of a result; the outputs of transformers are dictionaries."""
    return dict(result) if isinstance(result, Mapping) else result


def check_name(name: str, size: str = "tiny") -> None:
    """Check the form of a model's name; `load` looks functions up.

    Raises:
        OmnicompError: it is no model of omnicomp's and no `file.py:function`, or the size is unknown.
    """
    if size not in models.SIZES:
        raise OmnicompError(f"there is no size {size!r}, only {', '.join(models.SIZES)}{nearest(size, models.SIZES)}")
    if ":" not in name and name not in models.MODELS:
        known = ", ".join(models.MODELS)
        hint = nearest(name, models.MODELS)
        raise OmnicompError(f"there is no model {name!r}: name one of {known}, or file.py:function{hint}")


def load(name: str, size: str = "tiny", *, training: bool = False) -> Subject:
    """Build a model.

    Args:
        name: a key of `omnicomp.testing.models.MODELS`, or `file.py:function` or `module:function` of a function that
            returns a module and its inputs: a tensor, a tuple or list of arguments, or a dictionary of named ones.
        size: of omnicomp's own models.
        training: whether it is put into training mode; else into evaluation mode.

    Raises:
        OmnicompError: there is no such model, or building it raises.
    """
    check_name(name, size)
    if ":" not in name:
        try:
            case = models.build(name, size)
        except ImportError as error:
            raise OmnicompError(f"{name} needs transformers: pip install omnicomp[test] ({error})") from error
        return Subject(model=case.model.train(training), kwargs=case.inputs)
    function = find_function(name)
    torch.manual_seed(0)
    try:
        made = function()
    except Exception as error:
        raise OmnicompError(f"{name} raises {type(error).__name__}: {error}") from error
    with contextlib.suppress(TypeError, ValueError):
        model, inputs = made
        if isinstance(model, nn.Module):
            return _subject(model.cpu().train(training), inputs)
    raise OmnicompError(f"{name} has to return a module and its inputs, and returns a {type(made).__name__}")


def _subject(model: nn.Module, inputs: Any) -> Subject:
    if isinstance(inputs, Mapping):
        return Subject(model=model, kwargs=dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Subject(model=model, args=tuple(inputs))
    return Subject(model=model, args=(inputs,))
