"""What the user may ask for, and the sentences that answer a mistake."""

from pathlib import Path
from typing import Any

import pytest
import torch

import omnicomp
from omnicomp.errors import OptionError
from omnicomp.options.__main__ import page
from omnicomp.options.dtype_policy import PRESETS
from omnicomp.options.policy import SPECS, Policy, parse


def test_defaults() -> None:
    assert parse(None, None) == Policy()


def test_modes_mean_what_inductor_means() -> None:
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert dict(parse(mode, None).inductor) == torch._TorchCompileInductorWrapper(mode, None, None).config


def test_inductor_keys_are_passed_through() -> None:
    policy = parse(None, {"epilogue_fusion": False, "triton.cudagraphs": True, "dtype_policy": "bf16"})
    assert dict(policy.inductor) == {"epilogue_fusion": False, "triton.cudagraphs": True}
    assert policy.dtype_policy == PRESETS["bf16"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtyp_policy": "bf16"}, ["dtyp_policy", 'did you mean "dtype_policy"']),
        ({"epilog_fusion": True}, ["epilog_fusion", 'did you mean "epilogue_fusion"']),
        ({"zzzzzz": True}, ["zzzzzz", "known ones are", *SPECS]),
        ({"dtype_policy": "bf61"}, ["'bf61'", 'did you mean "bf16"']),
        ({"dtype_policy": torch.bfloat16}, ["torch.bfloat16", 'did you mean "bf16"']),
        ({"lowerings": ["inductr"]}, ["'inductr'", 'did you mean "inductor"']),
        ({"lowerings": "eager"}, ["takes a list of names"]),
        ({"lowerings": ["eager", "eager"]}, ["different names"]),
        ({"device": "cudda"}, ["unknown device", "cuda"]),
        ({"on_error": "explode"}, ["on_error", "retreat, raise"]),
        ({"max_builds": -1}, ["max_builds", "-1"]),
        ({"summary": "yes"}, ["summary", "True or False"]),
        ({"timeline": 3}, ["timeline", "path"]),
        ({"epilogue_fusion": "maybe"}, ["epilogue_fusion"]),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse(None, options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(OptionError, match='did you mean "max-autotune"'):
        parse("max-autotun", None)


def test_torch_compile_raises_the_error_itself() -> None:
    compiled = torch.compile(torch.sin, backend="omni", options={"dtyp_policy": "bf16"})
    with pytest.raises(omnicomp.OptionError, match="did you mean") as caught:
        compiled(torch.ones(2))
    frames = [entry.name for entry in caught.traceback]
    assert "omni" not in frames, "the user sees no frames from inside the compiler"


def test_what_does_not_change_code_does_not_change_the_digest() -> None:
    assert parse(None, {"summary": False}).digest_parts() == parse(None, None).digest_parts()
    assert parse(None, {"dtype_policy": "bf16"}).digest_parts() != parse(None, None).digest_parts()
    # An override that is refuted is none, and its certificate is kept with the artefact.
    assert parse(None, {"certify": "off"}).digest_parts() != parse(None, {"certify": "new"}).digest_parts()
    assert parse(None, {"certify": "always"}).digest_parts() == parse(None, {"certify": "new"}).digest_parts()


def test_the_page_of_options_is_generated_from_their_declarations() -> None:
    written = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == page(), "python -m omnicomp.options > docs/options.md"


def test_an_option_without_effect_is_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="the option build_seconds has no effect"):
        policy = parse(None, {"build_seconds": 60})
    assert policy == parse(None, None)
