"""?"""

import os
from pathlib import Path

import golden
import pytest
from made_timelines import large_timeline

from omnicomp.audit import build
from omnicomp.audit.views.why import Excerpts, why
from omnicomp.errors import ReportError
from omnicomp.safety import privacy
from omnicomp.timeline import Attempt, Capture, Event, NodePlacement, Placement, Ran, Reason, Retreat, Subgraph


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text("".join(f"line {number}\n" for number in range(1, 11)))
    return path


def test_lines_around_a_place(file: Path) -> None:
    found = Excerpts(around=2).of(f"{file}:5")
    assert found is not None
    assert list(found.numbered()) == [(n, f"line {n}", n == 5) for n in range(3, 8)]


@pytest.mark.parametrize(("line", "first", "count"), [(1, 1, 3), (10, 8, 3)])
def test_the_ends_of_the_file(file: Path, line: int, first: int, count: int) -> None:
    found = Excerpts(around=2).of(f"{file}:{line}")
    assert found is not None
    assert (found.first, len(found.lines)) == (first, count)


@pytest.mark.parametrize(
    "source", ["", "model.py", "{file}:0", "{file}:11", "{file}:x", "{folder}/none.py:1", "{folder}:1"]
)
def test_no_such_place(file: Path, source: str) -> None:
    assert Excerpts().of(source.format(file=file, folder=file.parent)) is None


def test_a_report_cannot_make_a_reader_show_other_files(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret\n")
    assert Excerpts().of(f"{tmp_path}/id_rsa:1") is None
    assert Excerpts().of("/etc/passwd:1") is None
    (tmp_path / "link.py").symlink_to(tmp_path / "id_rsa")
    assert Excerpts().of(f"{tmp_path}/link.py:1") is None
    os.mkfifo(tmp_path / "pipe.py")
    assert Excerpts().of(f"{tmp_path}/pipe.py:1") is None


def test_secrets_and_control_characters_are_hidden(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    privacy.refresh()
    file.write_text('key = "correct-horse-battery"\nshow("\x1b[2J")\n')
    found = Excerpts().of(f"{file}:1")
    monkeypatch.undo()
    privacy.refresh()
    assert found is not None
    assert found.lines == ('key = "***"', 'show("\ufffd[2J")')


def test_a_file_that_was_changed_after_the_run_says_so(file: Path) -> None:
    since = file.stat().st_mtime
    for run, changed in ((since + 5, False), (since - 5, True), (0.0, False)):
        found = Excerpts().of(f"{file}:1", run)
        assert found is not None
        assert found.changed is changed


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("operator", "aten.foo"),
        ("subgraph", "g0.forward.10"),
        ("near-miss", "softmax_1"),
        ("pass", "fuse_attention"),
        ("option", "triton.cudagraphs"),
    ],
)
def test_golden(name: str, question: str, events: list[Event]) -> None:
    golden.check(f"audit/sample.why-{name}.txt", why(build(events), question).to_text())


@pytest.mark.parametrize(
    "question",
    ["foo", "aten.foo.default", "aten.foo", "foo.default", "aten.f*", "model.py:12", "g0.forward.1", "unsupported_op"],
)
def test_every_name_of_a_node_finds_it(question: str, events: list[Event]) -> None:
    first = why(build(events), question).answers[0]
    assert first.title == "aten.foo.default is on eager" or first.title.startswith("g0.forward.1 is on eager")


def test_a_module_means_what_is_inside_it() -> None:
    found = build(large_timeline(40, graphs=1))
    for question in ("layers.3.router", "layers.3", "layers.*.router", "layers"):
        titles = [answer.title for answer in why(found, question).answers]
        assert "aten.nonzero.default is on eager" in titles
    assert why(found, "layers.3.mlp").answers[0].title == "as planned in g0"


def test_the_chain_is_whole() -> None:
    text = why(build(large_timeline(40, graphs=1)), "layers.3.router").to_text()
    for piece in (
        "inductor refused it: the size of its result depends on values [unsupported_op]",
        "observed   u0 elements",
        "needed     a size that is known before the call",
        "caused by  gt_3",
        "to change  use torch.where with three arguments",
        "so it was placed on eager",
        "eager built it",
        "it ran on eager: module_13.py",
        "g0.forward.12 and g0.forward.14 would be one subgraph",
    ):
        assert piece in text


def test_equal_answers_are_one_with_the_other_places() -> None:
    (answer, *_) = why(build(large_timeline(80, graphs=1)), "aten.nonzero").answers
    assert len(answer.places) == 9
    assert answer.places[0].startswith("nonzero_1 in g0.forward, layers.1.router")
    assert answer.places[-1] == "and 11 more"


def test_a_retreat_and_what_ran_after_it() -> None:
    reason = Reason(code="call_failed", by="inductor", sentence="the kernel raised", lever="look at it")
    where = {"graph": "g0", "part": "forward", "subgraph": "g0.forward.0"}
    events = [
        Subgraph(**where, lowering="inductor", nodes=1),
        Attempt(**where, lowering="inductor", ok=True, selected=True, seconds=2.0),
        Ran(**where, lowering="inductor", evidence="a.py"),
        Retreat(**where, source_lowering="inductor", target_lowering="eager", reason=reason),
        Ran(**where, lowering="eager", evidence="by hand"),
    ]
    steps = [step.what for step in why(build(events), "g0.forward.0").answers[0].steps]
    assert steps == [
        "the plan for g0.forward.0 was inductor",
        "inductor built it in 2.0 s",
        "inductor retreated to eager",
        "it ran on inductor: a.py",
        "it ran on eager: by hand",
    ]


def test_a_difference_from_the_plan_is_said() -> None:
    where = {"graph": "g0", "part": "forward", "subgraph": "g0.forward.0"}
    events = [Subgraph(**where, lowering="inductor", nodes=1), Ran(**where, lowering="eager")]
    (answer,) = why(build(events), "g0").answers
    assert answer.title == "g0.forward.0 did not run as planned"
    assert answer.steps[-1].tone == "bad"


def test_lines_of_the_source_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("a = 1\nb = x.nonzero()\nc = 3\n")
    reason = Reason(code="unsupported_op", by="inductor", sentence="no", source=f"{file}:2")
    node = NodePlacement(
        node="nonzero", op="aten.nonzero.default", lowering="eager", source=f"{file}:2", chain=(reason,)
    )
    events = [Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,))]
    text = why(build(events), "nonzero").to_text()
    assert "> 2 | b = x.nonzero()" in text
    assert "(the file was changed after the run)" not in text
    events.insert(0, Capture(graph="g0", time=1.0))
    assert "(the file was changed after the run)" in why(build(events), "nonzero").to_text()


@pytest.mark.parametrize(
    ("question", "hint"),
    [
        ("aten.fooo", 'did you mean "aten.foo"'),
        ("nothing-like-it", "name a module, an operator"),
        ("", "name a module"),
        ("constructor", "name a module"),
    ],
)
def test_an_unknown_name_is_one_sentence(question: str, hint: str, events: list[Event]) -> None:
    with pytest.raises(ReportError, match=hint) as error:
        why(build(events), question)
    assert "\n" not in str(error.value)


def test_names_do_not_move_the_cursor() -> None:
    node = NodePlacement(node="n\x1b[2J", op="aten.\x1b[2J", lowering="eager", module="[red]m", chain=())
    found = build([Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,))])
    text = why(found, "[red]m").to_text()
    assert "\x1b" not in text
    assert "[red]m" in text


@pytest.mark.parametrize("question", ["*", "**", "g0*", "?oo", "[f]oo"])
def test_patterns(question: str, events: list[Event]) -> None:
    assert why(build(events), question).answers


@pytest.mark.parametrize("question", ["[", "[!", "]", "\\", "\x1b[2J", "(?", "a" * 10_000, "\ud800"])
def test_no_question_is_too_odd(question: str, events: list[Event]) -> None:
    with pytest.raises(ReportError, match="the report has nothing called"):
        why(build(events), question)


def test_the_report_answers_itself(events: list[Event]) -> None:
    report = build(events)
    assert report.why("g0.forward.10").to_text() == why(report, "g0.forward.10").to_text()


def test_a_graph_without_parts_is_known_and_has_nothing_to_tell() -> None:
    with pytest.raises(ReportError, match="nothing to tell"):
        build([Capture(graph="g0", nodes=1)]).why("g0")
