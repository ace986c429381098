import json
from html.parser import HTMLParser
from typing import Any

import pytest

from omnicomp.testing.bringup import Bringup, Row, bringup, to_html, to_text
from omnicomp.testing.bringup.ladder import STEPS

DONE = dict.fromkeys(STEPS, "yes")
BLOCKED = {**dict.fromkeys(STEPS, ""), "captured": "yes", "supported": "no"}
MATCHED = {"matched": True, "reason": "", "summary": "all", "fallbacks": {}}


def row(operator: str, calls: int, kernel: str, steps: dict[str, str] = DONE, **more: Any) -> Row:
    return Row(
        operator=operator, dtypes=("float32",) * 3, shapes=("2d",), calls=calls, kernel=kernel, steps=steps, **more
    )


def table(*rows: Row, **more: Any) -> Bringup:
    head: dict[str, Any] = {"model": "m", "device": "gxu", "training": False, "graphs": 1, "note": "", "whole": MATCHED}
    return Bringup(rows=rows, **{**head, **more})


def test_what_blocks_most_comes_first_and_fallbacks_last():
    found = table(
        row("aten::sin", 9, "fallback", needs={"aten::sin.out": 2}),
        row("aten::relu", 2, "missing", BLOCKED, needs={"aten::relu": 1}, required=("aten::relu",)),
        row("aten::add.Tensor", 4, "missing", BLOCKED, needs={"aten::add.out": 1}, required=("aten::add.out",)),
        row("aten::add_.Tensor", 1, "missing", BLOCKED, needs={"aten::add.out": 1}),
        row("aten::exp", 3, "wrong", {**DONE, "matched": "no"}, needs={"aten::exp.out": 1}),
        row("aten::gelu", 20, "missing", DONE, needs={"aten::gelu.out": 1}),
        row("aten::mm", 50, "native"),
    )
    told = [(each.operator, each.state, each.blocks, each.required) for each in found.next()]
    assert told == [
        ("aten::add.out", "missing", 5, True),
        ("aten::exp.out", "wrong", 3, False),
        ("aten::relu", "missing", 2, True),
        ("aten::gelu.out", "compiled", 20, False),
        ("aten::sin.out", "fallback", 18, False),
    ]
    assert found.next()[0].of == ("aten::add.Tensor", "aten::add_.Tensor")
    assert not found.ok
    assert (
        "79 of 89 operator calls match the CPU; 3 operators are missing or wrong; in eager, 1 runs on the CPU"
        in found.summary()
    )
    assert found.kernels()["missing"] == 27


def test_everything_that_matched_is_enough():
    assert table(row("aten::mm", 1, "native"), row("aten::sin", 1, "fallback", needs={"aten::sin": 1})).ok
    assert not table(row("aten::mm", 1, "native"), whole={**MATCHED, "matched": False}).ok
    outside = row("aten::mm", 1, "missing", {**DONE, "captured": "no"}, needs={"aten::mm.out": 1})
    assert not table(outside).ok


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_all_views_show_the_same_and_escape_names():
    bad = "<script>alert(1)</script>"
    found = table(
        row("aten::relu", 2, "missing", BLOCKED, needs={"aten::relu": 1}, reason=f"raises {bad}"), note="a graph break"
    )
    page = to_html(found)
    assert "<script" not in page
    parser = _Texts()
    parser.feed(page)
    assert parser.open == []
    text = " ".join(parser.texts)
    for word in ("relu", "float32 x3", "missing", f"raises {bad}", "a graph break", found.summary()):
        assert word in text
    printed = to_text(found)
    for word in ("relu", "float32 x3", "missing", "a graph break", "To write next"):
        assert word in printed
    body = json.loads(found.to_json())
    assert body["next"][0] == {
        "operator": "aten::relu", "state": "missing", "blocks": 2, "required": False, "of": ["aten::relu"],
    }  # fmt: skip
    assert body["rows"][0]["steps"]["supported"] == "no"
    assert (body["ok"], body["calls"]) == (False, 2)


_MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.exp(torch.relu(x)) + torch.relu(x[0])

def build():
    return Model(), torch.randn(3, 4)
"""


@pytest.mark.slow
def test_a_model_is_taken_through_with_an_operator_that_crashes(tmp_path, shared_sim, monkeypatch):
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", shared_sim[1])
    (tmp_path / "mine.py").write_text(_MODEL)
    seen: list[str] = []
    found = bringup(
        f"{tmp_path}/mine.py:build", "sim", lowerings=["eager"], setup="job_suites:crash_in_exp_of_sim",
        say=lambda each: seen.append(each.operator),
    )  # fmt: skip
    rows = {each.operator: each for each in found.rows}
    assert seen == [each.operator for each in found.rows]
    assert rows["aten::relu"].ok
    assert rows["aten::exp"].kernel == "crashed"
    assert "SIGABRT" in rows["aten::exp"].reason
    assert rows["aten::add.Tensor"].ok
    assert [(each.operator, each.state, each.blocks) for each in found.next()] == [("aten::exp", "crashed", 1)]
    assert not found.whole["matched"]
    assert not found.ok
