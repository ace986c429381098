"""Inductor's internals: its options, `compile_fx`, the compiled graph, and the tag in its cache keys."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import torch
import torch._inductor.config
import torch.compiler.config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import InductorError, LoweringException
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = [
    "CompiledFxGraph",
    "InductorError",
    "LoweringException",
    "cache_dir",
    "cache_tag",
    "compile_fx",
    "compile_fx_inner",
    "config_keys",
    "config_patches",
    "fallback_random",
    "freezing_requested",
    "modes",
    "on_artefact_loaded",
    "reset_cudagraphs",
]

_ARTEFACT_KEY: Final = "omnicomp"


@functools.cache
def config_keys() -> tuple[str, ...]:
    """The names of Inductor's config entries, as `torch.compile(options=...)` takes them."""
    return tuple(torch._inductor.config.get_config_copy())


@functools.cache
def modes() -> tuple[str, ...]:
    """The modes that `torch.compile` takes."""
    return tuple(list_mode_options())


def config_patches(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's config patches for a mode and options, made and checked by torch's own code.

    Raises:
        RuntimeError: a key or the type of a value is wrong.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


def freezing_requested(patches: Mapping[str, Any]) -> bool:
    """Whether freezing was asked for by option while the global config, which Dynamo reads, has it off."""
    return bool(patches.get("freezing")) and not torch._inductor.config.freezing


def fallback_random(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor must draw the random numbers that eager draws."""
    return bool(patches.get("fallback_random", torch._inductor.config.fallback_random))


@contextlib.contextmanager
def cache_tag(digest: str) -> Iterator[None]:
    """Put `digest` into the keys of Inductor's and AOTAutograd's caches, beside a tag of the user's."""
    user = torch.compiler.config.cache_key_tag
    tag = user if digest in user else f"{user}|{digest}"
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


def reset_cudagraphs() -> None:
    """Forget recorded CUDA graphs, as `torch.compiler.reset` does for Inductor."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()
