import json
from pathlib import Path

import torch

from omnicomp._torch.devices.dispatcher import (
    Standing,
    census,
    draws_random_numbers,
    hearing,
    is_required,
    kernel_of,
    qualified_name,
    unheard,
)

ATEN = torch.ops.aten


def test_required_operators_are_those_of_the_declarations_in_the_wheel():
    path = Path(torch.__file__).parent / "include" / "ATen" / "RegistrationDeclarations.h"
    wanted: dict[str, bool] = {}
    for line in path.read_text().splitlines():
        _, mark, flags = line.partition("// {")
        if mark:
            declared = json.loads("{" + flags)
            required = declared["dispatch"] == "True" and declared["default"] == "False"
            wanted[declared["schema"].split("(")[0]] = required
    assert sum(wanted.values()) > 500
    assert [name for name, required in wanted.items() if is_required(name) != required] == []


def test_what_a_device_without_kernels_meets():
    assert kernel_of("aten::relu", "hpu") == Standing("missing", "aten::relu")
    assert kernel_of("aten::add.Tensor", "hpu") == Standing("missing", "aten::add.out")
    assert kernel_of("aten::add_.Tensor", "hpu") == Standing("missing", "aten::add.out")
    assert kernel_of("aten::linear", "hpu") == Standing("composite", "aten::linear")
    assert kernel_of("aten::relu", "cpu") == Standing("native", "aten::relu")
    assert kernel_of("aten::of_nobody", "cpu") == Standing("missing", "aten::of_nobody")


def test_a_kernel_for_the_out_form_serves_all_forms():
    library = torch.library.Library("aten", "IMPL")
    library.impl("add.out", lambda self, other, *, alpha=1, out: out, "HPU")
    try:
        for name in ("aten::add.Tensor", "aten::add_.Tensor", "aten::add.out"):
            assert kernel_of(name, "hpu") == Standing("native", "aten::add.out")
    finally:
        library._destroy()


def test_every_operator_is_counted_once():
    cpu, none = census("cpu"), census("hpu")
    assert sum(cpu.values()) == sum(none.values())
    assert cpu["native"] > 900
    assert none["native"] == 0 < none["missing"]


def test_operators_are_heard_also_in_backward_but_not_where_they_are_not_to_be():
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with hearing(lambda operator, args, kwargs: seen.append(qualified_name(operator))):
        y = x.sin()
        with unheard():
            z = y.exp()
        z.sum().backward()
    assert "aten::sin" in seen
    assert "aten::cos" in seen
    assert "aten::exp" not in seen


def test_random_operators_are_known():
    assert draws_random_numbers(ATEN.rand.default)
    assert not draws_random_numbers(ATEN.sin.default)
