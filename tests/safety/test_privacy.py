import dataclasses
import json
import logging
import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import omnicomp
from omnicomp.errors import OptionError, first_line
from omnicomp.options.policy import parse
from omnicomp.safety import privacy
from omnicomp.safety.privacy import HIDDEN, Cleaner
from omnicomp.timeline import Attempt, Capture, NodePlacement, Placement, Reason

SECRET = "correct-horse/battery+staple"
HF = "hf_" + "aB3" * 11


class Pair(NamedTuple):
    first: str
    second: str


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Any:
    yield
    privacy.refresh()


def clean(text: str, **environment: str) -> str:
    return Cleaner(environment).text(text)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "SENTRY_DSN"])
def test_values_of_secret_variables_are_hidden_wherever_they_are(name: str) -> None:
    assert clean(f"HTTP 401 for /v1?x={SECRET}!", **{name: SECRET}) == f"HTTP 401 for /v1?x={HIDDEN}!"


def test_other_variables_and_short_values_are_no_secrets() -> None:
    environment = {"MODE": "max-autotune", "TOKENIZERS_PARALLELISM": "false", "API_KEY": "1", "PATH": "/usr/bin"}
    environment["GIT_AUTHOR_NAME"] = "inductor"
    text = "max-autotune, false, 1, /usr/bin, inductor"
    assert clean(text, **environment) == text


@pytest.mark.parametrize(
    "name",
    "STRIPE_KEY MYSQL_PWD DB_PASS PGPASSWORD apiToken db.pass GITHUB_TOKEN_PROD AUTHORIZATION JWT KEY user_pwd".split(),
)
def test_names_of_secrets(name: str) -> None:
    assert privacy.is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *"max_tokens tokenizer num_keys TOKENIZERS_PARALLELISM pad_token PAD_TOKEN_ID key_padding_mask".split(),
        *"CACHE_KEY PWD OLDPWD KEYBOARD post_grad_custom_pre_pass disable_passes GIT_AUTHOR_NAME".split(),
        *"MAX_TOKENS num_key_value_heads bypass keyword_only monkey compass XAUTHORITY author sort_key key".split(),
    ],
)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not privacy.is_secret_name(name)


def test_a_secret_is_hidden_in_each_form_that_a_message_may_have_it_in() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"
    found = clean(
        f"{key}|first line: MIIEvQIBADANBgkq|a%2Fb%2Bsecret%3D|hunter2hunter2",
        SIGNING_KEY=key,
        MY_TOKEN="a/b+secret=",
        PROXY="http://me:hunter2hunter2@proxy",
    )
    assert found == f"{HIDDEN}|first line: {HIDDEN}|{HIDDEN}|{HIDDEN}"


def test_a_folder_is_no_secret(tmp_path: Path) -> None:
    assert clean(f"{tmp_path}/model.py:3", PRIVATE_MODELS=str(tmp_path)) == f"{tmp_path}/model.py:3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"/data/{HF}/t.jsonl", f"/data/{HIDDEN}/t.jsonl"),
        ("ghp_" + "x" * 36, HIDDEN),
        ("key AKIAABCDEFGHIJKLMNOP.", f"key {HIDDEN}."),
        ("https://me:pass@host/model.bin", f"https://{HIDDEN}@host/model.bin"),
        ("s3://b/k?X-Amz-Signature=abc&part=1", f"s3://b/k?X-Amz-Signature={HIDDEN}&part=1"),
        ("Authorization: Bearer abcdefgh123", f"Authorization: Bearer {HIDDEN}"),
        ("aten.add.Tensor at /m/model.py:12 with s0*token + 2", "aten.add.Tensor at /m/model.py:12 with s0*token + 2"),
        ("https://pytorch.org/docs?page=3", "https://pytorch.org/docs?page=3"),
        ("sk_live_" + "a1" * 12, HIDDEN),
        ("with AIzaSyD-1234567890 in it", f"with {HIDDEN} in it"),
        ("npm_" + "aB3" * 12, HIDDEN),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", f"Authorization: Basic {HIDDEN}"),
        ("got basic dXNlcjpwYXNzd29yZA", f"got basic {HIDDEN}"),
        ("Basic operations are fused", "Basic operations are fused"),
        ("Bearer authentication is asked for", "Bearer authentication is asked for"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def_", HIDDEN),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b", f"a {HIDDEN} b"),
        ("cut -----BEGIN OPENSSH PRIVATE KEY-----\\nb3Blbn", f"cut {HIDDEN}"),
        ("postgres://me:p@ss/w0rd@host/db", f"postgres://{HIDDEN}@host/db"),
        ("http://localhost:8080/a@b", "http://localhost:8080/a@b"),
        ("DB_PASS=correcthorse and PORT=54321678", f"DB_PASS={HIDDEN} and PORT=54321678"),
        ("{'api_key': 'abcdefgh', 'max_tokens': '12345678'}", f"{{'api_key': '{HIDDEN}', 'max_tokens': '12345678'}}"),
        ('{\\"password\\": \\"abcdefgh\\"}', f'{{\\"password\\": \\"{HIDDEN}\\"}}'),
        ("run --password=hunter22 --user=me", f"run --password={HIDDEN} --user=me"),
        (
            "['x', '--api-key', 'hunter22', '--max-tokens', '4096']",
            f"['x', '--api-key', '{HIDDEN}', '--max-tokens', '4096']",
        ),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", f"aws_secret_access_key = {HIDDEN}"),
        ("token = tokenizer.encode(x, key=self.key)", "token = tokenizer.encode(x, key=self.key)"),
        ('l_token_: "f32[2, 8]", key: "f32[8, 64]"', 'l_token_: "f32[2, 8]", key: "f32[8, 64]"'),
    ],
)
def test_credentials_are_hidden_by_their_form(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_an_option_with_the_name_of_a_secret_is_hidden() -> None:
    event = Capture(graph="g0", options={"api_token": "abc", "mode": "x", "paths": [HF, 3], "file": Path(f"/d/{HF}")})
    event = dataclasses.replace(event, options={**event.options, "pair": Pair("a", HF)})
    found = Cleaner({}).value(event)
    assert found.options.pop("pair") == ("a", HIDDEN)
    assert found.options == {"api_token": HIDDEN, "mode": "x", "paths": [HIDDEN, 3], "file": f"/d/{HIDDEN}"}


def test_events_are_cleaned_at_any_depth_and_otherwise_returned_as_they_are() -> None:
    reason = Reason.from_dict({"code": "from_the_future", "sentence": f"it said {SECRET}"})
    node = NodePlacement(node="n", op="aten.foo.default", lowering="eager", chain=(reason,))
    event = Placement(graph="g0", part="forward", nodes={"eager": 1}, declined=(node,))
    found = Cleaner({"SECRET": SECRET}).value(event)
    assert found.declined[0].chain[0].sentence == f"it said {HIDDEN}"
    assert (found.declined[0].chain[0].code, reason.sentence) == ("from_the_future", f"it said {SECRET}")
    assert Cleaner({}).value(event) == event


def test_paths_are_relative_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, home = tmp_path / "home" / "me" / "project", tmp_path / "home" / "me"
    (project / "src").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    monkeypatch.chdir(project / "src")
    monkeypatch.setenv("HOME", str(home))
    environment = {"OMNICOMP_PATHS": "relative", "TORCHINDUCTOR_CACHE_DIR": "/scratch/cache"}
    packages = sysconfig.get_path("purelib")
    for text, expected in {
        f"{project}/src/model.py:12": "src/model.py:12",
        f"Model.forward ({project}/src/model.py:5)": "Model.forward (src/model.py:5)",
        f"in {project}": "in .",
        f"'{home}/other.py'": "'~/other.py'",
        f"{packages}/torch/nn.py:3": "site-packages/torch/nn.py:3",
        "/scratch/cache/ab/c0.py": "inductor-cache/ab/c0.py",
        f"{project}-two/a.py": "~/project-two/a.py",
        f"/x{home}/a.py": f"/x{home}/a.py",
        "layers.0.attn": "layers.0.attn",
    }.items():
        assert clean(text, **environment) == expected
        assert clean(text) == text


def test_paths_are_absolute_or_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_PATHS", "none")
    with pytest.raises(OptionError, match="OMNICOMP_PATHS can't be 'none'"):
        parse(None, {})


def leaking(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.parametrize("relative", [False, True])
def test_a_run_writes_no_secret_and_no_place_it_should_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, relative: bool
) -> None:
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", SECRET)
    monkeypatch.setenv("UNRELATED", "an environment value that nobody asked for")
    if relative:
        monkeypatch.chdir(Path(__file__).parents[2])
        monkeypatch.setenv("OMNICOMP_PATHS", "relative")
    folder = tmp_path / SECRET / HF
    path = folder / "t.jsonl"

    def broken(*args: Any) -> Any:
        raise RuntimeError(f"401 for {SECRET}")

    monkeypatch.setattr("omnicomp.backend.autograd.aot_autograd.compile_graph", broken)
    with caplog.at_level(logging.DEBUG, "omnicomp"):
        options = {"lowerings": ["eager"], "timeline": str(path)}
        torch.compile(leaking, backend="omni", options=options)(torch.ones(3))
    written = path.read_text()
    found = omnicomp.audit()
    assert any(event.type == "retreat" for event in omnicomp.timeline.events())
    for text in (written, caplog.text, found.to_text(), found.to_json(), found.to_html(), found.summary()):
        assert SECRET not in text
        assert HF not in text
        assert "nobody asked for" not in text
        assert HIDDEN in text or text == found.summary()
        if relative:
            assert str(Path(__file__).parents[2]) not in text
    assert ("tests/safety/test_privacy.py" in written) is True
    assert all(json.loads(line) for line in written.splitlines())


def test_a_token_that_is_set_later_is_hidden_in_the_next_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy.refresh()
    monkeypatch.setenv("NEW_TOKEN", "set-by-the-program")
    privacy.refresh()
    event = Attempt(graph="g0", part="", subgraph="g0", lowering="eager", ok=False, skipped="set-by-the-program")
    assert omnicomp.timeline.current().append(event).to_dict()["skipped"] == HIDDEN


def test_every_field_of_every_type_passes_the_cleaner() -> None:
    cleaner = Cleaner({"SECRET": SECRET})
    for cls in omnicomp.timeline.EVENT_TYPES.values():
        texts = {f.name: SECRET for f in dataclasses.fields(cls) if f.type is str or f.type == "str"}
        others: dict[str, Any] = {
            f.name: _value(f.name, f.type)
            for f in dataclasses.fields(cls)
            if f.name not in texts and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        assert SECRET not in json.dumps(cleaner.value(cls(**texts, **others)).to_dict()), cls


def _value(name: str, kind: Any) -> Any:
    if name == "reason":
        return Reason(code="build_failed", sentence=SECRET)
    return {int: 1, float: 1.0, bool: True}.get(kind, {"eager": 1})


def test_a_removed_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    monkeypatch.setenv("ANOTHER_TOKEN", "x" * 12)
    monkeypatch.setenv("OMNICOMP_PATHS", "relative")
    assert privacy.refresh().text(f"/m.py {'x' * 12}") == f"/m.py {HIDDEN}"


class Opaque:
    def __init__(self, said: str) -> None:
        self.said = said

    def __repr__(self) -> str:
        return f"Opaque({self.said})"


def test_a_value_that_becomes_text_only_when_it_is_written_is_cleaned() -> None:
    harmless = Opaque("nothing")
    options = {"custom_pass": Opaque(SECRET), "other": harmless, "names": {SECRET}, "raw": SECRET.encode()}
    found = Cleaner({"API_KEY": SECRET}).value(Capture(graph="g0", options=options)).options
    assert found == {"custom_pass": f"Opaque({HIDDEN})", "other": harmless, "names": {HIDDEN}, "raw": f"b'{HIDDEN}'"}


class Broken(RuntimeError):
    def __str__(self) -> str:
        raise KeyError("x")


def test_a_value_that_can_not_be_shown_costs_its_text_alone() -> None:
    found = Cleaner({}).value(Capture(graph="g0", options={"x": Broken()})).options
    assert found == {"x": "<Broken, which can't be shown: KeyError>"}
    assert first_line(Broken()) == "Broken: its message can't be shown: KeyError"


def test_log_lines_and_their_tracebacks_are_clean(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOGGED_TOKEN", SECRET)
    privacy.refresh()
    try:
        raise ValueError(f"no {SECRET} \x1b[2J")
    except ValueError:
        privacy.logger("omnicomp.test").warning("it said %s", SECRET, exc_info=True)
    assert SECRET not in caplog.text
    assert "\x1b" not in caplog.text
    assert f"ValueError: no {HIDDEN}" in caplog.text
