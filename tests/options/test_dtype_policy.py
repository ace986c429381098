"""The declared policy: what it may say, how it is written, and the sentences that answer a mistake."""

import pickle
import re
from typing import Any

import pytest
import torch

import omnicomp
from omnicomp.errors import OptionError
from omnicomp.options.dtype_policy import PRESETS, DtypePolicy, parse_dtype_policy
from omnicomp.options.policy import parse


def test_it_is_public() -> None:
    assert omnicomp.DtypePolicy is DtypePolicy


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_known_by_its_name(name: str) -> None:
    policy = parse(None, {"dtype_policy": name}).dtype_policy
    assert policy is PRESETS[name]
    assert str(policy) == name
    assert parse(None, {"dtype_policy": name}).digest_parts()["dtype_policy"] == name


def test_a_mapping_starts_from_a_preset() -> None:
    policy = parse_dtype_policy({"preset": "bf16", "keep": ["lm_head"], "ops": {"bmm": "fp16"}})
    assert policy == DtypePolicy(compute=torch.bfloat16, keep=("lm_head",), ops={"bmm": torch.float16})
    assert parse_dtype_policy({"preset": "bf16"}) is PRESETS["bf16"]
    assert parse_dtype_policy(policy) is policy


@pytest.mark.parametrize("value", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_go_by_name(value: Any) -> None:
    assert parse_dtype_policy({"compute": value}).compute is torch.bfloat16


def test_its_text_is_stable_and_names_what_differs() -> None:
    policy = DtypePolicy(compute=torch.float16, modules={"head": torch.float32})
    assert str(policy) == "DtypePolicy(compute=torch.float16, modules={'head': torch.float32})"
    # What only looks like a preset is not called by its name.
    assert str(DtypePolicy(name="bf16", compute=torch.float16)).startswith("DtypePolicy(")


def test_equal_policies_are_equal_and_hash_alike() -> None:
    make = lambda: DtypePolicy(compute=torch.bfloat16, ops={"a": torch.float32, "b": torch.float16})  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
    assert pickle.loads(pickle.dumps(make())) == make()
    # The last entry of several that match decides, so that their order counts.
    assert make() != DtypePolicy(compute=torch.bfloat16, ops={"b": torch.float16, "a": torch.float32})


def test_what_changes_a_graph() -> None:
    assert not PRESETS["keep"].changes
    assert PRESETS["tf32"].changes
    assert not PRESETS["tf32"].rewrites
    assert DtypePolicy(accumulate=torch.float64).rewrites
    assert DtypePolicy(ops={"bmm": torch.float16}).rewrites


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("bf61", ["'bf61'", 'did you mean "bf16"']),
        (torch.bfloat16, ["torch.bfloat16", 'did you mean "bf16"']),
        (16, ["16", "it takes keep, auto, bf16", "for example 'bf16'"]),
        ({"comput": "bf16"}, ["comput", 'did you mean "compute"']),
        ({"compute": "bfloat61"}, ["bfloat61", 'did you mean "bfloat16"']),
        ({"compute": "int8"}, ["int8", "torch.float32 or None"]),
        ({"accumulate": "bf16"}, ["accumulate", "torch.float32 or torch.float64"]),
        ({"matmul": "tf23"}, ["matmul", "tf32"]),
        ({"weights": "twice"}, ["weights", "once"]),
        ({"fp8": "block"}, ["fp8", "tensor"]),
        ({"keep": "lm_head"}, ["keep", "list of selectors"]),
        ({"ops": ["linear"]}, ["ops", "mapping of selectors to dtypes"]),
        ({"ops": {"linear": "float64"}}, ["linear", "float64"]),
        ({"modules": {"head": "int8"}}, ["head", "int8"]),
        ({"preset": "bf61"}, ["'bf61'", 'did you mean "bf16"']),
        ("BF16", ["'BF16'", 'did you mean "bf16"']),
        (torch.float64, ["torch.float64", "it takes keep"]),
        ({"keep": None}, ["keep", "list of selectors", "None"]),
        ({"keep": 3}, ["keep", "list of selectors", "3"]),
        ({"auto": "false"}, ["auto", "True or False", "'false'"]),
        ({"preset": "auto", "compute": "fp16"}, ["auto leaves compute to the device", "float16"]),
        ({"fp8": "row"}, ["fp8 needs compute=torch.bfloat16"]),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(value: Any, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse(None, {"dtype_policy": value})
    text = str(caught.value)
    assert "\n" not in text
    assert "dtype_policy" in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"compute": "bf16"}, "can't be 'bf16'; it takes torch.bfloat16"),
        ({"ops": None}, "ops can't be None; it takes a mapping"),
        ({"modules": [1]}, "modules can't be [1]; it takes a mapping"),
        ({"ops": {"linear": "bf16"}}, "ops['linear'] can't be 'bf16'; it takes torch.bfloat16"),
        ({"keep": 3}, "keep can't be 3; it takes a list"),
        ({"name": []}, "name can't be []; it takes a string"),
    ],
)
def test_so_is_one_in_an_object(fields: Any, word: str) -> None:
    with pytest.raises(OptionError, match=re.escape(word)):
        DtypePolicy(**fields)


def test_a_policy_stays_what_it_was_made_as() -> None:
    rules = {"linear": torch.bfloat16}
    policy = DtypePolicy(ops=rules)
    before = hash(policy)
    rules["softmax"] = torch.float16
    assert hash(policy) == before
    assert dict(policy.ops) == {"linear": torch.bfloat16}
    # The order of a set differs from process to process, and the policy is part of keys on disk.
    assert DtypePolicy(keep={"b", "a", "c"}).keep == ("a", "b", "c")  # type: ignore[arg-type]


def test_torch_compile_takes_an_object_and_the_timeline_shows_it() -> None:
    policy = DtypePolicy(compute=torch.bfloat16, keep=["head"])
    options: Any = {"dtype_policy": policy, "lowerings": ["eager"]}
    run = torch.compile(lambda x: x @ x, backend="omni", options=options)
    x = torch.randn(8, 8)
    torch.testing.assert_close(run(x), (x.bfloat16() @ x.bfloat16()).float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(run(x), x @ x)
    audit = omnicomp.audit()
    assert "keep=('head',)" in audit.to_json()
    assert "keep=('head',)" in audit.to_text()
