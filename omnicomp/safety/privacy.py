"""Secrets are removed from every text before it is kept, printed or sent, and absolute paths on request.

The text of an event, a log line, a stored file or an error may quote an option, a path or the message of an exception,
and any of these may hold what its reader must not see. Three things are secrets: values of environment variables with
the name of a secret, values that a text assigns to such a name, and credentials that are known by their form.
"""

import base64
import binascii
import copy
import dataclasses
import getpass
import logging
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from omnicomp.safety.escapes import printable, shown

HIDDEN: Final = "***"
PATHS_VARIABLE: Final = "OMNICOMP_PATHS"
PATHS: Final = ("absolute", "relative")

# In any part of a name, also where words are not separated (`PGPASSWORD`).
_SECRET_PART: Final = re.compile(
    r"secret|passw|passphrase|passcode|credential|api[_-]?key|(?:access|account|private|signing|encryption)[_-]?key|auth(?!or)"
    r"|authoriz|cookie|signature|webhook|dsn$|connection_?string|database_?url|bearer|(?:^|_)jwt(?:_|$)",
    re.IGNORECASE,
)
# Words of a name, in `HF_TOKEN`, `apiToken`, `db.pass`.
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_TOKEN_OF_TEXT: Final = frozenset(
    "bos eos pad unk sep cls mask num max min next per special image audio first last n seq".split()
)
_KEY_OF_DATA: Final = frozenset(
    "cache sort primary foreign partition routing public lookup group map dict index num guard hash pub".split()
)
_PASS_OF_CODE: Final = frozenset(
    "pre post custom disable skip by first second last forward backward num grad debug joint compiler opt".split()
)
_ACCOUNTS: Final = frozenset("db user root admin my mysql pg postgres redis smtp mail ftp ssh ldap login proxy".split())
_AFTER_TOKEN: Final = frozenset("id ids type len length count size dim limit budget file path url embedding".split())
_PASSWORD: Final = re.compile(r"://[^/\s:@]*:([^/\s@]{8,})@")
# Shorter values (`1`, `main`) are no secrets, and would be found in words.
_SHORTEST: Final = 8
# Names in code are seldom so long, and keys are.
_KEY_LENGTH: Final = 16
# What JSON's readers take for a number; larger ones are texts.
_BITS: Final = 64
# Credentials that tell what they are: of Hugging Face, GitHub, GitLab, OpenAI, Anthropic, Stripe, Slack, AWS, Google,
# PyPI, npm, Docker, SendGrid, Shopify, DigitalOcean, and JSON web tokens.
_TOKEN: Final = (
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bgl(?:pat|rt|cbt|dt)-[\w-]{16,}"
    r"|\bsk-[\w-]{20,}|\b[spr]k_(?:live|test)_[A-Za-z0-9]{8,}|\bwhsec_[A-Za-z0-9+/]{16,}|\bxox[abeoprs]-[\w-]{10,}"
    r"|\bxapp-[\w-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{10,}|\bya29\.[\w-]{16,}|\bGOCSPX-[\w-]{16,}"
    r"|\bpypi-[\w-]{20,}|\bnpm_[A-Za-z0-9]{16,}|\bdckr_pat_[\w-]{16,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\bshp(?:at|ca|pa|ss)_[A-Fa-f0-9]{16,}|\bdo[opr]_v1_[a-f0-9]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*"
)
# The last `@` ends a password, which may hold others and slashes; `//host:8080/a@b` has none.
_IN_URL: Final = (
    r"(?<=://)[^\s'\"<>:/@?#]{0,128}:(?!\d{1,5}/)[^\s'\"<>]{1,256}(?=@)|(?<=://)[^/\s'\"<>?#]{1,256}(?=@)"
    r"|(?<=[?&;])[\w.-]*(?i:token|secret|sig|signature|password|passwd|pwd|key|credential)=[^&\s'\"]+"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
)
_IN_HEADER: Final = (
    r"(?i:(?<=authorization: bearer )|(?<=authorization: basic ))[^\s'\"]{4,}"
    r"|(?i:(?<=authorization: ))(?!(?i:bearer|basic) )(?:\w+ )?[^\s'\"]{6,}"
    r"|(?<=\b[Bb]earer )(?=\S*\d|\S{20})[\w.~+/-]{8,}=*|(?<=\b[Bb]asic )[A-Za-z0-9+/]{8,}={0,2}"
)
# A key is hidden to its end, or to the end of the text if that was cut off.
_PEM: Final = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)"
_FORMS: Final = re.compile("|".join([_PEM, _TOKEN, _IN_URL, _IN_HEADER]))
# A text without any of these has none of those, which is found out a hundred times as fast.
_HINTS: Final = (
    *"hf_ ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- glrt- glcbt- gldt- sk- k_live_ k_test_ whsec_ xox xapp-".split(),
    *"AKIA ASIA AIza ya29. GOCSPX- pypi- npm_ dckr_pat_ SG. shpat_ shpca_ shppa_ shpss_ doo_v1_ dop_v1_".split(),
    *("eyJ", "://", "?", "&", "earer ", "asic ", "uthorization: ", "PRIVATE KEY", "dor_v1_", "slack.com/services/"),
)
# `DB_PASS=x`, `password: "x"`, `{'api_key': 'x'}`; a bare value only where it is written as in a shell or a header.
_ASSIGNED: Final = re.compile(
    r"""(?<![\w.])(?<!\w-)(?P<name>[A-Za-z_][\w.-]{0,63})(?P<is>\\?["']?(?P<sign>\s?[=:]\s?))"""
    r"""(?:(?P<quote>\\?["'])(?P<quoted>[^\s"'\\\[\](){}]{4,})(?=\\?["'])|(?P<bare>[^\s"',;&\\\[\](){}]{6,}))"""
)
# `--password x` on a command line, or `'--password', 'x'` in one that Python shows.
_OPTION: Final = re.compile(
    r"""(?P<name>--[A-Za-z][\w-]{1,63})(?P<gap> +|["'], ?["'])(?P<value>[^\s"',;-][^\s"',;]{3,})"""
)
_ASSIGNED_HINTS: Final = (
    *(
        "pass",
        "pwd",
        "token",
        "secret",
        "key",
        "auth",
        "cred",
        "cookie",
        "signature",
        "webhook",
        "bearer",
        "jwt",
        "dsn",
    ),
    "connection",
)

T = TypeVar("T")


class Cleaner:
    """Removes secrets from texts and events, and makes paths relative to the project on request."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Look up what is to be hidden.

        Args:
            environment: the process' variables. Values of those with the name of a secret are hidden, and
                `OMNICOMP_PATHS=relative` asks for relative paths.
        """
        found = {
            text
            for name, value in environment.items()
            if len(value) >= _SHORTEST
            for text in _texts_of(name, value)
            if len(text) >= _SHORTEST
        }
        self._secrets = sorted(found, key=lambda text: -len(text))
        self._places: dict[str, str] = {}
        if environment.get(PATHS_VARIABLE) == "relative":
            self._places = _places(environment)
        longest = sorted(self._places, key=lambda place: -len(place))
        # A folder counts where a path begins, not in the middle of another one.
        self._path = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, longest))})(?![^/\s:'\")\]])/?")

    def text(self, text: str) -> str:
        """The text with secrets hidden, and with paths relative to the project if that is asked for."""
        text = self.secrets(text)
        for place in self._places:
            if place in text:
                return self._path.sub(self._relative, text)
        return text

    def secrets(self, text: str) -> str:
        """The text with secrets hidden, for files of which this machine needs the paths."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        for hint in _HINTS:
            if hint in text:
                text = _FORMS.sub(_hide, text)
                break
        if "=" in text or ":" in text or "--" in text:
            lower = text.lower()
            for hint in _ASSIGNED_HINTS:
                if hint in lower:
                    return _OPTION.sub(_hide_option, _ASSIGNED.sub(_hide_assigned, text))
        return text

    def secrets_in(self, value: T) -> T:
        """Texts at any depth of what JSON can hold, with secrets hidden."""
        found: Any = value
        if isinstance(value, str):
            found = self.secrets(value)
        elif isinstance(value, (tuple, list)):
            found = [self.secrets_in(item) for item in value]
        elif isinstance(value, dict):
            found = {key: self.secrets_in(item) for key, item in found.items()}
        return found

    def value(self, value: T) -> T:
        """Clean texts at any depth of an event's field; what holds none is returned as it is."""
        found: Any = value
        if isinstance(value, str):
            found = self.text(value)
        elif isinstance(value, (tuple, list)):
            items = [self.value(item) for item in value]
            kind = list if isinstance(value, list) else tuple
            found = value if all(new is old for new, old in zip(items, value, strict=True)) else kind(items)
        elif isinstance(value, dict):
            found = {self.value(key): self._entry(key, item) for key, item in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = self._dataclass(value)
        elif isinstance(value, (set, frozenset)):
            found = type(value)(self.value(item) for item in found)
        elif isinstance(value, int):
            found = value if value.bit_length() <= _BITS else shown(value)
        elif not isinstance(value, (float, complex)) and value is not None:
            # What is not text becomes text where it is written.
            try:
                told = str(value)
            except Exception:  # noqa: BLE001 - the class is anyone's; the text says so
                return self.text(shown(value))  # type: ignore[return-value]
            cleaned = self.text(told)
            found = value if cleaned == told else cleaned
        return found

    def _entry(self, key: Any, item: Any) -> Any:
        hidden = (
            isinstance(item, (str, bytes, list, tuple, set)) and item and isinstance(key, str) and is_secret_name(key)
        )
        return HIDDEN if hidden else self.value(item)

    def _dataclass(self, value: Any) -> Any:
        changed: Any = None
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            if isinstance(old, (int, float)) or old is None:
                continue
            new = self.value(old)
            if new is not old and new != old:
                # Not `replace`: a reason of a newer version keeps a code that this one would refuse.
                changed = copy.copy(value) if changed is None else changed
                object.__setattr__(changed, field.name, new)
        return value if changed is None else changed

    def _relative(self, match: "re.Match[str]") -> str:
        found = match.group()
        name = self._places[found.rstrip("/") if found != "/" else found]
        if not name:
            return "" if found.endswith("/") else "."
        return f"{name}/" if found.endswith("/") else name


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of that name holds a secret: `DB_PASS` and `apiToken`, not `max_tokens`."""
    if _SECRET_PART.search(name):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    before, last = ["", "", *words][-2:]
    if last == "token":
        return before not in _TOKEN_OF_TEXT
    if last == "tokens":
        return before in ("api", "access", "auth", "refresh")
    if last == "pwd":
        return before != ""  # `PWD` is a folder
    if last == "pass":
        return before in _ACCOUNTS or (name.isupper() and before not in _PASS_OF_CODE)
    if name.isupper() and "token" in words:
        at = words.index("token")
        return words[at + 1] not in _AFTER_TOKEN and not _TOKEN_OF_TEXT & set(words[:at])
    return last == "key" and name.isupper() and before not in _KEY_OF_DATA


def _texts_of(name: str, value: str) -> Iterator[str]:
    """What of a variable must not be seen: the password of a URL; of a secret all, its lines, its URL form."""
    yield from _PASSWORD.findall(value)
    if _is_folder(value) or not is_secret_name(name):
        return
    yield value
    yield quote(value, safe="")
    yield from (line.strip() for line in value.splitlines())


def _hide(match: "re.Match[str]") -> str:
    found = match.group()
    before = match.string[: match.start()][-8:].lower()
    if before.endswith("basic ") and not before.endswith(": basic ") and not _is_basic(found):
        return found
    name, equals, _ = found.partition("=")
    in_url = equals and before[-1:] in ("?", "&", ";")
    return f"{name}={HIDDEN}" if in_url else HIDDEN


def _is_basic(text: str) -> bool:
    """Whether a text is a name and a password as HTTP encodes them, and not the next word of a sentence."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False


def _hide_option(match: "re.Match[str]") -> str:
    return f"{match['name']}{match['gap']}{HIDDEN}" if is_secret_name(match["name"]) else match.group()


def _hide_assigned(match: "re.Match[str]") -> str:
    name, bare = match["name"], match["bare"]
    if not is_secret_name(name) or (match["quoted"] or bare).startswith(HIDDEN):
        return match.group()
    if bare is None:
        return f"{name}{match['is']}{match['quote']}{HIDDEN}"
    # Without quotes it may be code: `token = tokenizer`, `key=self.key`.
    mixed = any(map(str.isdigit, bare)) and (match["sign"] != " = " or (len(bare) >= _KEY_LENGTH and "." not in bare))
    told = name.isupper() or mixed
    return f"{name}{match['is']}{HIDDEN}" if told else match.group()


def _is_folder(value: str) -> bool:
    """Whether a value is a path, as `XAUTHORITY` and `SSH_AUTH_SOCK` have; paths are no secrets."""
    return value.startswith(("/", "~")) and "\n" not in value and os.path.exists(value)


def _places(environment: Mapping[str, str]) -> dict[str, str]:
    """Folders with their replacements; the project's is empty."""
    cache = environment.get("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        cache = cache or os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    except (KeyError, OSError):  # the user has no name here
        pass
    found = {str(Path.home()): "~", sysconfig.get_path("stdlib"): "python"} if _has_home() else {}
    found |= {cache: "inductor-cache"} if cache else {}
    found |= {sysconfig.get_path(name): "site-packages" for name in ("purelib", "platlib")}
    found[_project()] = ""
    return {place.rstrip("/"): name for place, name in found.items() if len(place) > 1}


def _has_home() -> bool:
    try:
        return bool(Path.home())
    except RuntimeError:
        return False


def _project() -> str:
    """The nearest folder above the current one that is a checkout or has a `pyproject.toml`; else the current one."""
    here = Path(_cwd())
    for folder in (here, *here.parents) if here.is_absolute() else ():
        if any((folder / name).exists() for name in (".git", "pyproject.toml", "setup.py")):
            return str(folder)
    return str(here)


_current: Cleaner | None = None
_seen: tuple[dict[str, str], str] = ({}, "")


def cleaner() -> Cleaner:
    """The cleaner for this process' environment, as it was when `refresh` was called last."""
    return _current if _current is not None else refresh()


def refresh() -> Cleaner:
    """Read the environment again: the program may have set a token since."""
    global _current, _seen
    seen = (dict(os.environ), _cwd())
    if _current is None or seen != _seen:
        _current, _seen = Cleaner(os.environ), seen
    return _current


def logger(name: str) -> logging.Logger:
    """The logger of a name, whose lines, with tracebacks, hold no secrets and nothing that a terminal obeys."""
    found = logging.getLogger(name)
    found.addFilter(_clean_record)  # the same one is added once
    return found


def _clean_record(record: logging.LogRecord) -> bool:
    found = cleaner()
    record.msg, record.args = printable(found.text(record.getMessage())), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = printable(found.text(logging.Formatter().formatException(record.exc_info)))
    return True


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder was removed under the program
        return ""
