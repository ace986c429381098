"""Privacy of the timeline: secrets are always removed, and absolute paths on request.

An event may quote an option, a path or the message of an exception, and any of these may hold what its reader must not
see. So each text of an event is cleaned before it is kept, for the views in the process as well as for files.
"""

import copy
import dataclasses
import getpass
import os
import re
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = ["HIDDEN", "PATHS", "PATHS_VARIABLE", "Cleaner", "cleaner", "refresh"]

HIDDEN: Final = "***"
PATHS_VARIABLE: Final = "OMNICOMP_PATHS"
PATHS: Final = ("absolute", "relative")

# Names of environment variables and options whose values are nobody else's business.
_SECRET_NAME: Final = re.compile(
    r"token|secret|passw|passphrase|credential|api_?key|access_?key|private|auth(?!or)|cookie|signature|webhook|dsn$"
    r"|connection_?string|database_?url",
    re.IGNORECASE,
)
# Shorter values (`1`, `main`) are no secrets, and would be found in words.
_SHORTEST: Final = 8
# Credentials that tell what they are: of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, PyPI, and JSON web tokens.
_TOKEN: Final = (
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bsk-[\w-]{20,}"
    r"|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bpypi-[\w-]{20,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
)
_IN_URL: Final = (
    r"(?<=://)[^/\s@]+(?=@)|(?<=[?&])[\w.-]*(?i:token|secret|sig|signature|password|key|credential)=[^&\s'\"]+"
)
_IN_HEADER: Final = r"(?<=\bBearer )[\w.~+/-]{8,}=*"
_FORMS: Final = re.compile("|".join([_TOKEN, _IN_URL, _IN_HEADER]))
# A text without any of these has none of those, which is found out a hundred times as fast.
_HINTS: Final = (
    *("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "xox", "AKIA", "ASIA", "pypi-"),
    *("eyJ", "://", "?", "&", "Bearer "),
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
        secrets = sorted(
            {value for name, value in environment.items() if len(value) >= _SHORTEST and _SECRET_NAME.search(name)},
            key=lambda value: -len(value),
        )
        self._secrets = [value for value in secrets if not _is_folder(value)]
        self._places: dict[str, str] = {}
        if environment.get(PATHS_VARIABLE) == "relative":
            self._places = _places(environment)
        longest = sorted(self._places, key=lambda place: -len(place))
        # A folder counts where a path begins, not in the middle of another one.
        self._path = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, longest))})(?![^/\s:'\")\]])/?")

    def text(self, text: str) -> str:
        """The text with secrets hidden, and with paths relative to the project if that is asked for."""
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, HIDDEN)
        for hint in _HINTS:
            if hint in text:
                text = _FORMS.sub(_hide, text)
                break
        for place in self._places:
            if place in text:
                return self._path.sub(self._relative, text)
        return text

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
        elif not isinstance(value, (int, float, complex)) and value is not None:
            # What is not text becomes text where it is written.
            told = str(value)
            cleaned = self.text(told)
            found = value if cleaned == told else cleaned
        return found

    def _entry(self, key: Any, item: Any) -> Any:
        hidden = isinstance(item, str) and item and isinstance(key, str) and _SECRET_NAME.search(key)
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


def _hide(match: "re.Match[str]") -> str:
    name, equals, _ = match.group().partition("=")
    in_url = equals and match.start() and match.string[match.start() - 1] in "?&"
    return f"{name}={HIDDEN}" if in_url else HIDDEN


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
_seen: tuple[tuple[str, str], ...] = ()


def cleaner() -> Cleaner:
    """The cleaner for this process' environment, as it was when `refresh` was called last."""
    return _current if _current is not None else refresh()


def refresh() -> Cleaner:
    """Read the environment again: the program may have set a token since."""
    global _current, _seen
    named = ((name, value) for name, value in os.environ.items() if _SECRET_NAME.search(name))
    seen = (*named, (PATHS_VARIABLE, os.environ.get(PATHS_VARIABLE, "")), ("cwd", _cwd()))
    if _current is None or seen != _seen:
        _current, _seen = Cleaner(os.environ), seen
    return _current


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder was removed under the program
        return ""
